"""What users give to an Optimizer, checked: its settings, and param groups in all forms that torch takes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from onefold.errors import ConfigError, OnefoldError, OptimizerError
from onefold.optim.loss_scale import LossScale
from onefold.optim.spikes import Spikes


def check_policies(half: bool, loss_scale: Any, on_nonfinite: Any, step_in_backward: Any, skip_spikes: Any) -> None:
    if on_nonfinite not in ("raise", "skip"):
        raise ConfigError(f"on_nonfinite={on_nonfinite!r} is unknown; use 'raise' or 'skip'")
    if loss_scale is not None and not (half and isinstance(loss_scale, LossScale)):
        raise ConfigError(f"loss_scale={loss_scale!r}: give a LossScale, and only with precision='fp16'")
    if type(step_in_backward) is not bool:
        raise ConfigError(f"step_in_backward={step_in_backward!r} is neither True nor False")
    if step_in_backward and half:
        raise ConfigError("step_in_backward=True cannot skip a step, which fp16 needs; train in bf16")
    if not isinstance(skip_spikes, Spikes | None):
        raise ConfigError(f"skip_spikes={skip_spikes!r} is no onefold.Spikes; give skip_spikes=onefold.Spikes()")
    if step_in_backward and (on_nonfinite == "skip" or skip_spikes is not None):
        raise ConfigError("step_in_backward=True cannot skip a step: it looks at no norm before it updates")


def check_finite(settings: dict[str, Any], where: str) -> None:
    lr = settings.get("lr")
    readable = isinstance(lr, int | float) or (isinstance(lr, Tensor) and lr.device.type == "cpu")
    if readable and not math.isfinite(lr or 0.0):
        raise OptimizerError(f"lr={lr} in {where} is not finite: look at the LR schedule")


def listed(group: Any) -> Any:
    """A param group whose parameters are no generator, which could be read once."""
    if not isinstance(group, dict) or not hasattr(group.get("params"), "__next__"):
        return group
    return {**group, "params": list(group["params"])}


def ids_of(groups: list[Any]) -> frozenset[int]:
    """The ids of all parameters of param groups, which are given as parameters or as pairs of names and parameters."""
    found = []
    for group in groups:
        given = group.get("params") if isinstance(group, dict) else group
        found += [given] if isinstance(given, Tensor | None) else list(given)
    return frozenset(id(one[1] if isinstance(one, tuple) and len(one) == 2 else one) for one in found)


@contextmanager
def as_optimizer_errors() -> Iterator[None]:
    """Raises torch's own errors about param groups as OptimizerError, with a remedy."""
    try:
        yield
    except OnefoldError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise OptimizerError(
            f"the param groups cannot be used: {error}; give groups=[{{'params': [parameters of the model], ...}}], "
            f"each parameter in one group"
        ) from error
