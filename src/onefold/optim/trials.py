"""What trials of optimizer classes share: steps without hooks, settings, and what to use instead of a refused class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

STEPS = 3


@contextmanager
def on_numbers() -> Iterator[None]:
    """Inside, a class runs on numbers, also in a rehearsal, and draws none from the user's random generator."""
    with unset_fake_temporarily(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        yield


REMEDY = "Use an element-wise class: SGD, Adam, AdamW, Adagrad, RMSprop, NAdam"


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """Steps without the hooks and profiler ranges that torch adds: those are for the Optimizer that users call."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def group_settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {key: repr(value) for key, value in optimizer.param_groups[0].items() if key != "params"}
