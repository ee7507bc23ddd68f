"""Updates of whole tensors in rounds, whose messages overlap with the updates of other rounds.

In a round each rank updates at most one tensor: 1 ranks send their pieces of gradients, and of masters, to the owners
2 owners update  3 owners send the updated pieces of the master back, and each rank rounds its own into its parameters.
Replicated fp32 parameters that are not split are their own masters, and the owner has them already. Where owners find
directions (Muon), no master is sent: owners send directions back, and each rank moves its own piece of the master.

On a CUDA device rounds that are under way together are updated on two streams beside compute (update_lanes.py).

The next rounds start as long as the tensors of all rounds that have started and not ended fit into `most_bytes`; one
round always may. A round ends after the next one has been updated. Both rules depend on sizes of tensors only, so all
ranks issue the same messages in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.comm.endpoint import Pending
from onefold.comm.meter import Label
from onefold.comm.streams import StreamEvent
from onefold.cost.layout import Span
from onefold.optim.ownership import Ownership
from onefold.optim.update_lanes import Lanes
from onefold.optim.whole_unit_optimizer import DIRECTION, GRADIENT, MASTER, UPDATED, WholeUnitOptimizer
from onefold.runtime.update_policy import StepInputs
from onefold.state.unit import Unit

Run = Callable[["TensorToUpdate", Tensor, Tensor, StepInputs], None]  # with what owners send back, and the gradient


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
    """This rank's elements of a tensor, while its owner updates gradient and master of all of it."""

    def __init__(self, of: TensorToUpdate, part: Span, device: torch.device) -> None:
        self.of, self._master = of, MasterPiece(of, part, device)
        self.gradient, self.master = _gradient(of, part, device), self._master.vector

    @property
    def answer(self) -> Tensor:
        """What the owner sends back, and where it is received."""
        return self.master

    def end(self) -> None:
        self._master.end()

    def drop(self) -> None:
        self._master.drop()


class PieceToMove:
    """This rank's elements of a tensor, while its owner finds the direction in which they move."""

    def __init__(self, of: TensorToUpdate, part: Span, device: torch.device, inputs: StepInputs, pool: Pool) -> None:
        self.of, self._part, self._device, self._inputs, self._pool = of, part, device, inputs, pool
        self.gradient = _gradient(of, part, device)
        self.answer = pool.take(part.numel, of.direction_dtype(inputs))

    def end(self) -> None:
        """Moves the elements, unless a flag on the device says that the step is skipped."""
        piece, bad = MasterPiece(self.of, self._part, self._device), self._inputs.bad
        before = piece.vector.clone() if bad is not None else None
        self.of.optimizer.move(self.of.slot, self.of.group(self._inputs)).along(self.answer, piece.vector)
        if before is not None and bad is not None:
            torch.where(bad.bool(), before, piece.vector, out=piece.vector)
        piece.end()
        self._pool.give(self.answer)

    def drop(self) -> None:
        self._pool.drop(self.answer)


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
        pool: Pool,
    ) -> None:
        """`held` has the elements that each rank holds."""
        self.of, self._mine, self._pool = of, mine, pool
        unit, self._here = of.unit, held[rank]
        self._theirs = {other: span for other, span in enumerate(held) if other != rank and span.numel}
        self.gradient = self._pool.take(of.numel, unit.gradients.dtype)
        self._taken, place = [self.gradient], unit.layout.slots[of.slot].span
        self._own = of.sends_master or of.optimizer.finds_directions
        if self._own:
            dtype = unit.master.dtype if of.sends_master else of.direction_dtype(inputs)
            self.answer = self._pool.take(of.numel, dtype)
            self._taken.append(self.answer)
        else:
            self.answer = unit.flat_params.part(place)
        if mine is not None:
            _at(self._here, self.gradient).copy_(mine.gradient)
            if of.sends_master:
                _at(self._here, self.answer).copy_(mine.answer)

    def of_peers(self, vector: Tensor) -> dict[int, Tensor]:
        """The pieces of a vector that other ranks hold."""
        return {rank: _at(span, vector) for rank, span in self._theirs.items()}

    def free_gradient(self) -> None:
        """The tensor is updated."""
        self._pool.give(self._taken.pop(0))
        del self.gradient

    def finish(self) -> None:
        """Gives this rank's own piece its part of the answer, and frees the vectors. Nothing is in flight."""
        if self._own and self._mine is not None:
            self._mine.answer.copy_(_at(self._here, self.answer))
        while self._taken:
            self._pool.give(self._taken.pop())

    def drop(self) -> None:
        """Frees what was not freed, once no message uses it."""
        while self._taken:
            self._pool.drop(self._taken.pop())


def _at(span: Span, vector: Tensor) -> Tensor:
    return vector[span.start : span.stop]


class RoundToSend(NamedTuple):
    """A round that has not been sent."""

    tensors: list[TensorToUpdate]  # of which this rank has pieces, or which it updates
    label: str  # the same on all ranks, and no other round's that is under way
    nbytes: int  # of gradient and master of the largest tensor, on any rank
    inputs: StepInputs


