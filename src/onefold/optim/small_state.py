"""Optimizer(state=…): the form of the optimizer state, and what does not go with a small one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from onefold.cost.states import check_form
from onefold.errors import ConfigError
from onefold.optim.kernels.rule import knows
from onefold.runtime.engine import Engine
from onefold.settings.placement import Tier


class StateForm(NamedTuple):
    """The form in which moments are kept, and the seed of the random bits that round them."""

    name: str = "fp32"  # or bf16, 8bit
    seed: int = 0

    @property
    def small(self) -> bool:
        return self.name != "fp32"


FP32 = StateForm()


def form_of(name: Any, seed: Any) -> StateForm:
    """From the settings of an Optimizer, checked."""
    check_form(name, "", known=True)
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise ConfigError(f"state_seed={seed!r} is not a whole number from 0 on, below 2**63")
    return StateForm(name, seed)


def check_small(engine: Engine, form: StateForm, cls: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
    """Raises if a class with these settings, or a unit of the model, cannot have state in a small form."""
    if not form.small:
        return
    check_form(form.name, cls.__name__, known=knows(cls, settings))
    for unit in engine.units:
        if not unit.dtypes.narrow and unit.dtypes.compute is not torch.float32:
            raise ConfigError(
                f"state={form.name!r} is for parameters that are updated in fp32, and unit {unit.name} is "
                f"{unit.dtypes.compute}; use state='fp32'"
            )
        if unit.placement.optimizer_tier is Tier.DISK:
            raise ConfigError(
                f"state={form.name!r} is kept on the device or on the host, and the optimizer state of unit "
                f"{unit.name} is on disk; use Offload(optimizer='host'), or state='fp32'"
            )
    if form.name == "8bit" and engine.resolved.tensor_shards:
        raise ConfigError(
            f"state='8bit' does not go with parameters that are split over the mesh axis 'tp', such as "
            f"{min(engine.resolved.tensor_shards)}; use state='bf16' or 'fp32'"
        )
