"""Optimizer state, and parameters, in host memory until step(): a forward may take more memory than any before.

That a batch is longer, or that gradients begin to accumulate, is known when the forward begins; how much memory it
takes is known only afterwards. So state that the device updates is *parked* before the forward: copied to host memory,
and freed on the device. If that is not enough, one rank computes all blocks again, and parameters are parked too.
step() brings back what fits beside what the step took; where units are updated in backward, each comes back for its own
update; and whatever reads or replaces state before step(), such as a save, brings back all of it. Parking changes no
placement and sends no message, so each rank parks by itself.
"""

from __future__ import annotations

import math

from torch.utils._python_dispatch import _disable_current_modes

from onefold.model.storage import storage_bytes
from onefold.runtime.engine import Engine
from onefold.runtime.no_parking import Known, NoParking
from onefold.settings.placement import Scope, Tier
from onefold.state.unit import Unit


class Parking(NoParking):
    """What of one model is parked, whichever of its Optimizers decided it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._parameters: list[Unit] = []  # units whose parameters are parked
        self._blocks = 0  # that kept their activations, and are computed again

    @property
    def parked_bytes(self) -> int:
        state = sum(storage_bytes(unit.state_tensors()) for unit in self._engine.units if unit.parked)
        return state + sum(storage_bytes(unit.flat_params.shards()) for unit in self._parameters)

    def begin(self, excess_bytes: float, host_bytes: int, *, in_backward: bool) -> None:
        """Parks as much as frees so many bytes, at most `host_bytes`: optimizer state, of the last units of forward
        first, then parameter shards, but not those of units that the device updates `in_backward`. One rank computes
        all blocks again before its parameters are parked; several ranks could not agree on that."""
        engine, self.active = self._engine, True
        with _disable_current_modes():  # what counts tensors of the device does not see those of the host
            parked = list[int]()
            for index, unit in reversed(list(enumerate(engine.units))):
                nbytes = storage_bytes(unit.state_tensors())
                if excess_bytes > 0 and nbytes <= host_bytes and not (unit.updated_on_host or unit.parked):
                    unit.park()
                    parked.append(index)
                    excess_bytes, host_bytes = excess_bytes - nbytes, host_bytes - nbytes
            if parked:
                engine.optimizers.follow_placement(parked)
            if excess_bytes > 0:
                self._compute_blocks_again()
            if excess_bytes > 0 and not engine.contexts.open:
                self._park_parameters(excess_bytes, host_bytes, in_backward=in_backward)

    def _compute_blocks_again(self) -> None:
        choice = self._engine.block_choice
        if choice is not None and choice.kept and self._engine.comms.world.size == 1:
            self._blocks = choice.kept
            choice.keep_last(0)

    def _park_parameters(self, excess_bytes: float, host_bytes: int, *, in_backward: bool) -> None:
        engine, parked = self._engine, list[Unit]()
        engine.updates.forget_prepared()
        engine.unsharding.reshard_all()
        for unit in reversed(engine.all_units):
            nbytes = storage_bytes(unit.flat_params.shards())
            there = unit.placement.parameters is Scope.SHARDED and unit.placement.parameters_tier is Tier.DEVICE
            updates = in_backward and unit.trained and not unit.updated_on_host  # their shards while they are unsharded
            if excess_bytes > 0 and nbytes <= host_bytes and there and not updates:
                unit.move_parameters(unit.placement._replace(parameters_tier=Tier.HOST))
                parked.append(unit)
                excess_bytes, host_bytes = excess_bytes - nbytes, host_bytes - nbytes
        self._parameters += parked
        self._follow(parked)

    def keep_blocks_again(self) -> int:
        if (kept := self._blocks) and self._engine.block_choice is not None:
            self._engine.block_choice.keep_last(kept)
        self._blocks = 0
        return kept

    def grow_blocks(self) -> bool:
        growth, self.growth = self.growth, 1.0
        if (choice := self._engine.block_choice) is not None and math.isfinite(growth):
            choice.grow(growth)
        return math.isfinite(growth)

    def return_parameters(self) -> int:
        units, self._parameters = self._parameters, []
        for unit in units:
            unit.move_parameters(unit.placement._replace(parameters_tier=Tier.DEVICE))
        self._follow(units)
        return sum(storage_bytes(unit.flat_params.shards()) for unit in units)

    def bring_back(self) -> None:
        engine = self._engine
        if nbytes := self.parked_bytes:
            engine.watch.comes_back(nbytes)
            self.expected = self.known
        self.return_parameters()
        back = [index for index, unit in enumerate(engine.units) if unit.parked]
        for index in back:
            engine.units[index].unpark()
        if back:
            engine.optimizers.follow_placement(back)

    def _follow(self, units: list[Unit]) -> None:
        """The shards of these units are other tensors: unit optimizers follow."""
        trained = [index for index, unit in enumerate(self._engine.units) if unit in units]
        if trained:
            self._engine.optimizers.follow_placement(trained)

    def learn(self, known: Known | None) -> None:
        self.known = self.expected = known
        self.active, self.growth = False, 1.0
        self._engine.watch.learn_inputs()

    def expect_no_more(self) -> None:
        self.expected, self.growth = self.known, 1.0
        self._engine.watch.forget_inputs()
