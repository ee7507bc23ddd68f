"""Which update policy an Optimizer has: when its units are updated, on the device or on the host, whole or by shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.errors import OptimizerError
from onefold.optim.host_update import HostUpdates, UpdateOnHost
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.optim.update_at_step import UpdateAtStep
from onefold.optim.update_in_backward import UpdateInBackward
from onefold.optim.update_whole import UpdateWhole, UpdateWholeInBackward
from onefold.optim.whole_tensors import WholeTensors, whole
from onefold.runtime.engine import Engine
from onefold.runtime.update_policy import UpdatePolicy


def choose_policy(
    engine: Engine,
    by_unit: Sequence[UnitOptimizer],
    groups: list[dict[str, Any]],
    tensors: WholeTensors | None,
    *,
    in_backward: bool,
) -> UpdatePolicy:
    """The policy for these unit optimizers and param groups; `tensors` if the class needs whole ones."""
    if tensors is not None:
        each, ownership = [whole(one) for one in by_unit], tensors.ownership
        if in_backward:
            return UpdateWholeInBackward(engine, each, groups, ownership)
        return UpdateWhole(engine, each, ownership)
    on_host = engine.watch.active or any(unit.updated_on_host for unit in engine.units)
    host = HostUpdates(engine, by_unit) if on_host else None
    if in_backward:
        return UpdateInBackward(engine, by_unit, groups, host)
    if host is not None:
        return UpdateOnHost(engine, by_unit, host, groups)
    return UpdateAtStep(engine, by_unit)


def check_beside_others(engine: Engine, mine: frozenset[int], *, half: bool, in_backward: bool) -> None:
    """Raises if an Optimizer of these parameters cannot stand beside those that the model has for others."""
    others = [other for other in engine.optimizers if not other.indices & mine]
    backward = in_backward or not engine.updates.keeps_gradients
    if others and (half or backward or engine.tied.names):
        what = "fp16" if half else "step_in_backward=True" if backward else "a pipeline with tied parameters"
        raise OptimizerError(
            f"{what} needs one Optimizer for all parameters, and this model has another for other parameters; give "
            f"one Optimizer several groups="
        )
