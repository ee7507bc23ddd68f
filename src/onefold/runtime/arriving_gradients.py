"""Gradients as they arrive: each is taken out of .grad as soon as autograd has made it, and added to its unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onefold.comm.communicator import Comm
from onefold.model.dtensor_shards import aligned
from onefold.runtime.accumulating import Accumulating, Accumulation
from onefold.runtime.reduce_schedule import ReduceSchedule
from onefold.runtime.refusals import Call, Situation, refuse
from onefold.runtime.unsharding import Unsharding
from onefold.runtime.used_parameters import UsedParameters
from onefold.state.unit import Unit


class Place(NamedTuple):
    """A trained parameter's place: its unit, and which of the unit's slots."""

    unit: int
    slot: int


class ArrivingGradients:
    """The last gradient of a unit starts its reduction, and lets the unit's parameters be released."""

    def __init__(
        self,
        units: Sequence[Unit],
        params: Sequence[nn.Parameter],
        places: Sequence[Place],
        used: UsedParameters,
        schedule: ReduceSchedule,
        unsharding: Unsharding,
        accumulating: Accumulating,
        comm: Comm,
    ) -> None:
        self._units, self._params, self._places, self._comm = units, params, places, comm
        self._used, self._schedule, self._unsharding, self._accumulating = used, schedule, unsharding, accumulating
        sharded = {id(unit): index for index, unit in enumerate(unsharding.units)}
        self._sharded = [sharded.get(id(unit)) for unit in units]  # their numbers in unsharding

    def take(self, index: int) -> None:
        """Takes a parameter's gradient, which autograd has just written, out of .grad. Runs for every gradient."""
        if torch.is_grad_enabled():  # create_graph
            with torch.no_grad():
                self.take(index)
            return
        param = self._params[index]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        at, slot = self._places[index]
        unit, schedule = self._units[at], self._schedule
        if schedule.one_reduction and schedule.started(at):  # its one reduction ends in its update
            refuse(Call.GRADIENT, Situation.UNIT_UPDATED, name=unit.layout.slots[slot].name)
        unit.gradients.add(slot, grad if type(grad) is Tensor else self._aligned(index, grad))
        self._used.mark(index)
        if schedule.arrived(at, start=self._accumulating.now is not Accumulation.ONCE):
            sharded = self._sharded[at]
            if sharded is not None:
                self._unsharding.gradients_came(sharded, every=schedule.count(at) >= len(unit.params))

    def _aligned(self, index: int, grad: Tensor) -> Tensor:
        """A gradient as its parameter lies on the ranks of "tp", which run the same backward in the same order."""
        local, collective, sent_bytes = aligned(grad, self._params[index])
        if collective:
            self._comm.meter.count("tp-gradient", collective, sent_bytes)
        return local

    def forget(self, index: int) -> None:
        """Drop one parameter's gradient, as if no backward had brought it. No reduction is in flight."""
        at, slot = self._places[index]
        self._units[at].gradients.forget(slot)
        self._used.forget(index)
