"""The flat parameters of one unit: replicated on every rank, or sharded and unsharded for use.

Replicated: the parameters are views of one flat buffer at all times. An all-gather after the optimizer's step writes
the buffer.

Sharded: SHARDED -> GATHERING -> UNSHARDED -> SHARDED. This rank keeps its shard, and the flat buffer's storage has no
memory. Before a forward or backward the rank posts its shard to its peers; the shard must not change before they have
received it. `receive_shards` gives the storage its memory back and fills it; then the parameters become views of it.
`reshard` frees the memory again, so views that autograd saved lose theirs too, and have it back after the next unshard.
A resharded parameter is guarded: an operation on its values raises (guarded_parameters.py). Below that it is a
placeholder of its true shape, one NaN expanded with stride 0, which is all that functions see whose calls torch does
not show to the guard. A write of theirs changes the NaN, and the next unshard raises for it (on a CPU, for
floating-point parameters: on CUDA the check would wait for the device).

This rank's shard may be kept in host memory or in a file; `receive_shards` then copies it to the device. Where the host
updates the unit, the update may still run when the next forward begins (`hide_until_updated`): posting and receiving
wait for it, and until then replicated parameters are placeholders, as resharded ones are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import Enum, auto
from typing import NoReturn

import torch
from torch import Tensor, nn

from onefold.comm.communicator import Comm
from onefold.comm.endpoint import Pending
from onefold.comm.meter import Label
from onefold.comm.spans import span
from onefold.comm.streams import StreamEvent
from onefold.cost.layout import Span
from onefold.errors import StateError
from onefold.model.dtensor_shards import local_tensor, set_local_tensors
from onefold.model.storage import storage_key
from onefold.offload.host import Host
from onefold.offload.image import Image
from onefold.settings.placement import Placement, Scope, Tier
from onefold.state.edits import Edits
from onefold.state.guarded_parameters import ParameterGuard, no_guard
from onefold.state.rounding import narrowed
from onefold.state.transitions import follow
from onefold.state.views import FlatViews


class ParameterState(Enum):
    """What this rank has in memory of a unit's parameters, and what the model's parameters are meanwhile."""

    SHARDED = "this rank's shard; the parameters are placeholders"
    GATHERING = "this rank's shard and the flat buffer, which is being filled; the parameters are placeholders"
    UNSHARDED = "the flat buffer, and this rank's shard where parameters are sharded; the parameters are views of it"


class ParameterEvent(Enum):
    GATHER_STARTED = auto()  # the buffer has its memory, and shards are coming
    UPDATE_STARTED = auto()  # the host updates replicated parameters, which nobody sees meanwhile
    COMPLETED = auto()  # the all-gather, or the host update
    RESHARDED = auto()  # the buffer's memory is free


PARAMETER_STATES: dict[tuple[ParameterState, ParameterEvent], ParameterState] = {
    (ParameterState.SHARDED, ParameterEvent.GATHER_STARTED): ParameterState.GATHERING,
    (ParameterState.UNSHARDED, ParameterEvent.UPDATE_STARTED): ParameterState.GATHERING,
    (ParameterState.GATHERING, ParameterEvent.COMPLETED): ParameterState.UNSHARDED,
    (ParameterState.UNSHARDED, ParameterEvent.RESHARDED): ParameterState.SHARDED,
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
        self.scope, self._hidden_between_passes, self._tier = (
            placement.parameters,
            placement.hidden_between_passes,
            placement.parameters_tier,
        )
        self.name, self._mine = views.layout.name, views.layout.shard(comm.rank)
        self.buffer = views.empty(views.layout.numel)
        self._own_slice = self.buffer[self._mine.start : self._mine.stop]
        self._buffer_bytes = self.buffer.nbytes
        self.storage = storage_key(self.buffer)
        self._flat_views = views.all(self.buffer)
        self._receiving: Pending | None = None
        self.on_resize: list[Callable[[Tensor], None]] = []  # called when the buffer's memory is freed or returns
        self._posted: dict[str, list[Pending]] = {}  # messages with this rank's shard, by purpose
        self.pins = 0  # while above zero, reshard does nothing
        self.reads = 0  # how often this rank's shard was read for use: who overwrites it comes after the last
        self._shard: Tensor | None = None  # None: replicated
        self.image: Image | None = None  # the file in which this rank's shard is kept
        self._wait_for_host: Callable[[], None] | None = None  # while a host update runs: waits for it
        self._host_is_done: Callable[[], bool] = bool  # True once the host update no longer uses the shard
        self._copying: StreamEvent | None = None  # a copy of this rank's shard from the host to the device
        self._last_copy = StreamEvent()
        self._edits = edits
        self.guard = ParameterGuard(params, [slot.name for slot in views.layout.slots])
        self._init_placeholders()
        if self.scope is Scope.REPLICATED:
            self._init_replicated()
        else:
            self._init_sharded()

    def _init_replicated(self) -> None:
        self._views.zero_padding(self.buffer)
        for param, view in zip(self._params, self._flat_views, strict=True):
            view.copy_(narrowed(local_tensor(param).detach(), view.dtype))
        self.state = ParameterState.UNSHARDED
        self._show_views()

    def _init_sharded(self) -> None:
        self.buffer.untyped_storage().resize_(0)
        dtypes = {param.dtype for param in self._params}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        self._shard = narrowed(self._views.flatten(self._params, self._mine, dtype), self._views.dtype)
        if self._tier is not Tier.DEVICE:
            self._shard = self._host.keep(self._shard)
        self.state = ParameterState.SHARDED
        self._show_placeholders()

    def _init_placeholders(self) -> None:
        """Makes one NaN per parameter, expanded to its shape: what users see of a parameter that is resharded."""
        if self.scope is Scope.SHARDED or self._hidden_between_passes:
            dtype, device = self._views.dtype, self._views.device
            self._nans = torch.full((len(self._params),), _blank(dtype), dtype=dtype, device=device)
            self._placeholders = [self._nans[i].expand(local_tensor(p).size()) for i, p in enumerate(self._params)]

    # -- updates ----------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        return self._views.dtype

    @property
    def offloaded_or_updating(self) -> bool:
        """This rank's shard is kept in a file, or a host update of it is running."""
        return self._wait_for_host is not None or self.image is not None

    def hide_until_updated(self, wait: Callable[[], None], done: Callable[[], bool]) -> None:
        """A host update of the unit has been queued: users see the parameters only after `wait` has returned. Until
        `done` returns True, the update alone uses this rank's shard and its file."""
        assert self._wait_for_host is None
        self.check_no_user_writes()
        self._wait_for_host, self._host_is_done = wait, done
        if self._hidden_by_updates:
            self._move(ParameterEvent.UPDATE_STARTED)
            self._show_placeholders()

    def hide_between_passes(self, hidden: bool) -> None:
        """From now on host updates may run beside the next forward, and hide the parameters until they are done; or
        no longer. No update is running."""
        assert self._wait_for_host is None
        self._hidden_between_passes = hidden
        if self.scope is Scope.REPLICATED:  # sharded ones have placeholders
            self.finish_gather()  # the last update may still hide them
            self._init_placeholders()

    @property
    def _hidden_by_updates(self) -> bool:
        """The parameters are replicated and visible now, and a host update replaces them by placeholders."""
        return self.scope is Scope.REPLICATED and self._hidden_between_passes and self.state is ParameterState.UNSHARDED

    def check_no_user_writes(self) -> None:
        """Before a host update: raises if a user wrote parameters outside full_parameters. Raises once per write."""
        if self._hidden_by_updates and (written := self._edits.written()):
            self._edits.accept()
            self._refuse_write(written)

    def wait_for_update(self) -> None:
        """Waits until a running host update has finished, and raises its error. After a KeyboardInterrupt the next call
        waits again."""
        if self._wait_for_host is not None:
            try:
                self._wait_for_host()
            except Exception:
                self._wait_for_host = None  # the update failed, and its error has been raised
                raise
            self._wait_for_host = None

    def part(self, span: Span) -> Tensor:
        """These elements of the unit, all of which this rank updates."""
        if self._shard is None:
            return self.buffer[span.start : span.stop]
        mine = span.shift(-self._mine.start)
        return self._shard[mine.start : mine.stop]

    def gather_updated(self) -> Pending:
        """Starts the all-gather of replicated parameters after each rank has updated its shard of them."""
        return self._comm.all_gather(self.buffer, Label("gather-updated", self._views.layout.name))

    # -- unshard and reshard ----------------------------------------------------------------------------------------

    def _move(self, event: ParameterEvent) -> None:
        self.state = follow(PARAMETER_STATES, self.state, event, self.name)

    def post_shard(self, purpose: str, to: Sequence[int] | None = None) -> None:
        """Starts to send this rank's shard to all peers, or to some: the first half of an all-gather, whose other half
        is `receive_shards`."""
        self.wait_for_update()
        if self._shard is None or self._comm.size == 1:
            return
        self.reads += 1
        self.load_shard()
        posted = self._comm.post_shard(self._shard, Label(purpose, self._views.layout.name), to)
        self._posted.setdefault(purpose, []).append(posted)

    def finish_posted(self, purpose: str | None = None) -> None:
        """Waits until the peers have received every shard that was posted, for one purpose or for all."""
        for known in list(self._posted) if purpose is None else [purpose]:
            for posted in self._posted.pop(known, ()):
                posted.wait()

    def receive_shards(self, purpose: str) -> None:
        """SHARDED -> GATHERING: starts to receive the peers' shards. Also if the unit is unsharded already: every
        shard that a peer has posted must be received once."""
        if self._shard is None:
            return
        self.wait_for_update()
        self.finish_gather()
        if self.state is ParameterState.SHARDED:
            self._fill_from_shard()
        if self._comm.size > 1:
            with self._host.after_copy(self._copying) if self._copying else nullcontext():
                self._receiving = self._comm.receive_shards(self.buffer, Label(purpose, self._views.layout.name))

    def _fill_from_shard(self) -> None:
        """SHARDED -> GATHERING: gives the flat buffer its memory, and copies this rank's shard into it."""
        self.buffer.untyped_storage().resize_(self._buffer_bytes)
        self._resized()
        self._copy_own_shard()
        self._move(ParameterEvent.GATHER_STARTED)

    def unshard_for_load(self) -> None:
        """SHARDED -> UNSHARDED without a message: for a load that replaces parameters, of which this rank keeps its
        shard. What the load leaves alone is right in this rank's shard, and undefined elsewhere."""
        self.wait_for_update()
        if self.state is ParameterState.SHARDED:
            self._fill_from_shard()
        self.finish_gather()

    def _copy_own_shard(self) -> None:
        """Copies this rank's shard into the flat buffer; from the host on the copy stream, beside compute."""
        assert self._shard is not None
        self.reads += 1
        self.load_shard()
        if self.on_host:
            with span("upload", "shard", self._views.layout.name):
                self._copying = self._host.to_device(self._shard, self._own_slice)
        else:
            self._own_slice.copy_(self._shard)

    @property
    def on_host(self) -> bool:
        """This rank's shard is kept in host memory or in a file."""
        return self._shard is not None and self._tier is not Tier.DEVICE

    def keep_in_file(self, image: Image) -> None:
        """From now on this rank's shard is kept in a file, and is in host memory only while it is needed."""
        self.image = image
        image.store(changed=True)
        image.wait_stored()

    def move_shard(self, tier: Tier) -> None:
        """Keeps this rank's shard on the device or in host memory from now on. The unit is sharded, and nothing is in
        flight."""
        assert self._shard is not None and self.state is ParameterState.SHARDED and tier is not Tier.DISK
        self.wait_for_update()
        self.finish_posted()
        self._last_copy.wait()
        self.load_shard()
        before, image = self._shard, self.image
        if tier is Tier.DEVICE:
            self._shard = torch.empty_like(before, device=self._views.device).copy_(before)
        else:
            self._shard = self._host.keep(before)
        if image is not None:
            image.store(changed=False)
        self.image, self._tier = None, tier

    def start_load(self) -> None:
        """Starts to read this rank's shard from its file."""
        if self.image is not None:
            self.image.start_load()

    def read_ahead(self) -> None:
        """Starts to read this rank's shard from its file, unless a host update has still to write it there."""
        if self._wait_for_host is None or self._host_is_done():
            self.start_load()

    def load_shard(self) -> None:
        """Waits until this rank's shard is in memory, if it is kept in a file."""
        if self.image is not None:
            self.image.load()

    def unload_shard(self, *, changed: bool = False) -> None:
        """Frees the memory of a shard that is kept in a file, and starts to write it there if it was `changed`."""
        if self.image is not None and self.image.is_loaded:
            (self._copying or self._last_copy).wait()
            self.finish_posted()
            self.image.store(changed=changed)

    def wait_stored(self) -> None:
        """Waits until the write that `unload_shard` started has completed."""
        if self.image is not None:
            self.image.wait_stored()

    def shards(self) -> list[Tensor]:
        return [] if self._shard is None else [self._shard]

    def finish_gather(self) -> None:
        """GATHERING -> UNSHARDED: waits for the peers' shards and makes the parameters views of the flat buffer."""
        if self._receiving is not None:
            receiving, self._receiving = self._receiving, None
            receiving.wait()
        if self._copying is not None:
            self._last_copy, self._copying = self._copying, None
            self._last_copy.stream_wait()
        if self.state is ParameterState.GATHERING:
            self.wait_for_update()
            self._check_placeholders()
            self._check_places(self._placeholders)
            self._move(ParameterEvent.COMPLETED)
            self._show_views()

    def reshard(self) -> None:
        """UNSHARDED -> SHARDED: frees the flat buffer's memory, unless the unit is pinned."""
        if self._shard is None or self.pins:
            return
        self.finish_gather()
        if self.state is ParameterState.UNSHARDED:
            written = self._edits.written()
            self._show_placeholders()
            self.buffer.untyped_storage().resize_(0)
            self._resized()
            self._move(ParameterEvent.RESHARDED)
            if self._wait_for_host is None:  # else the host update uses the shard, and unloads it
                self.unload_shard()
            if written:
                self._refuse_write(written)

    def _resized(self) -> None:
        for told in self.on_resize:
            told(self.buffer)

    def write_back(self) -> None:
        """Copies what the unsharded parameters hold now into this rank's shard."""
        self._edits.accept()
        if self._shard is not None:
            assert self.state is ParameterState.UNSHARDED
            self.finish_posted()
            self.load_shard()
            self._shard.copy_(self._own_slice)
            self.unload_shard(changed=True)

    def forget_writes(self) -> None:
        """Drops what users wrote into the flat buffer: sharded parameters lose it at `reshard`, without an error."""
        if self.state is ParameterState.UNSHARDED:
            self._edits.accept()

    @property
    def visible(self) -> bool:
        """Whether the parameters are views of the flat buffer, and not guarded."""
        return self.state is ParameterState.UNSHARDED and not self.guard.is_set

    def hide(self) -> None:
        """Guards the parameters of a unit that stays unsharded between forward and backward, so that all units are
        alike to users. A pinned unit is theirs to use."""
        if self.state is ParameterState.UNSHARDED and not self.pins:
            self.guard.set()

    def show(self) -> None:
        """Ends `hide`."""
        if self.state is ParameterState.UNSHARDED:
            self.guard.lift()

    def _show_views(self) -> None:
        self.guard.lift()
        set_local_tensors(self._params, self._flat_views)
        self._edits.accept()

    def _show_placeholders(self) -> None:
        self.guard.lift()
        set_local_tensors(self._params, self._placeholders)
        self.guard.set()

    # -- checks -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises unless every parameter is the view of the flat buffer, or the placeholder, that was assigned to it."""
        self._check_places(self._flat_views if self.state is ParameterState.UNSHARDED else self._placeholders)

    def _check_places(self, expected: Sequence[Tensor]) -> None:
        if self._comm.simulated:  # tensors may have no memory
            return
        with no_guard():
            moved = [
                slot.name
                for param, ours, slot in zip(self._params, expected, self._views.layout.slots, strict=True)
                if _elsewhere(local_tensor(param), ours)
            ]
        if moved:
            raise StateError(
                f"{moved[0]} left the flat buffer it shares with its unit (.to(), .half(), assigning .data or "
                f"load_state_dict(assign=True) after shard()); do that before shard(), or copy values in place"
            )

    def _check_placeholders(self) -> None:
        """Raises if a user wrote to a placeholder, whose NaN is gone then."""
        if (
            self._comm.simulated
            or self._nans.is_cuda  # to look would wait for the device
            or not self._nans.is_floating_point()
            or bool(torch.isnan(self._nans).all())
        ):
            return
        written = torch.nonzero(~torch.isnan(self._nans)).flatten().tolist()
        self._nans.fill_(_blank(self._nans.dtype))
        self._refuse_write(written)

    def _refuse_write(self, written: Sequence[int]) -> NoReturn:
        names = ", ".join(self._views.layout.slots[i].name for i in written)
        raise StateError(
            f"{names} was written while it is sharded (spread over ranks) or updated on the host: the write is lost; "
            f"write inside onefold.full_parameters(model, write=True), and not in forward "
            f"(nn.Embedding(max_norm=…) does)"
        )

    def tensors(self) -> list[Tensor]:
        """Every tensor that holds parameters, or stands for them, now."""
        nans = [self._nans] if self.scope is Scope.SHARDED or self._hidden_between_passes else []
        return [self.buffer, *nans] if self._shard is None else [self._shard, self.buffer, *nans]


def _elsewhere(here: Tensor, ours: Tensor) -> bool:
    """Whether a parameter no longer is the tensor that was assigned to it."""
    if here.is_set_to(ours) and here.dtype is ours.dtype:  # one call: this runs for every parameter in a forward
        return False
    return bool(here.numel() and here.data_ptr() != ours.data_ptr()) or _form(here) != _form(ours)


def _form(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.size(), tensor.stride(), tensor.dtype


def _blank(dtype: torch.dtype) -> float | int:
    """What a placeholder of this dtype reads as."""
    return float("nan") if dtype.is_floating_point or dtype.is_complex else 0
