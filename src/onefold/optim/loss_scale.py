"""The loss scale of fp16: how it grows and falls. Numbers only.

Small gradients vanish in fp16, so the loss is multiplied by a scale, and the gradients are divided by it before the
update. If gradients overflow on any rank, the step is skipped and the scale falls; after enough good steps in a row it
grows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onefold.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """How the loss scale of fp16 grows and falls: the setting `loss_scale` of `Optimizer`.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(4, 4), precision="fp16")
    >>> scale = onefold.LossScale(initial=1024.0)
    >>> onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3, loss_scale=scale).loss_scale
    1024.0
    """

    initial: float = 2.0**16
    """The scale of the first step."""

    growth_interval: int = 2000
    """After this many steps in a row without an overflow the scale grows."""

    factor: float = 2.0
    """The scale is multiplied by this when it grows, and divided by it when it falls."""

    hysteresis: int = 1
    """The scale falls at this overflow since it last grew, counted from 1, and at each one after it. Earlier overflows
    only skip their step."""

    floor: float = 1.0
    """The scale falls no lower. An overflow at this scale raises `PrecisionError`."""

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "floor"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise ConfigError(f"LossScale({name}={value!r}) is not a positive number")
        if self.factor <= 1 or self.floor > self.initial:
            raise ConfigError(f"{self}: factor must exceed 1 and initial be at least floor")
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"LossScale({name}={value!r}) is not a positive whole number")


class Scaler:
    """The current loss scale; equal on every rank, since all ranks count the same overflows."""

    def __init__(self, settings: LossScale) -> None:
        self.settings = settings
        self.scale = float(settings.initial)
        self._good = 0
        self._borne = 0

    def good(self) -> None:
        """Counts a step without overflow, after which the scale may grow."""
        self._good += 1
        if self._good >= self.settings.growth_interval:
            self.scale = min(self.scale * self.settings.factor, 2.0**127)
            self._good = self._borne = 0

    def overflow(self) -> bool:
        """Counts a skipped step, after which the scale may fall. False if the scale is at its floor already."""
        self._good = 0
        self._borne += 1
        if self._borne < self.settings.hysteresis:
            return True
        if self.scale <= self.settings.floor:
            return False
        self.scale = max(self.scale / self.settings.factor, self.settings.floor)
        return True

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good": self._good, "borne": self._borne}

    def load(self, state: dict[str, float]) -> None:
        self.scale, self._good, self._borne = float(state["scale"]), int(state["good"]), int(state["borne"])
