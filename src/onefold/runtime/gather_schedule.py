"""The gather schedule: in which order units are unsharded, and how many are prefetched. The same on every rank.

Forward follows one list of units, backward another. In the first step they are registration order and its reverse;
then the orders that the first step showed. When a pass (a forward or a backward) begins, every rank posts its shards of
all units in the list. A rank receives the shards of a unit when it needs the unit, of `prefetch` units ahead, and at
the end of the pass of the units it did not use, so that every posted shard is received. On gloo no receive waits for
what a peer is computing, so ranks may skip or branch, each in its own way. On NCCL, where all ranks must issue
all-gathers in one order, a rank first receives the units that come before in the list; the last few of them stay
unsharded in forward, in case it needs them after all.

A unit that is needed outside the list, for example again after it was resharded, is all-gathered at once, which is
correct only if all ranks do the same. Where ranks run different numbers of forwards (schedule="negotiate") there is no
list: before a rank unshards, all ranks exchange what they need, and each posts its shards to those that need them. A
rank that has no more forwards to run takes part until all ranks are done (`catch_up`).

In forward a unit is resharded when the next one is needed, no module computes with it, and it holds no part of the
block that follows, unless it is kept for backward: the last unit is, or all are (reshard_after_forward=False). In
backward it is resharded when its gradients are complete. A unit that was prefetched and skipped may still be needed, so
it stays unsharded; while there are such units, fewer are prefetched, so that the number of unsharded units keeps its
bound. In backward a skipped unit of which no graph saved a tensor is resharded at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.cost.limits import READ_AHEAD
from onefold.runtime.timer import GatherTimer, device_clock
from onefold.state.flat_parameters import ParameterState
from onefold.state.unit import Unit

AUTO = "auto"
SKIPPED = 3  # units that were received in forward before they were needed, and may be needed yet
TRACE_LENGTH = 4096
FORWARD, BACKWARD, OUTSIDE_PASS = "gather-forward", "gather-backward", "gather"  # purposes of all-gathers
NONE: frozenset[int] = frozenset()
LOAD = "load"  # a pass that sends nothing: load_state_dict() has all parameters, and each rank keeps its shard


class GatherSchedule:
    def __init__(
        self,
        units: Sequence[Unit],
        prefetch: int | str,
        live_bytes: int | None,
        comm: Comm,
        *,
        negotiate: bool,
        reshard_after_forward: bool,
    ) -> None:
        self._units, self._comm, self.negotiate = units, comm, negotiate
        self._reshard_after_forward = reshard_after_forward
        self.embeddings: set[int] = set()  # units of embeddings alone, whose weights backward does not need
        sizes = [unit.layout.numel * unit.layout.itemsize for unit in units]
        clock = device_clock if comm.on_stream else time.perf_counter
        self._timer = GatherTimer(sizes, live_bytes, clock) if prefetch == AUTO else None
        self._timing = False  # whether this pass is timed
        self.prefetch = dict.fromkeys((FORWARD, BACKWARD), 0 if isinstance(prefetch, str) else prefetch)
        self.forward = list(range(len(units)))
        self.backward = [index for index in reversed(self.forward) if index not in self.kept_units]
        self.seen: list[int] = []  # units that this pass needed, in order
        self.saved = [0] * len(units)  # per unit: tensors in its flat buffer that autograd graphs have saved
        self.trace: deque[tuple[str, str]] = deque(maxlen=TRACE_LENGTH)  # the latest gathers: purpose, unit
        self._purpose, self._order = OUTSIDE_PASS, list[int]()
        self._places: dict[int, list[int]] = {}  # unit -> its places in the list
        self._remaining: set[int] = set()  # places of the list whose shards have not been received
        self._unposted: deque[int] = deque()  # places whose shards have not been posted
        self._at = 0  # the place after the last unit that was needed
        self._reshard_when_idle = False
        self._keep: frozenset[int] = NONE  # units that stay unsharded at the end of this pass
        self._kept: frozenset[int] = NONE  # units that the last pass kept unsharded for the next
        self._prefetched: dict[int, int] = {}  # unit -> its place: prefetched and not needed yet
        self._busy: dict[int, int] = {}  # unit -> number of modules that compute with it
        self._live: set[int] = set()  # units that are not SHARDED
        self._expected: Sequence[int] = ()  # units that the next blocks share with the one that ran last

    @property
    def kept_units(self) -> frozenset[int]:
        """The units that stay unsharded from forward to backward: the last in forward, or all that backward may need.
        None where ranks negotiate."""
        if self.negotiate:
            return NONE
        last = frozenset(self.forward[-1:])
        return last if self._reshard_after_forward else last | (frozenset(self.forward) - self.embeddings)

    def begin(self, purpose: str, order: list[int], *, reshard_when_idle: bool, keep: frozenset[int] = NONE) -> None:
        """Begins a pass over the units in `order`: posts this rank's shards of all of them. The units `keep` stay
        unsharded at the end of the pass."""
        self._keep = keep
        if self.negotiate and purpose == FORWARD:
            order = []
        self._purpose, self._order, self._reshard_when_idle = purpose, order, reshard_when_idle
        self._remaining, self._at = set(range(len(order))), 0
        self._timing = self._timer is not None and not self._timer.has_decided(purpose)
        self._places = {}
        for place, index in enumerate(order):
            self._places.setdefault(index, []).append(place)
        self.seen = []
        for unit in self._units:
            unit.flat_params.finish_posted(purpose)  # peers may be one forward or backward behind, no more
        for index in self._kept:
            self._units[index].flat_params.show()
        self._kept = NONE
        self._unposted = deque(range(len(order)))
        ready = not any(self._units[index].flat_params.offloaded_or_updating for index in order)
        self._post_until(len(order) if ready else 0)

    def _post_until(self, place: int) -> None:
        """Posts this rank's shards of the list up to this place. Shards that are being updated, or are on disk, are
        posted only when the unit is needed; before that all earlier ones have been posted."""
        while self._unposted and self._unposted[0] < place:
            self._units[self._order[self._unposted[0]]].flat_params.post_shard(self._purpose)  # may raise: its update
            self._unposted.popleft()  # has failed; `end` comes to it again, and waits for no peer in vain

    def unshard(self, *indices: int) -> None:
        """Unshards units now, waits for them, and prefetches the next ones."""
        wanted = [index for index in indices if not self.ready(index)]
        if self._reshard_when_idle:
            self._reshard_idle(but=indices)
        if wanted:
            self._gather(wanted)
        for index in indices:
            self._units[index].flat_params.guard.lift()

    def _gather(self, wanted: list[int]) -> None:
        wanted.sort(key=self._place)
        unlisted = []
        for index in wanted:
            self.seen.append(index)
            place = self._prefetched.pop(index) if index in self._prefetched else self._place(index)
            if place in self._remaining:
                self._receive(place)
            elif self._units[index].flat_params.state is ParameterState.SHARDED:
                unlisted.append(index)
            if place < len(self._order):
                self._at = place + 1
        if unlisted:
            self._gather_unlisted(unlisted)
        self._prefetch_next()
        for index in wanted:
            if self._timing and self._timer:
                self._timer.needed(index)
            self._units[index].flat_params.finish_gather()
            if self._timing and self._timer:
                self._timer.arrived(index)

    def hold(self, *indices: int) -> None:
        """Unshards units for a module that begins to compute; they stay unsharded until `idle`."""
        self.unshard(*indices)
        for index in indices:
            self._busy[index] = self._busy.get(index, 0) + 1

    def idle(self, index: int) -> None:
        """A module that computed with this unit has ended."""
        self._busy[index] = max(self._busy.get(index, 0) - 1, 0)

    def keeps(self, index: int) -> bool:
        """Whether the last pass kept this unit unsharded for the next."""
        return index in self._kept

    def expect(self, indices: Sequence[int]) -> None:
        """A block has run that shares these units with blocks to come: they stay unsharded until another block has run,
        whatever modules run in between."""
        self._expected = indices

    def busy(self, index: int) -> bool:
        return bool(self._busy.get(index))

    def reshard(self, index: int) -> None:
        """Reshards a unit that this pass needs no more; one that is prefetched for a later place stays."""
        if index not in self._prefetched:
            self._reshard(index)

    def receive_posted(self, index: int) -> None:
        """Receives the shards of a unit that peers have posted in this pass, whether it is needed or not: they wait for
        that before their shards change."""
        for place in [place for place in self._places.get(index, ()) if place in self._remaining]:
            if self._comm.any_order:  # on NCCL nothing is posted
                self._post_until(place + 1)
                self._receive_unneeded(place)

    def end(self) -> None:
        """Ends the pass: receives the rest of its list, and reshards all units but those to keep."""
        self._post_until(len(self._order))
        keep, self._keep = self._keep, NONE
        self._expected = ()
        self._busy.clear()
        for place in sorted(self._remaining):
            self._receive(place)
            if self._order[place] not in keep:
                self._reshard(self._order[place])
        for index in sorted(self._live - keep):
            self._reshard(index)
        self._kept = keep & self._live
        for index in self._kept:
            self._units[index].flat_params.hide()
        self._prefetched.clear()
        if self._timing and self._timer and self._order:
            decided = self._timer.end_of_pass(self._purpose)
            self.prefetch[self._purpose] = self.prefetch[self._purpose] if decided is None else decided
        self._timing = False
        self._purpose, self._order, self._at = OUTSIDE_PASS, [], 0

    def ready(self, index: int) -> bool:
        """Whether a unit is unsharded and was needed in this pass, not only prefetched."""
        return self._units[index].flat_params.state is ParameterState.UNSHARDED and index not in self._prefetched

    def _place(self, index: int) -> int:
        """The place in the list that a use of this unit takes now: the next remaining one, else an earlier one, else
        the end of the list."""
        if index in self._prefetched:
            return self._prefetched[index]
        places = [place for place in self._places.get(index, ()) if place in self._remaining]
        return min(places, key=lambda place: (place < self._at, place), default=len(self._order))

    def _gather_unlisted(self, indices: Sequence[int]) -> None:
        if self._purpose == LOAD:
            for index in indices:
                self._units[index].flat_params.unshard_for_load()
                self._live.add(index)
            return
        if self.negotiate and self._purpose != BACKWARD:
            self._negotiate(indices, finished=False)
            return
        if not self._comm.any_order:  # where all ranks come to a unit outside the list, none is before the end of it
            for place in sorted(self._remaining):
                self._receive_unneeded(place)
        for index in indices:
            values = self._units[index].flat_params
            if self._purpose == OUTSIDE_PASS:
                values.finish_posted(OUTSIDE_PASS)  # does not wait: all ranks are here again, so they have received it
            values.post_shard(self._purpose)
            self._start(index)

    def catch_up(self) -> None:
        """With schedule="negotiate": serves peers that still run forwards, until all ranks have called this."""
        while self.negotiate and self._units and not self._negotiate((), finished=True):
            pass

    def _negotiate(self, indices: Sequence[int], *, finished: bool) -> bool:
        """Exchanges which units ranks need, posts shards to those that need them, and receives what this rank needs.
        True if all ranks have finished. Collective."""
        mine = bytes([finished, *(index in indices for index in range(len(self._units)))])
        rows = self._comm.all_gather_bytes(mine, Label("negotiate", "the next units"))
        for index, unit in enumerate(self._units):
            needing = [rank for rank, row in enumerate(rows) if row[1 + index]]
            if needing:
                unit.flat_params.finish_posted(FORWARD)
                unit.flat_params.post_shard(FORWARD, to=needing)
        for index in indices:
            self._start(index, FORWARD)
        return all(row[0] for row in rows)

    def _receive(self, place: int) -> None:
        self._post_until(place + 1)
        for soon in self._order[place + 1 : place + 1 + READ_AHEAD]:
            self._units[soon].flat_params.read_ahead()
        if not self._comm.any_order:
            first = place  # all before it have been received
            while first - 1 in self._remaining:
                first -= 1
            for earlier in range(first, place):
                self._receive_skipped(earlier)
        self._remaining.discard(place)
        self._start(self._order[place])

    def _receive_skipped(self, place: int) -> None:
        """Receives a place of the list before a later one, because all ranks must receive in one order. This rank may
        need the unit later, out of order, so it stays unsharded for a while, like one that was prefetched."""
        index = self._order[place]
        in_use = index in self._live and index not in self._prefetched
        self._remaining.discard(place)
        self._start(index)
        if not in_use:
            self._prefetched[index] = place

    def _receive_unneeded(self, place: int) -> None:
        """Receives a place of the list only because peers have posted it, and reshards the unit unless it is in use."""
        index = self._order[place]
        in_use = index in self._live and index not in self._prefetched
        self._remaining.discard(place)
        self._start(index)
        if not in_use:
            self._reshard(index)

    def _prefetch_next(self) -> None:
        """Prefetches the next places of the list, as long as skipped units leave room."""
        ahead = self.prefetch.get(self._purpose, 0)
        passed = [index for index, place in self._prefetched.items() if place < self._at]
        if self._purpose == BACKWARD:
            for index in [index for index in passed if not self.saved[index]]:
                passed.remove(index)
                self._reshard(index)
        for index in [] if self._comm.any_order else passed[:-SKIPPED]:
            self._reshard(index)
        for place in range(self._at, min(self._at + ahead, len(self._order))):
            index = self._order[place]
            if place in self._remaining and not self.ready(index) and index not in self._prefetched:
                if len(self._prefetched) > ahead:
                    break
                self._receive(place)
                self._prefetched[index] = place

    def _start(self, index: int, purpose: str | None = None) -> None:
        purpose = purpose or self._purpose
        self.trace.append((purpose, self._units[index].name))
        if self._timing and self._timer:
            self._timer.started(index)
        self._units[index].flat_params.receive_shards(purpose)
        self._live.add(index)

    def _reshard_idle(self, but: Sequence[int]) -> None:
        for index in sorted(self._live - self._prefetched.keys() - {*but, *self._expected, *self._keep}):
            if not self._busy.get(index):
                self._reshard(index)

    def _reshard(self, index: int) -> None:
        self._prefetched.pop(index, None)
        values = self._units[index].flat_params
        values.reshard()
        if values.state is ParameterState.SHARDED:
            self._live.discard(index)
            self._kept -= {index}