class Round:
    """A round whose messages are under way."""

    def __init__(
        self, planned: RoundToSend, ownership: Ownership, pool: Pool, device: torch.device, *, directions: bool
    ) -> None:
        """Sends pieces to owners, which send `directions` back, or masters. Collective."""
        self.planned, comm, inputs = planned, ownership.comm, planned.inputs
        self._label = Label(DIRECTION if directions else UPDATED, planned.label)
        self._comm, self._mine, self._back = comm, None, Pending(comm, self._label, ())
        self._updated = StreamEvent()
        parts = {one: one.optimizer.held(one.slot) for one in planned.tensors}
        parts = {one: part for one, part in parts.items() if part.numel}
        self._held: dict[TensorToUpdate, Piece | PieceToMove] = {
            one: PieceToMove(one, part, device, inputs, pool) if directions else Piece(one, part, device)
            for one, part in parts.items()
        }
        for one in (one for one in planned.tensors if one.owner == comm.rank):  # there is one at most
            spans = ownership.held(one.optimizer.name(one.slot))
            self._mine = Gathered(one, self._held.get(one), spans, comm.rank, inputs, pool)
        mine = self._mine
        self._away = [piece for one, piece in self._held.items() if one.owner != comm.rank]
        sent = {piece.of.owner: piece.gradient for piece in self._away}
        self._coming = [comm.swap(sent, mine.of_peers(mine.gradient) if mine else {}, Label(GRADIENT, planned.label))]
        if not directions:
            sent = {piece.of.owner: piece.answer for piece in self._away if piece.of.sends_master}
            wanted = mine.of_peers(mine.answer) if mine and mine.of.sends_master else {}
            self._coming.append(comm.swap(sent, wanted, Label(MASTER, planned.label)))

    def update(self, run: Run, lanes: Lanes, *, beside: bool) -> None:
        """Updates the tensor that this rank owns, and sends the pieces of it back; `beside` other rounds, on a lane.
        Collective."""
        self._updated = lanes.run(partial(self._update, run), beside=beside)
        if self._mine and not beside:
            self._mine.free_gradient()

    def _update(self, run: Run) -> None:
        for pending in self._coming:
            pending.wait()
        mine = self._mine
        if mine:
            run(mine.of, mine.answer, mine.gradient, self.planned.inputs)
        answers = {piece.of.owner: piece.answer for piece in self._away}
        self._back = self._comm.swap(mine.of_peers(mine.answer) if mine else {}, answers, self._label)

    def drop(self) -> None:
        """After an error: the round goes no further. Nothing is updated any more."""
        if self._mine:
            self._mine.drop()
        for piece in self._held.values():
            piece.drop()

    def end(self) -> None:
        """Each rank keeps its own piece of the master as it is updated."""
        self._updated.stream_wait()
        self._back.wait()
        if self._mine:
            self._mine.finish()
        for piece in self._held.values():
            piece.end()


class Rounds:
    """Rounds in the order in which they are sent, updated and ended. `on_end` is called for each tensor whose round has
    ended."""

    def __init__(
        self,
        send: Callable[[RoundToSend], Round],
        run: Run,
        on_end: Callable[[TensorToUpdate], None],
        most_bytes: int,
        lanes: Lanes,
    ) -> None:
        self._send, self._run, self._on_end, self._most_bytes, self._lanes = send, run, on_end, most_bytes, lanes
        self._waiting: deque[RoundToSend] = deque()
        self._sent: deque[Round] = deque()  # and not updated
        self._going_back: deque[Round] = deque()

    @property
    def to_update(self) -> int:
        """Rounds that have not been updated."""
        return len(self._waiting) + len(self._sent)

    def add(self, rounds: Iterable[RoundToSend]) -> None:
        """Sends rounds, or lets them wait for those before. Collective."""
        self._waiting.extend(rounds)
        self._send_fitting()

    def update_all_but(self, last: int) -> None:
        """Updates rounds, the oldest first, until so many are left. Collective."""
        while self.to_update > last:
            if not self._sent:
                self._end_oldest()  # its memory is what the next one waits for
                self._send_fitting()
                continue
            alone = len(self._sent) + len(self._going_back) == 1
            self._sent[0].update(self._run, self._lanes, beside=not alone and self._lanes.number > 1)
            self._going_back.append(self._sent.popleft())
            while len(self._going_back) > 1:  # those had an update's time to travel
                self._end_oldest()
            self._send_fitting()

    def drain(self) -> None:
        """Updates and ends all rounds. Collective."""
        self.update_all_but(0)
        while self._going_back:
            self._end_oldest()

    def forget(self) -> None:
        """After an error: no round goes on. Messages under way are left to end by themselves."""
        self._lanes.join()
        for begun in (*self._sent, *self._going_back):
            begun.drop()
        for rounds in (self._waiting, self._sent, self._going_back):
            rounds.clear()

    def _send_fitting(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            self._sent.append(self._send(self._waiting.popleft()))

    def _fits(self, planned: RoundToSend) -> bool:
        under_way = [one.planned.nbytes for one in (*self._sent, *self._going_back)]
        return not under_way or sum(under_way) + planned.nbytes <= self._most_bytes

    def _end_oldest(self) -> None:
        oldest = self._going_back.popleft()
        oldest.end()
        for one in oldest.planned.tensors:
            self._on_end(one)
