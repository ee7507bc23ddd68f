"""Parameters that were frozen when shard() was called, and train from now on.

Their units become trained units: with a master, gradients, and room for optimizer state. All other units stay as they
are, with their state. Everything that depends on the list of units is made anew, before the next forward begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch

from onefold.comm.agreement import agree, digest, together
from onefold.errors import CommError
from onefold.model.dtensor_shards import local_tensor, set_local_tensor
from onefold.model.resolved import Resolved
from onefold.model.survey import check_trainable
from onefold.model.unit_spec import UnitSpec
from onefold.runtime.done_alike import REMEDY, UNFROZEN
from onefold.runtime.engine import Engine
from onefold.runtime.refusals import Call
from onefold.runtime.unshard import part
from onefold.state.build import build_unit
from onefold.state.rounding import narrowed
from onefold.state.unit import Unit

WHERE = "unfreezing"


@torch.inference_mode(False)
@torch.no_grad()
def unfreeze(engine: Engine, attach: Callable[[], None]) -> None:
    """Lets parameters that have been unfrozen train. `attach` attaches the engine to its model again. Collective."""
    names = set(engine.unfrozen_names())
    _agree(engine, sorted(names))
    if not names:
        return
    engine.prepare_units_change()
    engine.freezing.train_again()
    before = {unit.name: unit for unit in engine.all_units}
    resolved = _resolved(engine.resolved, names)
    both = list(zip(engine.resolved.units, resolved.units, strict=True))
    changed = [unit for old, spec in both if spec is not old and (unit := before.get(old.layout.name))]
    part(engine, {unit: [param.dtype for param in unit.params] for unit in changed})
    units = [before[old.layout.name] if spec is old else _trained(engine, spec) for old, spec in both if spec.flat]
    engine.change_units(resolved, units)
    attach()


def _agree(engine: Engine, names: Sequence[str]) -> None:
    """Raises on every rank if ranks unfroze different parameters, or if they cannot be trained now."""
    error: Exception | None = None
    try:
        if names:
            engine.check(Call.UNFREEZE)
        params = dict(engine.model.named_parameters())
        for name in names:
            check_trainable(name, params[name], engine.resolved.precision)
    except Exception as mistake:
        error = mistake
    said = partial(agree, engine.everyone, [UNFROZEN.format(name) for name in names], error, where=WHERE, remedy=REMEDY)
    try:
        together(engine.comms, said, where=WHERE)
    except CommError as error:
        if names:
            raise CommError(f"{error} {names[0]} was unfrozen here: {REMEDY}") from error
        raise


def _resolved(before: Resolved, names: set[str]) -> Resolved:
    """What shard() would have decided about the same units, had these parameters been trained."""
    units = tuple(
        _as_trained(spec) if not spec.trained and any(slot.name in names for slot in spec.layout.slots) else spec
        for spec in before.units
    )
    kinds = {slot.name: spec.layout.kind for spec in units for slot in spec.layout.slots}
    params = tuple(info._replace(kind=kinds[info.name]) for info in before.params)
    return dataclasses.replace(before, units=units, params=params, digest=digest([before.digest, *sorted(names)]))


def _as_trained(spec: UnitSpec) -> UnitSpec:
    return dataclasses.replace(spec, trained=True, layout=dataclasses.replace(spec.layout, kind=str(spec.dtype)))


def _trained(engine: Engine, spec: UnitSpec) -> Unit:
    """A trained unit of parameters that were frozen, which have all their values now."""
    params = dict(engine.model.named_parameters())
    members = [params[slot.name] for slot in spec.layout.slots]
    for param in members:
        wide, now = engine.loaded_unfrozen.get(id(param)), local_tensor(param).detach()
        if wide is not None:  # elements that were written since it was loaded do not round to these
            set_local_tensor(param, torch.where(narrowed(wide, now.dtype) == now, wide, now.float()))
    return build_unit(spec, members, engine.resolved.precision, engine.comms, engine.pool, engine.tiers)
