"""What to gather next: one list per pass, the same on every rank, with look-ahead.

A forward walks one list of units, a backward another. At first they are registration order and its reverse; then what
the first step showed. When a pass begins, every rank offers its shards of the whole list. A rank fetches a unit when it
needs it, `prefetch` more ahead of need, and at the end of the pass what it left, so that every offer is taken. No fetch
waits for what a peer is computing, so ranks may skip or branch, each in its own way. Where messages must have one order
(NCCL), a need first fetches what stands before it in the list.

A use that the list does not have (a unit needed again after its release) is offered and fetched when it comes: right as
long as all ranks do the same. Where ranks run unequal numbers of forwards they negotiate instead of following a list:
before a rank gathers, all tell each other what they need, and each offers its shard to those that do. A rank that has
no more forwards to run answers until all are there (`catch_up`).

In forward a unit is released when the next one is needed and it is idle; in backward when its gradients are complete.
A unit that was fetched ahead and passed over may still be wanted, so it stays; where several are, nothing more is
fetched ahead, and the number of live units keeps its bound. In backward one that no graph holds is released instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.cost.limits import READ_AHEAD
from onefold.runtime.timer import GatherTimer
from onefold.state.flat_parameters import ParameterState
from onefold.state.unit import Unit

AUTO = "auto"
TRACED = 4096
FORWARD, BACKWARD, LONE = "gather-forward", "gather-backward", "gather"  # what gathers are for


class GatherSchedule:
    def __init__(
        self, units: Sequence[Unit], prefetch: int | str, live_bytes: int | None, comm: Comm, *, negotiate: bool
    ) -> None:
        self._units, self._comm, self.negotiate = units, comm, negotiate
        sizes = [unit.layout.numel * unit.layout.itemsize for unit in units]
        self._watch = GatherTimer(sizes, live_bytes) if prefetch == AUTO else None
        self.prefetch = dict.fromkeys((FORWARD, BACKWARD), 0 if isinstance(prefetch, str) else prefetch)
        self.forward = list(range(len(units)))
        self.backward = [index for index in reversed(self.forward) if index != self.kept]
        self.seen: list[int] = []  # gathers this pass wanted, in order
        self.saved = [0] * len(units)  # tensors of a unit that graphs hold, and backward will come for
        self.trace: deque[tuple[str, str]] = deque(maxlen=TRACED)  # the latest gathers: purpose, unit
        self._purpose, self._order = LONE, list[int]()
        self._places: dict[int, list[int]] = {}  # unit -> where the list has it
        self._left: set[int] = set()  # places of the list that have not been fetched
        self._unoffered: deque[int] = deque()  # places that wait for their values
        self._at = 0  # the place behind the last need
        self._release_when_idle = False
        self._keep: int | None = None
        self._ahead: dict[int, int] = {}  # unit -> its place: fetched ahead of need and not needed yet
        self._busy: dict[int, int] = {}  # unit -> how many modules are computing with it
        self._live: set[int] = set()  # units that are not SHARDED

    @property
    def kept(self) -> int | None:
        """The unit that stays whole from forward to backward: the last one, where all ranks end with it."""
        return self.forward[-1] if self.forward and not self.negotiate else None

    def begin(self, purpose: str, order: list[int], *, release_when_idle: bool, keep: int | None = None) -> None:
        """A pass starts: offer all that it will fetch. One unit may be kept from its use to beyond the end."""
        self._keep = keep
        if self.negotiate and purpose == FORWARD:
            order = []
        self._purpose, self._order, self._release_when_idle = purpose, order, release_when_idle
        self._left, self._at = set(range(len(order))), 0
        self._places = {}
        for place, index in enumerate(order):
            self._places.setdefault(index, []).append(place)
        self.seen = []
        for unit in self._units:
            unit.flat_params.finish_posted(purpose)  # peers may be one pass of a kind behind, no more
        self._unoffered = deque(range(len(order)))
        ready = not any(self._units[index].flat_params.offloaded_or_updating for index in order)
        self._offer_to(len(order) if ready else 0)

    def _offer_to(self, place: int) -> None:
        """Offer what the list has before this place. Values that are being updated, or are on disk, are offered when
        they are needed; a rank that needs one has offered all before it."""
        while self._unoffered and self._unoffered[0] < place:
            self._units[self._order[self._unoffered.popleft()]].flat_params.post_shard(self._purpose)

    def need(self, *indices: int) -> None:
        """Make units whole now, and start what comes next."""
        wanted = [index for index in indices if not self.ready(index)]
        if self._release_when_idle:
            self._release_idle(but=indices)
        if wanted:
            self._gather(wanted)

    def _gather(self, wanted: list[int]) -> None:
        wanted.sort(key=self._place)
        unlisted = []
        for index in wanted:
            self.seen.append(index)
            place = self._ahead.pop(index) if index in self._ahead else self._place(index)
            if place in self._left:
                self._fetch(place)
            elif self._units[index].flat_params.state is ParameterState.SHARDED:
                unlisted.append(index)
            if place < len(self._order):
                self._at = place + 1
        if unlisted:
            self._gather_unlisted(unlisted)
        self._look_ahead()
        for index in wanted:
            if self._watch:
                self._watch.needed(index)
            self._units[index].flat_params.finish_gather()
            if self._watch:
                self._watch.arrived(index)

    def hold(self, *indices: int) -> None:
        """A module begins to compute with units: they are not idle."""
        self.need(*indices)
        for index in indices:
            self._busy[index] = self._busy.get(index, 0) + 1

    def idle(self, index: int) -> None:
        """A module has ended."""
        self._busy[index] = max(self._busy.get(index, 0) - 1, 0)

    def busy(self, index: int) -> bool:
        return bool(self._busy.get(index))

    def done(self, index: int) -> None:
        """Nobody needs a unit any more in this pass."""
        if index not in self._ahead:
            self._release(index)

    def take(self, index: int) -> None:
        """Fetch what peers offer of a unit in this pass, needed or not: they wait for that before it changes."""
        for place in [place for place in self._places.get(index, ()) if place in self._left]:
            if self._comm.any_order:  # else an offer is nothing by itself
                self._offer_to(place + 1)
                self._pass_over(place)

    def end(self) -> None:
        """The pass is over: fetch what is left of its list, and release all but the unit to keep."""
        self._offer_to(len(self._order))
        keep, self._keep = self._keep, None
        self._busy.clear()
        for place in sorted(self._left):
            self._fetch(place)
            if self._order[place] != keep:
                self._release(self._order[place])
        for index in sorted(self._live - {keep}):
            self._release(index)
        self._ahead.clear()
        if self._watch and self._order and (decided := self._watch.end_of_pass(self._purpose)) is not None:
            self.prefetch[self._purpose] = decided
        self._purpose, self._order, self._at = LONE, [], 0

    def ready(self, index: int) -> bool:
        """Whole, and a need of it is known to the pass."""
        return self._units[index].flat_params.state is ParameterState.UNSHARDED and index not in self._ahead

    def _place(self, index: int) -> int:
        """Where a need of this unit stands in the list: the next place that is left, or one before, or none."""
        if index in self._ahead:
            return self._ahead[index]
        places = [place for place in self._places.get(index, ()) if place in self._left]
        return min(places, key=lambda place: (place < self._at, place), default=len(self._order))

    def _gather_unlisted(self, indices: Sequence[int]) -> None:
        if self.negotiate and self._purpose != BACKWARD:
            self._negotiate(indices, here=False)
            return
        for index in indices:
            values = self._units[index].flat_params
            if self._purpose == LONE:
                values.finish_posted(LONE)  # all ranks are here again, so they have had the last one
            values.post_shard(self._purpose)
            self._start(index)

    def catch_up(self) -> None:
        """Give peers what they need until all ranks are here."""
        while self.negotiate and self._units and not self._negotiate((), here=True):
            pass

    def _negotiate(self, indices: Sequence[int], *, here: bool) -> bool:
        """Tell what I need and serve what others need. True if all ranks are here, needing nothing."""
        mine = bytes([here, *(index in indices for index in range(len(self._units)))])
        rows = self._comm.gather_bytes(mine, Label("negotiate", "the next units"))
        for index, unit in enumerate(self._units):
            wanting = [rank for rank, row in enumerate(rows) if row[1 + index]]
            if wanting:
                unit.flat_params.finish_posted(FORWARD)
                unit.flat_params.post_shard(FORWARD, to=wanting)
        for index in indices:
            self._start(index, FORWARD)
        return all(row[0] for row in rows)

    def _fetch(self, place: int) -> None:
        self._offer_to(place + 1)
        for soon in self._order[place + 1 : place + 1 + READ_AHEAD]:
            self._units[soon].flat_params.read_ahead()
        if not self._comm.any_order:
            first = place  # all before it have been fetched
            while first - 1 in self._left:
                first -= 1
            for earlier in range(first, place):
                self._pass_over(earlier)
        self._left.discard(place)
        self._start(self._order[place])

    def _pass_over(self, place: int) -> None:
        index = self._order[place]
        in_use = index in self._live and index not in self._ahead
        self._left.discard(place)
        self._start(index)
        if not in_use:
            self._release(index)

    def _look_ahead(self) -> None:
        """Fetch the next places, as long as those passed over leave room."""
        ahead = self.prefetch.get(self._purpose, 0)
        passed = [index for index, place in self._ahead.items() if place < self._at]
        if self._purpose == BACKWARD:
            for index in [index for index in passed if not self.saved[index]]:
                passed.remove(index)
                self._release(index)
        for place in range(self._at, min(self._at + ahead, len(self._order))):
            index = self._order[place]
            if place in self._left and not self.ready(index) and index not in self._ahead:
                if len(self._ahead) > ahead:
                    break
                self._fetch(place)
                self._ahead[index] = place

    def _start(self, index: int, purpose: str | None = None) -> None:
        purpose = purpose or self._purpose
        self.trace.append((purpose, self._units[index].name))
        if self._watch:
            self._watch.started(index)
        self._units[index].flat_params.receive_shards(purpose)
        self._live.add(index)

    def _release_idle(self, but: Sequence[int]) -> None:
        for index in sorted(self._live - self._ahead.keys() - {*but, self._keep}):
            if not self._busy.get(index):
                self._release(index)

    def _release(self, index: int) -> None:
        self._ahead.pop(index, None)
        values = self._units[index].flat_params
        values.reshard()
        if values.state is ParameterState.SHARDED:
            self._live.discard(index)
