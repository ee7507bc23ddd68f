"""Lightning's precisions as settings of Onefold, which casts by itself: nothing runs under autocast.

| Lightning | the batch | layers compute in | the optimizer updates |
|---|---|---|---|
| 32-true | as it is | fp32 | fp32 |
| bf16-mixed, 16-mixed | as it is; layers cast their inputs | bf16, fp16 | an fp32 master |
| bf16-true | cast | bf16 | an fp32 master |
"""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

import torch

from onefold import ConfigError, LossScale, Precision, Zero
from onefold.lightning.framework import VERSION

PLAIN = "32-true"
CASTING = {  # the empty tuple: no input of training_step is cast, so that labels keep their dtype
    "bf16-mixed": Precision(compute="bf16", cast_inputs=()),
    "16-mixed": Precision(compute="fp16", cast_inputs=()),
    "bf16-true": Precision(compute="bf16"),
}
NAMING = ("Precision", "MixedPrecision", "HalfPrecision")  # plugins of Lightning that stand for a precision


class GradScaler(Protocol):
    """What is read of a torch.amp.GradScaler."""

    def get_scale(self) -> float: ...
    def get_growth_factor(self) -> float: ...
    def get_backoff_factor(self) -> float: ...
    def get_growth_interval(self) -> int: ...


class Settings(NamedTuple):
    """What a strategy shards with, and the loss scale of fp16."""

    zero: Zero
    loss_scale: LossScale | None = None

    @property
    def name(self) -> str:
        """Lightning's name for the precision."""
        mine = Precision.of(self.zero.precision)
        same = [name for name, known in CASTING.items() if known == mine]
        alike = [name for name, known in CASTING.items() if known.compute is mine.compute]
        return [*same, *alike, PLAIN][0]

    @property
    def compute(self) -> torch.dtype:
        """The dtype of forward and backward."""
        found = Precision.of(self.zero.precision).compute
        assert isinstance(found, torch.dtype)
        return found

    def with_plugin(self, plugin: object) -> Settings:
        """These settings with the precision that a plugin of Lightning's stands for. Raises if the plugin does more
        than that, or if the settings have a precision of their own."""
        name = str(getattr(plugin, "precision", ""))
        if type(plugin).__name__ not in NAMING or name not in (PLAIN, *CASTING):
            raise ConfigError(
                f"Lightning {VERSION} was given precision {name!r} ({type(plugin).__name__}); under Onefold use one of "
                f"{', '.join([PLAIN, *CASTING])}, or give precision= to the strategy instead"
            )
        if name == PLAIN:
            return self
        if Precision.of(self.zero.precision) != Precision.of("fp32"):
            raise ConfigError(
                f"precision={name!r} was given to Lightning and precision={self.zero.precision!r} to the strategy; "
                f"give one of them"
            )
        scaler: GradScaler | None = getattr(plugin, "scaler", None)
        scale = self.loss_scale if scaler is None or self.loss_scale else _as_loss_scale(scaler)
        return Settings(replace(self.zero, precision=CASTING[name]), scale)


def checked(accumulate: Literal["once", "each"]) -> Literal["once", "each"]:
    """Raises unless micro-batches can be accumulated so."""
    if accumulate not in ("once", "each"):
        raise ConfigError(f"accumulate={accumulate!r} is unknown; use 'once' or 'each'")
    return accumulate


def settings_of(zero: Zero | None, loss_scale: LossScale | None, fields: dict[str, Any]) -> Settings:
    """What was given to a strategy: a Zero, or its fields."""
    if zero is not None and fields:
        raise ConfigError(
            f"zero= and {', '.join(sorted(fields))} were given; give one Zero, or its fields: ZeroStrategy(stage=3)"
        )
    if zero is not None and not isinstance(zero, Zero):
        raise ConfigError(f"zero={zero!r} is no onefold.Zero; give zero=onefold.Zero(stage=3), or stage=3")
    return Settings(zero or _made(fields), loss_scale)


def _made(fields: dict[str, Any]) -> Zero:
    known = [field.name for field in fields_of(Zero)]
    if unknown := sorted(set(fields) - set(known)):
        raise ConfigError(f"{', '.join(unknown)}: no setting of the strategy, nor of onefold.Zero ({', '.join(known)})")
    return Zero(**fields)


def _as_loss_scale(scaler: GradScaler) -> LossScale:
    growth, backoff = scaler.get_growth_factor(), scaler.get_backoff_factor()
    if growth * backoff != 1.0:
        raise ConfigError(
            f"the GradScaler grows by {growth} and falls by {backoff}; Onefold's loss scale has one factor for both: "
            f"give the strategy loss_scale=onefold.LossScale(factor={growth})"
        )
    return LossScale(initial=scaler.get_scale(), growth_interval=scaler.get_growth_interval(), factor=growth)
