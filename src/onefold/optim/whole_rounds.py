"""Updates of whole tensors in rounds, whose messages overlap with the updates of other rounds.

In a round each rank updates at most one tensor. What is sent depends on the class:
- Muon: 1 ranks send their pieces of the gradient to the owner  2 the owner finds the direction in which the tensor
  moves  3 the owner sends each rank its piece of the direction, and each rank moves its own piece of the master.
- Other classes: 1 ranks send their pieces of the gradient and of the master to the owner  2 the owner updates the
  master  3 the owner sends each rank its piece of the master back. Replicated fp32 parameters that are not split are
  their own masters, so the owner has all of them and none is sent in 1.

On a CUDA device rounds that are under way together are updated on two streams beside compute (update_lanes.py).

The next rounds start as long as the tensors of all rounds that have started and not ended fit into `most_bytes`; one
round always may. A round ends after the next one has been updated. Both rules depend on sizes of tensors only, so all
ranks issue the same messages in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.comm.endpoint import Pending
from onefold.comm.meter import Label
from onefold.comm.streams import StreamEvent
from onefold.optim.ownership import Ownership
from onefold.optim.update_lanes import Lanes
from onefold.optim.whole_pieces import Gathered, Piece, PieceToMove, Taken, TensorToUpdate
from onefold.optim.whole_unit_optimizer import DIRECTION, GRADIENT, MASTER, UPDATED
from onefold.runtime.update_policy import StepInputs
from onefold.state.unit import Unit

Run = Callable[[TensorToUpdate, Tensor, Tensor, StepInputs], None]
"""Updates a tensor on its owner: writes what the owner sends back, a direction or a master, from the gradient."""


class RoundToSend(NamedTuple):
    """A round that has not been sent."""

    tensors: list[TensorToUpdate]  # of which this rank has pieces, or which it updates
    label: str  # the same on all ranks, and no other round's that is under way
    nbytes: int  # that one rank holds of its largest tensor while the round is under way, on whatever rank that is most
    inputs: StepInputs


class Round:
    """A round: its messages, and what they are sent from and received into."""

    def __init__(
        self,
        planned: RoundToSend,
        ownership: Ownership,
        pool: Pool,
        device: torch.device,
        writes: Callable[[Unit], None],
        *,
        directions: bool,
    ) -> None:
        """Owners send `directions` back, or masters; `writes` is told of a unit before its masters are written."""
        self.planned, self._ownership, self._comm, self._device = planned, ownership, ownership.comm, device
        self._writes, self._directions = writes, directions
        self._taken = Taken(pool)
        self._held: list[Piece | PieceToMove] = []  # this rank's, of tensors that are not updated yet
        self._mine: Gathered | None = None  # the tensor that this rank owns
        self._label = Label(DIRECTION if directions else UPDATED, planned.label)
        self._coming: list[Pending] = []
        self._back, self._updated = Pending(self._comm, self._label, ()), StreamEvent()

    def begin(self) -> None:
        """Sends pieces to owners. Collective."""
        comm, label, inputs = self._comm, self.planned.label, self.planned.inputs
        for one in self.planned.tensors:
            if not (part := one.optimizer.held(one.slot)).numel:
                continue
            self._held.append(
                PieceToMove(one, part, self._device, inputs, self._taken)
                if self._directions
                else Piece(one, part, self._device)
            )
        own = {piece.of: piece for piece in self._held if piece.of.owner == comm.rank}
        for one in (one for one in self.planned.tensors if one.owner == comm.rank):  # there is one at most
            spans = self._ownership.held(one.optimizer.name(one.slot))
            self._mine = Gathered(one, own.get(one), spans, comm.rank, inputs, self._taken)
        mine, away = self._mine, self._away()
        sent = {piece.of.owner: piece.gradient for piece in away}
        wanted = mine.of_peers(mine.gradient) if mine else {}
        self._coming.append(comm.swap(sent, wanted, Label(GRADIENT, label)))
        if not self._directions:
            sent = {piece.of.owner: piece.answer for piece in away if piece.of.sends_master}
            wanted = mine.of_peers(mine.answer) if mine and mine.of.sends_master else {}
            self._coming.append(comm.swap(sent, wanted, Label(MASTER, label)))

    def _away(self) -> list[Piece | PieceToMove]:
        """Pieces of tensors that other ranks update."""
        return [piece for piece in self._held if piece.of.owner != self._comm.rank]

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
        if not self._directions:
            self._will_write()  # masters are received where they stay
        answers = {piece.of.owner: piece.answer for piece in self._away()}
        self._back = self._comm.swap(mine.of_peers(mine.answer) if mine else {}, answers, self._label)

    def end(self) -> None:
        """Each rank keeps its own piece of the master as it is updated."""
        self._updated.stream_wait()
        self._back.wait()
        self._will_write()
        if self._mine:
            self._mine.finish()
        while self._held:
            self._held[0].end()
            del self._held[0]

    def drop(self) -> None:
        """After an error, of this round or another: what it holds is freed, once no message uses it."""
        self._taken.drop()
        while self._held:
            self._held.pop().drop()

    def _will_write(self) -> None:
        for one in self.planned.tensors:
            self._writes(one.unit)


class Rounds:
    """Rounds in the order in which they are sent, updated and ended. `on_end` is called for each tensor whose round has
    ended."""

    def __init__(
        self,
        make: Callable[[RoundToSend], Round],
        run: Run,
        on_end: Callable[[TensorToUpdate], None],
        most_bytes: int,
        lanes: Lanes,
    ) -> None:
        self._make, self._run, self._on_end, self._most_bytes, self._lanes = make, run, on_end, most_bytes, lanes
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
            self._sent.append(self._make(self._waiting.popleft()))
            self._sent[-1].begin()

    def _fits(self, planned: RoundToSend) -> bool:
        under_way = [one.planned.nbytes for one in (*self._sent, *self._going_back)]
        return not under_way or sum(under_way) + planned.nbytes <= self._most_bytes

    def _end_oldest(self) -> None:
        oldest = self._going_back[0]
        oldest.end()  # after an error it is still among the rounds to drop
        self._going_back.popleft()
        for one in oldest.planned.tensors:
            self._on_end(one)
