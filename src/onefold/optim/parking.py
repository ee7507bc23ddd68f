"""Optimizer state in host memory while one step runs: its forwards may take more memory than any before.

A longer batch is known when its forward begins, and so is accumulation; what they take is known only afterwards. State
that the device updates is parked then: copied to host memory, and freed on the device. step() brings back what fits
beside what the step took. Where units are updated in backward, each comes back for its own update. Parking changes no
placement and sends no message, so each rank does it for itself. Parameters are parked too, and one rank computes all
blocks again.
"""

from __future__ import annotations

from torch.utils._python_dispatch import _disable_current_modes

from onefold.model.storage import storage_bytes
from onefold.runtime.engine import Engine
from onefold.settings.placement import Scope, Tier
from onefold.state.unit import Unit


class Parking:
    """What of one model is parked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._shards: list[Unit] = []  # whose parameters are parked
        self._blocks = 0  # that kept their activations, and are computed again
        self.active = False

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
        self._shards += parked
        self._follow(parked)

    def keep_blocks_again(self) -> int:
        """As many blocks keep their activations again as before; how many."""
        if (kept := self._blocks) and self._engine.block_choice is not None:
            self._engine.block_choice.keep_last(kept)
        self._blocks = 0
        return kept

    def return_parameters(self) -> int:
        """Brings parameters back; how many bytes."""
        shards, self._shards = self._shards, []
        for unit in shards:
            unit.move_parameters(unit.placement._replace(parameters_tier=Tier.DEVICE))
        self._follow(shards)
        return sum(storage_bytes(unit.flat_params.shards()) for unit in shards)

    def end(self) -> None:
        """Brings back all that is parked."""
        engine, self.active = self._engine, False
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
