"""Updates of whole tensors in rounds, whose messages overlap with the updates of other rounds.

In a round each rank updates at most one tensor: 1 ranks send their pieces of gradients, and of masters, to the owners
2 owners update  3 owners send the updated pieces of the master back, and each rank rounds its own into its parameters.
Replicated fp32 parameters that are not split are their own masters, and the owner has them already.

On a CUDA device rounds that are under way together are updated on two streams beside compute (update_lanes.py).

The next rounds start as long as the tensors of all rounds that have started and not ended fit into `most_bytes`; one
round always may. A round ends after the next one has been updated. Both rules depend on sizes of tensors only, so all
ranks issue the same messages in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.comm.endpoint import Pending
from onefold.comm.meter import Label
from onefold.comm.streams import StreamEvent
from onefold.cost.layout import Span
from onefold.optim.ownership import Ownership
from onefold.optim.update_lanes import Lanes
from onefold.optim.whole_unit_optimizer import GRADIENT, MASTER, UPDATED, WholeUnitOptimizer
from onefold.runtime.update_policy import StepInputs
from onefold.state.unit import Unit

Run = Callable[["TensorToUpdate", Tensor, Tensor, StepInputs], None]  # with the master and the gradient


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


class Piece:
    """This rank's elements of a tensor, while it is updated."""

    def __init__(self, of: TensorToUpdate, part: Span, device: torch.device) -> None:
        self.of, self.part = of, part
        if of.unit.may_be_edited:
            of.unit.master.take_changed(part)
        self._kept = of.unit.master.begin_update(part)
        [(_, gradient)] = of.unit.gradients.pieces(part)
        self.gradient = gradient.to(device, non_blocking=True)
        self.master = self._kept.to(device, non_blocking=True)

    def end(self) -> None:
        """The master is updated."""
        if self.master is not self._kept:
            self._kept.copy_(self.master)
        self.of.unit.master.end_update(self.part, self._kept)

    def drop(self) -> None:
        """After an error: the master is not updated."""
        self.of.unit.master.drop_update(self._kept)


class Gathered:
    """All of a tensor, on its owner: vectors into which the pieces of other ranks are received."""

    def __init__(self, of: TensorToUpdate, mine: Piece | None, held: Sequence[Span], rank: int, pool: Pool) -> None:
        """`held` has the elements that each rank holds."""
        self.of, self._mine, self._pool = of, mine, pool
        unit, self._here = of.unit, held[rank]
        self._theirs = {other: span for other, span in enumerate(held) if other != rank and span.numel}
        self.gradient = self._pool.take(of.numel, unit.gradients.dtype)
        self._taken = [self.gradient]
        self._own, place = of.sends_master, unit.layout.slots[of.slot].span
        self.master = self._pool.take(of.numel, unit.master.dtype) if self._own else unit.flat_params.part(place)
        self._taken += [self.master] if self._own else []
        if mine is not None:
            _at(self._here, self.gradient).copy_(mine.gradient)
            if self._own:
                _at(self._here, self.master).copy_(mine.master)

    def of_peers(self, vector: Tensor) -> dict[int, Tensor]:
        """The pieces of a vector that other ranks hold."""
        return {rank: _at(span, vector) for rank, span in self._theirs.items()}

    def free_gradient(self) -> None:
        """The tensor is updated."""
        self._pool.give(self._taken.pop(0))
        del self.gradient

    def finish(self) -> None:
        """Keeps this rank's own piece of the master, and frees the vectors. Nothing is in flight."""
        if self._own and self._mine is not None:
            self._mine.master.copy_(_at(self._here, self.master))
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

    def __init__(self, planned: RoundToSend, ownership: Ownership, pool: Pool, device: torch.device) -> None:
        """Sends pieces to owners. Collective."""
        self.planned, comm = planned, ownership.comm
        self._comm, self._mine, self._back = comm, None, Pending(comm, Label(UPDATED, planned.label), ())
        self._updated = StreamEvent()
        parts = {one: one.optimizer.held(one.slot) for one in planned.tensors}
        self._held = {one: Piece(one, part, device) for one, part in parts.items() if part.numel}
        for one in (one for one in planned.tensors if one.owner == comm.rank):  # there is one at most
            spans = ownership.held(one.optimizer.name(one.slot))
            self._mine = Gathered(one, self._held.get(one), spans, comm.rank, pool)
        mine = self._mine
        self._away = [piece for one, piece in self._held.items() if one.owner != comm.rank]
        sent = {piece.of.owner: piece.gradient for piece in self._away}
        gradients = comm.swap(sent, mine.of_peers(mine.gradient) if mine else {}, Label(GRADIENT, planned.label))
        sent = {piece.of.owner: piece.master for piece in self._away if piece.of.sends_master}
        wanted = mine.of_peers(mine.master) if mine and mine.of.sends_master else {}
        self._coming = [gradients, comm.swap(sent, wanted, Label(MASTER, planned.label))]

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
            run(mine.of, mine.master, mine.gradient, self.planned.inputs)
        updated = {piece.of.owner: piece.master for piece in self._away}
        label = Label(UPDATED, self.planned.label)
        self._back = self._comm.swap(mine.of_peers(mine.master) if mine else {}, updated, label)

    def drop(self) -> None:
        """After an error: the round goes no further. Nothing is updated any more."""
        if self._mine:
            self._mine.drop()
        for piece in self._held.values():
            piece.drop()

    def end(self) -> None:
        """Keeps the updated pieces."""
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
