"""The learning rate as a pure function of the steps taken: up in a line, then down along half a cosine."""

from __future__ import annotations

import math


def learning_rate(taken: int, *, steps: int, warmup: int, lr: float, min_lr: float) -> float:
    """Of the step after `taken` others.

    >>> [learning_rate(taken, steps=100, warmup=10, lr=1.0, min_lr=0.1) for taken in (0, 9, 99)]
    [0.1, 1.0, 0.1]
    """
    if taken < warmup:
        return lr * (taken + 1) / warmup
    done = min(1.0, (taken - warmup + 1) / max(1, steps - warmup))
    return min_lr + (lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * done))
