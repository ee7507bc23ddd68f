"""Open full_parameters contexts: while one is open, every parameter is whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onefold.runtime.unsharding import Unsharding


class FullParameterContexts:
    def __init__(self, unsharding: Unsharding) -> None:
        self._unsharding = unsharding
        self._writes: list[bool] = []  # of each open context, the outermost first: whether its writes are kept

    @property
    def open(self) -> bool:
        """True inside full_parameters()."""
        return bool(self._writes)

    @property
    def reading(self) -> bool:
        """True inside one full_parameters() without write=True, and no other."""
        return self._writes == [False]

    @property
    def writable(self) -> bool:
        """True inside full_parameters(write=True)."""
        return any(self._writes)

    @contextmanager
    def enter(self, *, write: bool) -> Iterator[bool]:
        """Unshard all parameters. Yields True if this context is the outermost one whose writes are kept."""
        outermost = write and not self.writable
        self._unsharding.pin_all()
        self._writes.append(write)
        try:
            yield outermost
        finally:
            self._writes.pop()
            self._unsharding.unpin_all()
