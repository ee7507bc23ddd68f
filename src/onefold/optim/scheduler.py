"""Learning-rate schedules that count the steps that updated parameters, not those that were skipped."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from onefold.errors import ConfigError
from onefold.optim.optimizer import Optimizer


class Scheduler:
    """A torch LR scheduler that counts only steps that were taken: for fp16, where a step may be skipped.

    `scheduler` is a torch scheduler class, whose settings are `kwargs`, or an instance. Attributes are those of the
    torch scheduler.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(4, 4), stage=2)
    >>> optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    >>> scheduler = onefold.Scheduler(optimizer, torch.optim.lr_scheduler.StepLR, step_size=10)
    >>> scheduler.step()
    >>> scheduler.last_epoch
    0
    """

    def __init__(self, optimizer: Optimizer, scheduler: type[LRScheduler] | LRScheduler, **kwargs: Any) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"Scheduler needs a onefold.Optimizer, found {type(optimizer).__name__}")
        by_class = isinstance(scheduler, type) and issubclass(scheduler, LRScheduler)
        if not (by_class or (isinstance(scheduler, LRScheduler) and not kwargs)):
            raise ConfigError(f"{scheduler!r} is neither a torch scheduler class, with its settings, nor a scheduler")
        self._optimizer = optimizer
        self.inner: Any = scheduler(optimizer, **kwargs) if isinstance(scheduler, type) else scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the torch scheduler, unless the optimizer's last step was skipped."""
        if self._optimizer.stepped:
            self.inner.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not made yet, or being copied
            raise AttributeError(name)
        return getattr(self.inner, name)
