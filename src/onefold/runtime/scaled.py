"""Which scale the loss of the running backward was multiplied by."""

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
    """Of the backward that runs now; None if nobody scaled it."""
    return _running[-1] if _running else None
