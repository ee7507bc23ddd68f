"""onefold.EMA: an exponential moving average of the masters, sharded as optimizer state is, and on the same tier.

To evaluate with it, the parameters that compute reads are replaced by rounded averages for a while: the masters stay as
they are, and what was replaced is kept, so that putting it back needs no message.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from onefold.comm.endpoint import Pending
from onefold.errors import ConfigError
from onefold.runtime.engine import Engine, engine_of
from onefold.runtime.refusals import Call, Situation, refuse
from onefold.settings.placement import Scope
from onefold.state.rounding import narrow
from onefold.state.unit import Unit


class EMA:
    """An exponential moving average of a sharded model's trained parameters: of their fp32 masters, 1/N on each rank.

    It begins with the parameters as they are; `update` moves it by 1 - `decay` towards them: call it after each step.
    `onefold.save` saves it under `name` with the model, and `load` loads it, at any number of ranks. `decay` may be
    changed at any time. Making an EMA, and every method, is collective.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(4, 4), stage=3, precision="bf16")
    >>> ema = onefold.EMA(model, decay=0.999)
    >>> ema.update()
    >>> with ema.applied():
    ...     output = model(torch.ones(1, 4))
    """

    def __init__(self, model: nn.Module, decay: float, *, name: str = "ema") -> None:
        engine = self._engine = engine_of(model)
        self.decay, self.name = decay, name
        self._check()
        if not engine.units:
            raise ConfigError("EMA averages trained parameters, and this model has none")
        if name in engine.averages.names:
            raise ConfigError(f"the model has an EMA with name={name!r}; give this one another name")
        engine.check(Call.AVERAGE)
        engine.quiesce()
        self._units: dict[int, tuple[Unit, Tensor]] = {}  # by the id of the unit
        self.follow_units()
        weakref.finalize(self, _forget, self._units)
        engine.averages.add(self)

    def follow_units(self) -> None:
        """Called when the model has other units: averages of new ones begin with the parameters as they are."""
        for unit in self._engine.units:
            if id(unit) not in self._units:
                vector = _copied(unit)
                unit.add_average(vector)
                self._units[id(unit)] = unit, vector
        self._vectors = [self._units[id(unit)][1] for unit in self._engine.units]

    def unsharded(self) -> None:
        """Called when the model is plain again: the averages are freed."""
        self._units.clear()
        self._vectors = []

    def _check(self) -> None:
        if not (isinstance(self.decay, int | float) and 0 <= self.decay <= 1):
            raise ConfigError(f"decay={self.decay!r} is not a number from 0 to 1")
        if not (isinstance(self.name, str) and self.name.isidentifier()):
            raise ConfigError(f"name={self.name!r} is not a Python identifier")

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the parameters: average + (1 - decay) * (parameter - average)."""
        self._check()
        self._engine.check(Call.AVERAGE)
        self._engine.quiesce()
        for unit, vector in zip(self._engine.units, self._vectors, strict=True):
            with unit.state_in_memory(write=True):
                scratch = torch.empty(vector.numel(), dtype=vector.dtype, device=vector.device)
                vector.lerp_(unit.master.view(unit.owned_shard, scratch), 1.0 - self.decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again with the parameters as they are."""
        if self._engine.ended:
            refuse(Call.AVERAGE, Situation.UNSHARDED)
        self._engine.quiesce()
        for unit, vector in zip(self._engine.units, self._vectors, strict=True):
            with unit.state_in_memory(write=True):
                unit.master.read(unit.owned_shard, vector)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model computes with the averages, in its compute dtype; afterwards parameters are as before.

        For evaluation: a backward, step, save or load raises inside, and what is written to parameters is lost.
        Replicated parameters are all-gathered once, and a copy of them is kept meanwhile; at stage 3 nothing is sent
        beside what forwards send anyway.
        """
        engine = self._engine
        engine.check(Call.APPLY)
        engine.quiesce()
        _reshard(engine)
        with torch.no_grad():
            before = [_shown(unit).clone() for unit in engine.units]
        try:
            self._show()
            engine.averages.apply(True)
            yield
        finally:  # also after a swap that failed half way
            engine.averages.apply(False)
            _reshard(engine)
            with torch.no_grad():
                for unit, values in zip(engine.units, before, strict=True):
                    _written(unit, values, whole=True)
                    unit.show_average(False)

    @torch.no_grad()
    def _show(self) -> None:
        """Replaces what compute reads by the averages."""
        gathers: list[Pending] = []
        try:
            for unit, vector in zip(self._engine.units, self._vectors, strict=True):
                unit.show_average(True)
                with unit.state_in_memory():
                    rounded = torch.empty(vector.numel(), dtype=unit.flat_params.dtype, device=vector.device)
                    narrow(vector, rounded)
                _written(unit, rounded, whole=False)
            replicated = [u for u in self._engine.units if u.flat_params.scope is Scope.REPLICATED]
            for unit in replicated:
                gathers.append(unit.flat_params.gather_updated())
        finally:
            for pending in gathers:
                pending.wait()

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """The averages of all trained parameters in their full shapes, in rank 0's host memory; other ranks get {}."""
        engine, found = self._engine, dict[str, Tensor]()
        engine.check(Call.FULL_STATE_DICT)
        first = engine.everyone.rank == 0 and engine.comms.tp.rank == 0
        for unit, vector in zip(engine.units, self._vectors, strict=True):
            with unit.state_in_memory():
                whole = unit.unsharded(vector, unit.owned_shard, gather=True)
            for slot, value in zip(unit.layout.slots, whole, strict=True):
                found |= {slot.name: value.to("cpu", copy=True)} if first else {}
        return found

    @property
    def vectors(self) -> Sequence[Tensor]:
        """This rank's elements of each unit's average, in the order of the engine's units."""
        return self._vectors


def _copied(unit: Unit) -> Tensor:
    with unit.state_in_memory():
        vector = torch.empty(unit.owned_shard.numel, dtype=unit.master.dtype, device=unit.pool.device)
        unit.master.read(unit.owned_shard, vector)
    return vector


def _forget(units: dict[int, tuple[Unit, Tensor]]) -> None:
    for unit, vector in units.values():
        unit.remove_average(vector)


def _reshard(engine: Engine) -> None:
    engine.unsharding.gathers.catch_up()
    engine.unsharding.reshard_all()


def _shown(unit: Unit) -> Tensor:
    """What compute reads of a unit: the flat buffer where parameters are replicated, else this rank's shard."""
    flat = unit.flat_params
    flat.load_shard()
    return flat.buffer if flat.scope is Scope.REPLICATED else flat.shards()[0]


def _written(unit: Unit, values: Tensor, *, whole: bool) -> None:
    """Replaces what compute reads of a unit: all of it, or with the elements of `owned_shard`."""
    flat = unit.flat_params
    flat.finish_posted()  # peers may still be reading the old shard
    shown = _shown(unit)  # loads the shard if it is kept in a file
    (shown if whole else flat.part(unit.owned_shard)).copy_(values)
    flat.unload_shard(changed=True)
    flat.wait_stored()
    unit.edits.record_own_write()
