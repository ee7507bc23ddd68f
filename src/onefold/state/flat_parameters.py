"""The flat parameters of one unit: replicated on every rank, or a shard that is gathered for use.

Replicated: the parameters are views of one flat buffer for good. An all-gather after the optimizer's step writes it.

Sharded: SHARDED -> GATHERING -> UNSHARDED -> SHARDED. This rank keeps its shard, which it posts to its peers before a
pass and which must not change before they have received it; the flat buffer's storage is empty. An all-gather gives the
storage its bytes back and fills them; the parameters become views of it. On release the storage is emptied again, so
views that autograd saved lose their memory too and come back to life with the next all-gather. A released parameter
reads as NaN: it is a placeholder of its true shape, one NaN of its own seen many times. Most writes to a placeholder
raise in torch; those that do not change the NaN, and the next all-gather finds it.

My shard may rest in host memory, or in a file (an image of one tensor), from where an all-gather brings it to the
device. Where the host updates, new values may still be on their way when the next pass begins (`expect`): whoever posts
or gathers the shard waits first, and replicated parameters are hidden, as released ones are, until they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import Enum, auto
from typing import NoReturn

import torch
from torch import Tensor, nn

from onefold.comm.communicator import Comm, Pending
from onefold.comm.meter import Label
from onefold.comm.spans import span
from onefold.cost.layout import Span
from onefold.errors import StateError
from onefold.model.dtensor_shards import held, put_all
from onefold.model.storage import storage_key
from onefold.offload.host import Host, Mark
from onefold.offload.image import Image
from onefold.settings.placement import Placement, Scope, Tier
from onefold.state.edits import Author, Edits
from onefold.state.rounding import narrowed
from onefold.state.transitions import follow
from onefold.state.views import FlatViews


class ParameterState(Enum):
    """What of a unit's parameters is in this rank's memory, and seen in the model."""

    SHARDED = "my shard; the parameters are placeholders"
    GATHERING = "my shard and the buffer that new values are travelling into; the parameters are placeholders"
    UNSHARDED = "all of them; the parameters are views of the buffer"


class ParameterEvent(Enum):
    GATHER_STARTED = auto()  # the buffer has its memory, and shards are coming
    UPDATE_STARTED = auto()  # the host updates replicated parameters, which nobody sees meanwhile
    COMPLETED = auto()  # the all-gather, or the host update
    RELEASED = auto()  # the buffer's memory is free


PARAMETER_STATES: dict[tuple[ParameterState, ParameterEvent], ParameterState] = {
    (ParameterState.SHARDED, ParameterEvent.GATHER_STARTED): ParameterState.GATHERING,
    (ParameterState.UNSHARDED, ParameterEvent.UPDATE_STARTED): ParameterState.GATHERING,
    (ParameterState.GATHERING, ParameterEvent.COMPLETED): ParameterState.UNSHARDED,
    (ParameterState.UNSHARDED, ParameterEvent.RELEASED): ParameterState.SHARDED,
}


class FlatParameters:
    def __init__(
        self,
        views: FlatViews,
        params: Sequence[nn.Parameter],
        placement: Placement,
        comm: Comm,
        host: Host,
        edits: Edits,
    ) -> None:
        self._views, self._params, self._comm, self._host = views, list(params), comm, host
        self.scope, self._late, self._tier = placement.parameters, placement.late, placement.parameters_tier
        self._mine = views.layout.shard(comm.rank)
        self.whole = views.empty(views.layout.numel)
        self._my_slot = self.whole[self._mine.start : self._mine.stop]
        self._whole_bytes = self.whole.nbytes
        self.storage = storage_key(self.whole)
        self._flat_views = views.all(self.whole)
        self._arriving: Pending | None = None
        self.on_resize: Callable[[Tensor], None] | None = None  # whoever counts bytes
        self._posted: dict[str, list[Pending]] = {}  # of my shard, by purpose
        self.pins = 0  # while above zero, release does nothing
        self._shard: Tensor | None = None
        self.image: Image | None = None  # the file in which my shard rests
        self._coming: Callable[[], None] | None = None  # waits for an update that is on the way
        self._updated: Callable[[], bool] = bool  # whether it has left my shard alone
        self._copied: Mark | None = None  # my shard is on its way to the device
        self._read = Mark()  # the last such copy
        self._edits = edits
        self._lay_marks()
        if self.scope is Scope.REPLICATED:
            self._lay_whole()
        else:
            self._lay_shard()

    def _lay_whole(self) -> None:
        self._views.zero_gaps(self.whole)
        for param, view in zip(self._params, self._flat_views, strict=True):
            view.copy_(narrowed(held(param).detach(), view.dtype))
        self.state = ParameterState.UNSHARDED
        self._show()

    def _lay_shard(self) -> None:
        self.whole.untyped_storage().resize_(0)
        dtypes = {param.dtype for param in self._params}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self._shard = narrowed(self._views.lay(self._params, self._mine, dtype), self._views.dtype)
        if self._tier is not Tier.DEVICE:
            self._shard = self._host.keep(self._shard)
        self.state = ParameterState.SHARDED
        self._hide()

    def _lay_marks(self) -> None:
        """Make the placeholders of parameters that are not to be seen."""
        if self.scope is Scope.SHARDED or self._late:
            dtype, device = self._views.dtype, self._views.device
            self._marks = torch.full((len(self._params),), _mark(dtype), dtype=dtype, device=device)
            self._placeholders = [self._marks[i].expand(held(p).size()) for i, p in enumerate(self._params)]

    # -- what the optimizer updates ---------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._views.layout.name

    @property
    def dtype(self) -> torch.dtype:
        return self._views.dtype

    @property
    def offloaded_or_updating(self) -> bool:
        """My shard is not in memory, or an update of it is on the way."""
        return self._coming is not None or self.image is not None

    def expect(self, wait: Callable[[], None], done: Callable[[], bool]) -> None:
        """An update was started elsewhere: nobody sees values before `wait` has returned. Until it is `done` my shard,
        and the file in which it rests, are its own."""
        assert self._coming is None
        self.check_unwritten()
        self._coming, self._updated = wait, done
        if self._seen_late:
            self._move(ParameterEvent.UPDATE_STARTED)
            self._hide()

    @property
    def _seen_late(self) -> bool:
        """True for replicated parameters that are shown now and that a host update will hide."""
        return self.scope is Scope.REPLICATED and self._late and self.state is ParameterState.UNSHARDED

    def check_unwritten(self) -> None:
        """Raises, once, if users wrote to parameters that a host update is about to replace."""
        if self._seen_late and (written := self._edits.written()):
            self._edits.accept()
            self._refuse_write(written)

    def wait_for_update(self) -> None:
        """Wait until no host update of this unit is on the way. An interrupted wait may be repeated."""
        if self._coming is not None:
            try:
                self._coming()
            except Exception:
                self._coming = None  # it failed, and has been heard
                raise
            self._coming = None

    def part(self, span: Span) -> Tensor:
        """The values of these elements of the unit, which this rank updates."""
        if self._shard is None:
            return self.whole[span.start : span.stop]
        mine = span.shift(-self._mine.start)
        return self._shard[mine.start : mine.stop]

    def gather_updated(self) -> Pending:
        """After an update of replicated parameters, send my shard to all ranks and receive theirs."""
        return self._comm.gather(self.whole, Label("gather-updated", self._views.layout.name))

    # -- life cycle -------------------------------------------------------------------------------------------------

    def _move(self, event: ParameterEvent) -> None:
        self.state = follow(PARAMETER_STATES, self.state, event, self.name)

    def post_shard(self, purpose: str, to: Sequence[int] | None = None) -> None:
        """Start to send my shard to all peers, or to some, which receive it when they like."""
        self.wait_for_update()
        if self._shard is None or self._comm.size == 1:
            return
        self.load_shard()
        post_shard = self._comm.post_shard(self._shard, Label(purpose, self._views.layout.name), to)
        self._posted.setdefault(purpose, []).append(post_shard)

    def finish_posted(self, purpose: str | None = None) -> None:
        """Wait until peers have received the shards that were posted, for one purpose or for all."""
        for known in list(self._posted) if purpose is None else [purpose]:
            for post_shard in self._posted.pop(known, ()):
                post_shard.wait()

    def receive_shards(self, purpose: str) -> None:
        """SHARDED -> GATHERING. Unsharded parameters are received all the same: each posted shard is taken once."""
        if self._shard is None:
            return
        self.wait_for_update()
        self.finish_gather()
        if self.state is ParameterState.SHARDED:
            self.whole.untyped_storage().resize_(self._whole_bytes)
            self._resized()
            self._fill_mine()
            self._move(ParameterEvent.GATHER_STARTED)
        if self._comm.size > 1:
            with self._host.before(self._copied) if self._copied else nullcontext():
                self._arriving = self._comm.receive_shards(self.whole, Label(purpose, self._views.layout.name))

    def _fill_mine(self) -> None:
        """Fill my slot of the buffer; a shard on the host is copied beside compute."""
        assert self._shard is not None
        self.load_shard()
        if self.on_host:
            with span("upload", "shard", self._views.layout.name):
                self._copied = self._host.to_device(self._shard, self._my_slot)
        else:
            self._my_slot.copy_(self._shard)

    @property
    def on_host(self) -> bool:
        """True if my shard rests on the host or on disk."""
        return self._shard is not None and self._tier is not Tier.DEVICE

    def rest(self, image: Image) -> None:
        """From now on my shard rests in a file."""
        self.image = image
        image.close(changed=True)
        image.reap()

    def start(self) -> None:
        """My shard will be needed soon."""
        if self.image is not None:
            self.image.start()

    def read_ahead(self) -> None:
        """My shard will be needed soon: read it, unless a host update has it, whose file holds old values meanwhile."""
        if self._coming is None or self._updated():
            self.start()

    def load_shard(self) -> None:
        """Bring my shard to memory."""
        if self.image is not None:
            self.image.open()

    def unload_shard(self, *, changed: bool = False) -> None:
        """Let my shard rest in its file: it is not needed for a while."""
        if self.image is not None and self.image.is_open:
            (self._copied or self._read).wait()
            self.finish_posted()
            self.image.close(changed=changed)

    def reap(self) -> None:
        """Wait until my shard is in its file."""
        if self.image is not None:
            self.image.reap()

    def shards(self) -> list[Tensor]:
        return [] if self._shard is None else [self._shard]

    def finish_gather(self) -> None:
        """GATHERING -> UNSHARDED: wait for the all-gather, and make the parameters views of the buffer."""
        if self._arriving is not None:
            arriving, self._arriving = self._arriving, None
            arriving.wait()
        if self._copied is not None:
            self._read, self._copied = self._copied, None
            self._read.order()
        if self.state is ParameterState.GATHERING:
            self.wait_for_update()
            self._check_marks()
            self._check_places(self._placeholders)
            self._move(ParameterEvent.COMPLETED)
            self._show()

    def release(self) -> None:
        """-> SHARDED: free the buffer, unless pinned."""
        if self._shard is None or self.pins:
            return
        self.finish_gather()
        if self.state is ParameterState.UNSHARDED:
            written = self._edits.written()
            self._hide()
            self.whole.untyped_storage().resize_(0)
            self._resized()
            self._move(ParameterEvent.RELEASED)
            if self._coming is None:  # else the update has my shard, and puts it away
                self.unload_shard()
            if written:
                self._refuse_write(written)

    def _resized(self) -> None:
        if self.on_resize is not None:
            self.on_resize(self.whole)

    def write_back(self, author: Author) -> None:
        """Copy my part of the unsharded parameters to my shard."""
        self._edits.accept(author)
        if self._shard is not None:
            assert self.state is ParameterState.UNSHARDED
            self.finish_posted()
            self.load_shard()
            self._shard.copy_(self._my_slot)
            self.unload_shard(changed=True)

    def forget_writes(self) -> None:
        """Writes to unsharded parameters are lost when they are released; they are no mistake."""
        if self.state is ParameterState.UNSHARDED:
            self._edits.accept()

    def _show(self) -> None:
        put_all(self._params, self._flat_views)
        self._edits.accept()

    def _hide(self) -> None:
        put_all(self._params, self._placeholders)

    # -- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every parameter is still ours: a view of the flat buffer, or its placeholder."""
        self._check_places(self._flat_views if self.state is ParameterState.UNSHARDED else self._placeholders)

    def _check_places(self, expected: Sequence[Tensor]) -> None:
        if self._comm.simulated:  # tensors may have no memory
            return
        for param, ours, slot in zip(self._params, expected, self._views.layout.slots, strict=True):
            here = held(param)
            if here.is_set_to(ours) and here.dtype is ours.dtype:  # in one call, for every parameter in every pass
                continue
            if (here.numel() and here.data_ptr() != ours.data_ptr()) or _form(here) != _form(ours):
                raise StateError(
                    f"{slot.name} left the flat buffer it shares with its unit (.to(), .half(), assigning .data or "
                    f"load_state_dict(assign=True) after shard()); do that before shard(), or copy values in place"
                )

    def _check_marks(self) -> None:
        if (
            self._comm.simulated
            or self._marks.is_cuda
            or not self._marks.is_floating_point()
            or bool(torch.isnan(self._marks).all())
        ):
            return
        written = torch.nonzero(~torch.isnan(self._marks)).flatten().tolist()
        self._marks.fill_(_mark(self._marks.dtype))
        self._refuse_write(written)

    def _refuse_write(self, written: Sequence[int]) -> NoReturn:
        names = ", ".join(self._views.layout.slots[i].name for i in written)
        raise StateError(
            f"{names} was written while its values are spread over ranks, so the write is lost; write inside "
            f"onefold.full_parameters(model, write=True), and not in forward (nn.Embedding(max_norm=…) does)"
        )

    def tensors(self) -> list[Tensor]:
        """All memory that holds parameters now."""
        marks = [self._marks] if self.scope is Scope.SHARDED or self._late else []
        return [self.whole, *marks] if self._shard is None else [self._shard, self.whole, *marks]


def _form(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.size(), tensor.stride(), tensor.dtype


def _mark(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0
