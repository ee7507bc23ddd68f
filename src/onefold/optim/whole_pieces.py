"""What ranks hold of a whole tensor while it is updated: their pieces, and on its owner all of it.

Vectors that a round takes from the pool are given back when they are not needed any more, or dropped after an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.cost.layout import Span
from onefold.optim.whole_unit_optimizer import WholeUnitOptimizer
from onefold.runtime.update_policy import StepInputs
from onefold.state.unit import Unit


class TensorToUpdate(NamedTuple):
    """A tensor that is to be updated."""

    optimizer: WholeUnitOptimizer  # of its unit
    slot: int
    owner: int

    @property
    def unit(self) -> Unit:
        return self.optimizer.unit

    @property
    def numel(self) -> int:
        return self.optimizer.order(self.slot).numel

    @property
    def sends_master(self) -> bool:
        return self.optimizer.sends_master(self.slot)

    def group(self, inputs: StepInputs) -> dict[str, Any]:
        return inputs.groups[self.optimizer.group_of(self.slot)]

    def direction_dtype(self, inputs: StepInputs) -> torch.dtype:
        return self.optimizer.direction_dtype(self.slot, self.group(inputs))


class Taken:
    """What a round has taken from the pool and not given back."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._vectors: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        vector = self._pool.take(numel, dtype)
        self._vectors.append(vector)
        return vector

    def give(self, vector: Tensor) -> None:
        self._pool.give(vector)
        self._vectors = [other for other in self._vectors if other is not vector]

    def drop(self) -> None:
        """After an error: messages may still use them."""
        while self._vectors:
            self._pool.drop(self._vectors.pop())


class MasterPiece:
    """This rank's elements of the master of a tensor, on the device of the update until its end."""

    def __init__(self, of: TensorToUpdate, part: Span, device: torch.device) -> None:
        self._of, self._part = of, part
        if of.unit.may_be_edited:
            of.unit.master.take_changed(part)
        self._kept = of.unit.master.begin_update(part)
        self.vector = self._kept.to(device, non_blocking=True)

    def end(self) -> None:
        """The vector is updated."""
        if self.vector is not self._kept:
            self._kept.copy_(self.vector)
        self._of.unit.master.end_update(self._part, self._kept)

    def drop(self) -> None:
        """After an error: the master is not updated."""
        self._of.unit.master.drop_update(self._kept)


class Piece:
    """This rank's elements of a tensor whose owner updates the master."""

    def __init__(self, of: TensorToUpdate, part: Span, device: torch.device) -> None:
        self.of, self.gradient = of, _gradient(of, part, device)
        self._master = MasterPiece(of, part, device)
        self.master = self._master.vector

    @property
    def answer(self) -> Tensor:
        """What the owner sends back, and where it is received."""
        return self.master

    def end(self) -> None:
        self._master.end()

    def drop(self) -> None:
        self._master.drop()


class PieceToMove:
    """This rank's elements of a tensor whose owner finds the direction in which they move."""

    def __init__(self, of: TensorToUpdate, part: Span, device: torch.device, inputs: StepInputs, taken: Taken) -> None:
        self.of, self._part, self._device, self._inputs, self._taken = of, part, device, inputs, taken
        self.gradient = _gradient(of, part, device)
        self.answer = taken.take(part.numel, of.direction_dtype(inputs))
        self._master: MasterPiece | None = None  # while the elements move

    def end(self) -> None:
        """Moves the elements, unless a flag on the device says that the step is skipped."""
        self._master = MasterPiece(self.of, self._part, self._device)
        vector, bad = self._master.vector, self._inputs.bad
        before = vector.clone() if bad is not None else None
        self.of.optimizer.move(self.of.slot, self.of.group(self._inputs)).along(self.answer, vector)
        if before is not None and bad is not None:
            torch.where(bad.bool(), before, vector, out=vector)
        self._master.end()
        self._master = None
        self._taken.give(self.answer)

    def drop(self) -> None:
        if self._master is not None:
            self._master.drop()


def _gradient(of: TensorToUpdate, part: Span, device: torch.device) -> Tensor:
    [(_, gradient)] = of.unit.gradients.pieces(part)
    return gradient.to(device, non_blocking=True)


class Gathered:
    """All of a tensor, on its owner: vectors into which the pieces of other ranks are received, and from which the
    `answer` goes back to them."""

    def __init__(
        self,
        of: TensorToUpdate,
        mine: Piece | PieceToMove | None,
        held: Sequence[Span],
        rank: int,
        inputs: StepInputs,
        taken: Taken,
    ) -> None:
        """`held` has the elements that each rank holds."""
        self.of, self._mine, self._taken = of, mine, taken
        unit, self._here = of.unit, held[rank]
        self._theirs = {other: span for other, span in enumerate(held) if other != rank and span.numel}
        self.gradient = taken.take(of.numel, unit.gradients.dtype)
        self._vectors = [self.gradient]
        self._here_already = not (of.sends_master or of.optimizer.finds_directions)  # replicated fp32 parameters
        if self._here_already:
            self.answer = unit.flat_params.part(unit.layout.slots[of.slot].span)
        else:
            self.answer = taken.take(of.numel, unit.master.dtype if of.sends_master else of.direction_dtype(inputs))
            self._vectors.append(self.answer)
        if mine is not None:
            _at(self._here, self.gradient).copy_(mine.gradient)
            if of.sends_master:
                _at(self._here, self.answer).copy_(mine.answer)

    def of_peers(self, vector: Tensor) -> dict[int, Tensor]:
        """The pieces of a vector that other ranks hold."""
        return {rank: _at(span, vector) for rank, span in self._theirs.items()}

    def free_gradient(self) -> None:
        """The tensor is updated."""
        self._taken.give(self._vectors.pop(0))
        del self.gradient

    def finish(self) -> None:
        """Gives this rank's own piece its part of the answer, and frees the vectors. Nothing is in flight."""
        if self._mine is not None and not self._here_already:
            self._mine.answer.copy_(_at(self._here, self.answer))
        while self._vectors:
            self._taken.give(self._vectors.pop())


def _at(span: Span, vector: Tensor) -> Tensor:
    return vector[span.start : span.stop]
