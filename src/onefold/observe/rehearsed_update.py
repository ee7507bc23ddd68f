"""Updates of whole tensors in a rehearsal: tensors come together on their owners as in a run, without arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from onefold.optim.optimizer import Optimizer
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.optim.update_whole import TensorToUpdate, UpdateWhole, WholeUpdates
from onefold.optim.whole_tensors import whole
from onefold.runtime.engine import Engine
from onefold.runtime.update_policy import StepInputs

MakeOptimizer = Callable[[nn.Module], Optimizer]


class RehearsedUpdates(WholeUpdates):
    def _update_rest(self, rest: UnitOptimizer, flags: bytes, inputs: StepInputs) -> None:
        pass

    def _run(
        self, one: TensorToUpdate, answer: Tensor, gradient: Tensor, inputs: StepInputs, *, direction: bool = False
    ) -> None:
        if one.unit.dtypes.narrow:
            self._pool.give(self._pool.take(gradient.numel(), one.unit.master.dtype))


class RehearsedWhole(UpdateWhole):
    """The update policy of a rehearsal with an Optimizer whose class needs whole tensors."""

    def __init__(self, engine: Engine, make: MakeOptimizer) -> None:
        self.optimizer = make(engine.model)
        assert self.optimizer.ownership is not None, "an element-wise class is rehearsed without an Optimizer"
        by_unit = [whole(one) for one in self.optimizer.by_unit]
        super().__init__(engine, by_unit, self.optimizer.ownership, RehearsedUpdates)

    def update(self) -> None:
        """All that step() does of an update, but for arithmetic."""
        self.step(StepInputs(self.optimizer.param_groups, 1.0, 1.0, None))

    def state_bytes(self, *, on_host: bool) -> int:
        """Bytes of optimizer state that this rank will keep on the device or on the host."""
        numbers = [number for number, one in enumerate(self._whole) if one.unit.updated_on_host is on_host]
        states = [self.optimizer.planned_state(number, full=True) for number in numbers]
        return sum(vectors + counts for vectors, counts in states)

    def _update_offloaded(self, indices: Sequence[int], inputs: StepInputs) -> StepInputs:
        """Gradients go to the host, and messages are counted; nothing is loaded."""
        ownership, meter = self.optimizer.ownership, self._engine.comm.meter
        assert self._host is not None and ownership is not None
        for index in indices:
            self._host.offload(index)
            one = self._whole[index]
            shared = [slot for slot in one.slots if one.is_whole(slot) and one.is_shared(slot)]
            rounds = len(ownership.rounds([one.name(slot) for slot in shared]))
            for purpose, sent_bytes in one.planned_traffic().items() if rounds else ():
                for number in range(rounds):
                    meter.count(purpose, "all-to-all", 0 if number else sent_bytes)
        return inputs

    @property
    def largest_numel(self) -> int:
        """Elements of the largest tensor that this rank updates."""
        return max((one.size(owned.slot).numel() for one in self._whole for owned in one.owned()), default=0)
