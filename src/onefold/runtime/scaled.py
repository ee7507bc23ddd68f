"""The loss scale of the running backward, which scales the gradients of every model that the backward reaches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_running: list[float] = []  # the scales of scaled backwards, the innermost last


@contextmanager
def scaled_backward(scale: float) -> Iterator[None]:
    """Inside runs a backward of a loss that was multiplied by `scale`."""
    _running.append(scale)
    try:
        yield
    finally:
        _running.pop()


def running_scale() -> float | None:
    """The loss scale of the backward that runs now; None if its loss was not scaled."""
    return _running[-1] if _running else None
