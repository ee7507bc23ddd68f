"""DeepSpeed's learning-rate schedules, as functions of the step. Numbers only.

DeepSpeed counts from -1, before the first step of the optimizer, and 0 before its second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from onefold.errors import ConfigError

SHORTEST = 2  # steps of a warm-up
KNOWN = {
    "WarmupLR": {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type"},
    "WarmupDecayLR": {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "total_num_steps"},
    "WarmupCosineLR": {"warmup_min_ratio", "warmup_num_steps", "warmup_type", "cos_min_ratio", "total_num_steps"},
}
DECAYS = {name for name, settings in KNOWN.items() if "total_num_steps" in settings}


class Schedule(NamedTuple):
    """One of DeepSpeed's schedules and its settings."""

    kind: str
    settings: Mapping[str, Any]

    def scheduler(self, optimizer: Optimizer) -> LambdaLR:
        """A torch scheduler that sets the learning rates which DeepSpeed's would."""
        missing = self.kind in DECAYS and "total_num_steps" not in self.settings
        if missing:
            raise ConfigError(f"{self.kind} has no total_num_steps; give the number of steps of the run")
        return LambdaLR(optimizer, [self._factor(group["lr"]) for group in optimizer.param_groups])

    def _factor(self, base: float) -> Callable[[int], float]:
        """The learning rate of each step, divided by that of the param group."""
        if not base > 0:
            raise ConfigError(f"lr={base!r} of a param group is not positive; {self.kind} is a multiple of it")
        return lambda step: self.learning_rate(step, base) / base

    def learning_rate(self, step: int, base: float) -> float:
        """The learning rate of the optimizer's step, counted from 0; `base` is that of the param group.

        >>> warm = Schedule("WarmupLR", {"warmup_max_lr": 1.0, "warmup_num_steps": 4, "warmup_type": "linear"})
        >>> [warm.learning_rate(step, 1.0) for step in range(7)]
        [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
        """
        at = step - 1
        if self.kind == "WarmupCosineLR":
            return base * self._cosine(at) if at >= 0 else 0.0
        low = float(self.settings.get("warmup_min_lr", 0.0))
        high = float(self.settings.get("warmup_max_lr", base if self.kind == "WarmupLR" else 0.001))
        return low + (high - low) * self._share(at) if at >= 0 else low

    @property
    def _warm_up(self) -> int:
        return max(SHORTEST, int(self.settings.get("warmup_num_steps", 1000)))

    def _warm(self, at: int) -> float:
        if self.settings.get("warmup_type", "log") == "linear":
            return at / self._warm_up
        return math.log(at + 1) / math.log(self._warm_up)

    def _share(self, at: int) -> float:
        """Of the way from the lowest to the highest learning rate."""
        if at < self._warm_up:
            return self._warm(at)
        if self.kind == "WarmupLR":
            return 1.0
        steps = int(self.settings["total_num_steps"])
        return max(0.0, (steps - at) / max(1, steps - self._warm_up))

    def _cosine(self, at: int) -> float:
        if at < self._warm_up:
            low = float(self.settings.get("warmup_min_ratio", 0.0))
            return low + (1 - low) * self._warm(at)
        low = float(self.settings.get("cos_min_ratio", 0.0001))
        steps = int(self.settings["total_num_steps"])
        way = min(1.0, (at - self._warm_up + 1) / max(1, steps - self._warm_up))
        return low + (1 - low) * (1 + math.cos(math.pi * way)) / 2
