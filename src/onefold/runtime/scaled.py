"""What losses are multiplied by, so that small gradients do not vanish in fp16: one number per step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_running: list[float] = []  # the scales of scaled backwards, the innermost last


@contextmanager
def scaled_backward(scale: float) -> Iterator[None]:
    """Inside, gradients are multiplied by `scale`."""
    _running.append(scale)
    try:
        yield
    finally:
        _running.pop()


def running_scale() -> float | None:
    """The scale of the backward that runs now; None if its loss is not scaled."""
    return _running[-1] if _running else None


class GradientScale:
    """What the gradients of a step are multiplied by, as its first backward has it. `needed` by fp16."""

    def __init__(self, *, needed: bool) -> None:
        self._needed = needed
        self._value: float | None = None

    @property
    def value(self) -> float:
        return 1.0 if self._value is None else self._value

    @property
    def running(self) -> float:
        """What the loss of the running backward is multiplied by."""
        return running_scale() or 1.0

    @property
    def missing(self) -> bool:
        """True if the running backward has no scale and needs one."""
        return self._needed and running_scale() is None

    @property
    def changed(self) -> bool:
        """True if earlier gradients have another scale than the running backward."""
        return self._value is not None and self._value != self.running

    def take(self) -> None:
        """Gradients have the scale of the running backward."""
        self._value = self.running

    def forget(self) -> None:
        """Gradients are dropped, or are zeros, which have no scale."""
        self._value = None
