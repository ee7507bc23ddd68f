"""Parameters that were frozen when shard() was called, and train from now on.

Their units become trained units: with a master, gradients, and room for optimizer state. All other units stay as they
are, with their state. Everything that depends on the list of units is made anew, before the next forward begins.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from onefold.comm.agreement import agree, digest, together
from onefold.errors import CommError
from onefold.model.dtensor_shards import local_tensor, set_local_tensor
from onefold.model.resolved import Resolved
from onefold.model.survey import check_trainable
from onefold.model.unit_spec import UnitSpec
from onefold.runtime.done_alike import REMEDY, UNFROZEN
from onefold.runtime.engine import Engine
from onefold.runtime.no_unfreezing import NoUnfreezing
from onefold.runtime.refusals import Call
from onefold.runtime.unshard import part
from onefold.state.build import build_unit
from onefold.state.rounding import narrowed
from onefold.state.unit import Unit

WHERE = "unfreezing"


class Unfreezing(NoUnfreezing):
    """`attach` attaches the engine to its model again, after its units have changed."""

    def __init__(self, engine: Engine, attach: Callable[[], None]) -> None:
        self._engine, self._attach = engine, attach
        self._still_frozen: list[nn.Parameter] = []  # beside others of their unit that have been unfrozen
        self._loaded: dict[int, Tensor] = {}  # fp32 values by the id of a parameter, see `keep_loaded`

    def keep_loaded(self, param: nn.Parameter, value: Tensor) -> None:
        self._loaded[id(param)] = value

    def never_trained(self) -> set[str]:
        frozen = {id(param) for param in self._still_frozen if not param.requires_grad}
        params = zip(self._engine.names, self._engine.params, strict=True)
        return {name for name, param in params if id(param) in frozen}

    def follow(self, taken: frozenset[int] = frozenset(), *, in_forward: bool = False) -> None:
        names = self._engine.unfrozen_names()
        if names and in_forward:
            self._engine.check(Call.UNFREEZE)
            _tell_peers(self._engine, names)
        if names or not in_forward:
            self._train(names)
        if names or any(param.requires_grad for param in self._still_frozen):
            self._still_frozen = [param for param in self._still_frozen if not param.requires_grad]
            self._engine.optimizers.adopt(taken)
        self._loaded.clear()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _train(self, names: Sequence[str]) -> None:
        """Makes trained units of parameters that have been unfrozen. Collective."""
        engine = self._engine
        _agree(engine, sorted(names))
        if not names:
            return
        engine.prepare_units_change()
        engine.freezing.train_again()
        before, trained = {unit.name: unit for unit in engine.all_units}, {id(param) for param in engine.params}
        resolved = _resolved(engine.resolved, set(names))
        both = list(zip(engine.resolved.units, resolved.units, strict=True))
        changed = [unit for old, spec in both if spec is not old and (unit := before.get(old.layout.name))]
        part(engine, {unit: [param.dtype for param in unit.params] for unit in changed})
        units = [before[old.layout.name] if spec is old else self._unit(spec) for old, spec in both if spec.flat]
        self._still_frozen += [p for unit in units if unit.trained for p in unit.params if id(p) not in trained]
        engine.change_units(resolved, units)
        self._attach()

    def _unit(self, spec: UnitSpec) -> Unit:
        """A trained unit of parameters that were frozen, which have all their values now."""
        engine, params = self._engine, dict(self._engine.model.named_parameters())
        members = [params[slot.name] for slot in spec.layout.slots]
        for param in members:
            wide, now = self._loaded.get(id(param)), local_tensor(param).detach()
            if wide is not None:  # elements that were written since it was loaded do not round to these
                set_local_tensor(param, torch.where(narrowed(wide, now.dtype) == now, wide, now.float()))
        return build_unit(spec, members, engine.resolved.precision, engine.comms, engine.pool, engine.tiers)


@torch.no_grad()
def _tell_peers(engine: Engine, names: Sequence[str]) -> None:
    """Raises on every rank unless all see these parameters unfrozen. A rank that sees none runs its step: this rank
    takes part in its messages, with zeros, until the flags that ranks exchange. Collective."""
    if engine.everyone.size == 1 or not engine.updates.keeps_gradients or engine.unsharding.gathers.negotiate:
        return
    with engine.alike.unfreezing(names):
        engine.drop_gradients()
        if engine.unsharding.units:
            engine.unsharding.skip_forward_and_backward()
        units = len(engine.units)
        try:
            while True:
                engine.completing.open_reductions()
                engine.schedule.flush(start=True)
                heard = engine.used.agree(engine.everyone, (), bytes(units) + engine.alike.said(), more=False)
                if not heard.more:
                    break
                engine.schedule.reduce_late(heard.others[:units])
            engine.alike.compare(heard.others[units:])
        finally:
            engine.drop_gradients()


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
