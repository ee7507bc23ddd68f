"""Learning-rate schedules that count steps taken, not steps tried."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from onefold.optimizer import Optimizer


class Scheduler:
    """Any torch scheduler; `step` advances it only if the optimizer's last step updated something.

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
        self._optimizer = optimizer
        self.inner = scheduler(optimizer, **kwargs) if isinstance(scheduler, type) else scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        if self._optimizer.stepped:
            self.inner.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
