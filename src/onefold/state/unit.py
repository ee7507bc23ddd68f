"""A unit: a few parameters in one flat buffer that are gathered, reduced and updated together.

Where the host updates a unit, its master copy and optimizer state are in host memory or in a file, and its parameters
are copied to a staging buffer for the update: 1 `start_load`  2 `finish_load`  3 update  4 `store`  5 `wait_stored`.
Between steps, whoever reads or changes that state does so inside `state_in_memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comm
from onefold.comm.endpoint import Pending
from onefold.comm.meter import Label
from onefold.comm.streams import StreamEvent
from onefold.cost.layout import Span, UnitLayout
from onefold.offload.image import Image
from onefold.offload.tiers import Tiers
from onefold.settings.placement import Placement, Scope, Tier
from onefold.settings.precision import Dtypes
from onefold.state.digests import digests
from onefold.state.edits import Edits
from onefold.state.flat_parameters import FlatParameters
from onefold.state.gradients import Gradients
from onefold.state.master import Fp32Master, Master, make_master, stored_master
from onefold.state.staging import StagingBuffer
from onefold.state.views import FlatViews


class Unit:
    def __init__(
        self,
        layout: UnitLayout,
        params: Sequence[nn.Parameter],
        placement: Placement,
        comm: Comm,
        replicas: Comm,
        pool: Pool,
        dtypes: Dtypes,
        tiers: Tiers,
        *,
        trained: bool,
    ) -> None:
        self.layout, self.params, self.dtypes = layout, list(params), dtypes
        self.name, self.trained = layout.name, trained
        self.mine = layout.shard(comm.rank)
        views = FlatViews(layout, params, dtypes.compute)
        owned = layout.body if placement.optimizer is Scope.REPLICATED else layout.body.clip(self.mine)
        self.has_training_state = trained  # else the parameters are their own master
        wide = views.flatten(params, owned, torch.float32) if trained and dtypes.narrow else None
        self.edits = Edits(params)
        self.flat_params = FlatParameters(views, params, placement, comm, tiers.host, self.edits)
        self._views, self._comm, self._device_pool, self._tiers = views, comm, pool, tiers
        self._in_memory, self._will_change = False, False
        self._averages: list[Tensor] = []
        self._averaged = False  # compute reads a moving average in place of the parameters
        self._optimizer_states: list[Callable[[], list[Tensor]]] = []  # of each unit optimizer
        self.parked = False  # see `park`
        self._take_placement(placement, owned)
        stored = stored_master(wide, dtypes.master) if wide is not None else None
        stored = tiers.host.keep(stored, pinned=False) if stored is not None and self.updated_on_host else stored
        self.master = make_master(self.staging or self.flat_params, owned, stored, self.pool)
        host = tiers.host if self.updated_on_host else None
        self.gradients = Gradients(views, placement.gradients, comm, replicas, pool, dtypes, host)
        self._make_image()
        if placement.parameters_tier is Tier.DISK:
            image = tiers.image(f"parameters of {self.name}", tiers.host.staging, self.flat_params.shards)
            if image is not None:  # a rehearsal has no files
                self.flat_params.keep_in_file(image)
            self._offloaded = True  # also if they are frozen

    def _take_placement(self, placement: Placement, owned: Span) -> None:
        """What follows from where the states of the unit are."""
        self.placement = placement
        self.updated_on_host = placement.updated_on_host and self.trained
        host = self._tiers.host
        self.pool = host.scratch if self.updated_on_host else self._device_pool  # for scratch vectors of updates
        self.staging = StagingBuffer(self.flat_params, owned, host) if self.updated_on_host else None
        self.image: Image | None = None  # master and optimizer state, where they are kept in a file
        self._offloaded = self.updated_on_host or self.flat_params.image is not None
        self._hidden_between_passes = placement.parameters is Scope.SHARDED or placement.hidden_between_passes
        # users may write parameters between steps, and there is a master that must follow
        self.may_be_edited = (
            self.dtypes.narrow and placement.parameters is Scope.REPLICATED and not placement.hidden_between_passes
        )

    def _make_image(self) -> None:
        if self.updated_on_host and self.placement.optimizer_tier is Tier.DISK:
            name, pool = f"optimizer state of {self.name}", self._tiers.host.scratch
            self.image = self._tiers.image(name, pool, self.state_tensors)
        if self.image is not None:
            self.image.store(changed=True)
            self.image.wait_stored()  # else the buffers of all units would be in memory at once

    @property
    def settled(self) -> bool:
        """Between updates nobody writes the master, but by calls that wait for a snapshot: users have no view of it."""
        own = isinstance(self.master, Fp32Master) or self.placement.parameters is Scope.SHARDED
        return own and not self._offloaded and not self.flat_params.on_host

    @property
    def gathers_updated(self) -> bool:
        """Each rank updates its shard of parameters that are replicated, so an all-gather follows the update."""
        return self.placement.gathers_updated

    def gather_updated(self) -> list[Pending]:
        """Starts the all-gather of replicated parameters after each rank has updated its shard of them. What the caller
        must wait for: nothing if the next forward may overlap it, since whoever uses the parameters then waits."""
        pending = self.flat_params.gather_updated()
        if not self.placement.hidden_between_passes:
            return [pending]
        self.flat_params.hide_until_updated(pending.wait, lambda: True)
        return []

    def state_tensors(self) -> list[Tensor]:
        """The tensors of the master copy and of the optimizer state."""
        optimizers = (tensor for state in self._optimizer_states for tensor in state())
        return [*self.master.tensors(), *optimizers, *self._averages]

    @property
    def owned_shard(self) -> Span:
        """The elements of the unit's parameters that are this rank's at every stage."""
        return self.layout.body.clip(self.mine)

    @property
    def average_bytes(self) -> int:
        """Bytes of moving averages of the master."""
        return sum(average.numel() * average.itemsize for average in self._averages)

    def add_average(self, vector: Tensor) -> None:
        """Keeps a moving average of the master where the master is."""
        with self.state_in_memory(write=self.image is not None):
            self._averages.append(vector)

    def show_average(self, shown: bool) -> None:
        """Compute reads a moving average from now on, which is no edit; or the parameters again."""
        self._averaged = shown
        self.edits.accept()

    def remove_average(self, vector: Tensor) -> None:
        """Frees a moving average."""
        self._averages = [other for other in self._averages if other is not vector]

    def attach_state(self, tensors: Callable[[], list[Tensor]]) -> None:
        """A unit optimizer, whose state these are, updates parameters of the unit from now on."""
        self._optimizer_states.append(tensors)

    def detach_state(self, tensors: Callable[[], list[Tensor]]) -> None:
        """Frees the state of a unit optimizer. Nothing is in flight."""
        if tensors in self._optimizer_states:
            with self.state_in_memory(write=True):
                self._optimizer_states.remove(tensors)

    def take_edits(self, *, uncounted: bool = False) -> None:
        """Copies what users wrote in place into replicated 16-bit parameters to their fp32 master. With `uncounted`
        also what torch did not count (.data), which takes a pass over the unit. Updates find such edits themselves."""
        if not self.may_be_edited or self._averaged:
            return
        self._tiers.wait_for_snapshot()
        if written := self.edits.written():
            with self.state_in_memory(write=True):
                for slot in written:
                    self.master.take_from_parameters(self.layout.slots[slot].span)
            self.edits.accept()
        if uncounted and self.trained:
            with self.state_in_memory():
                if self.master.take_changed(self.master.owned):
                    with self.state_in_memory(write=True):
                        pass  # the master has changed

    @contextmanager
    def update(self, to_update: Sequence[int] | None = None) -> Iterator[None]:
        """Surrounds an update of the unit, or the queueing of its host update: users' edits reach the master first, and
        the update's own writes are not taken for edits. `to_update` flags the parameters to update; None: all."""
        self._tiers.wait_for_snapshot()
        self.take_edits()
        yield
        self.edits.record_own_write(to_update)

    def begin_user_writes(self) -> None:
        """Users may write parameters from here to `take_user_writes`; each element they change reaches the master."""
        if self.dtypes.narrow:
            self.take_edits()
            with self.state_in_memory():
                self.master.begin_user_writes()

    def take_user_writes(self) -> None:
        """Keeps what users have written since `begin_user_writes`: in the shard, and in the master."""
        self._tiers.wait_for_snapshot()
        if self._hidden_between_passes:
            self.flat_params.write_back()
        if self.trained and self.dtypes.narrow:
            with self.state_in_memory(write=True):
                self.master.take_user_writes()
        self.edits.accept()

    def drop_user_writes(self) -> None:
        """Ends `begin_user_writes` after an error: writes to sharded parameters are lost, and none reaches a master."""
        if self._hidden_between_passes:
            self.flat_params.forget_writes()
        self.master.drop_user_writes()

    def digests(self) -> Tensor:
        """A digest of what each parameter holds, all of which are unsharded."""
        buffer = self.flat_params.buffer
        return digests(buffer[slot.start : slot.start + slot.span.numel] for slot in self.layout.slots)

    # -- state on the host and on disk -------------------------------------------------------------------------------

    def start_load(
        self, after: StreamEvent | None = None, *, parameters: bool = True, into: Tensor | None = None
    ) -> None:
        """Starts to load what a host update needs: optimizer state from its file and, with `parameters`, the parameters
        from the device once `after` has passed. They go to `into`, or to a buffer of the pool."""
        if self.image is not None:
            self.image.start_load()
        if self.staging is not None:
            self.staging.start_load(after, fill=parameters, into=into)

    def finish_load(self) -> None:
        """Waits until all that `start_load` began is in host memory."""
        if self.image is not None:
            self.image.load()
        if self.staging is not None:
            self.staging.finish_load()

    def store(self, *, changed: bool, after: StreamEvent | None = None) -> StreamEvent:
        """Starts to write state and parameters, if `changed`, back to where they are kept; the event after which the
        device may read the parameters."""
        if self.image is not None:
            self.image.store(changed=changed)
        return self.staging.store(changed=changed, after=after) if self.staging is not None else StreamEvent()

    def wait_stored(self) -> None:
        """Waits until the writes that `store` started have completed."""
        if self.image is not None:
            self.image.wait_stored()
        if self.staging is not None:
            self.staging.wait_stored()

    @contextmanager
    def state_in_memory(self, *, write: bool = False) -> Iterator[None]:
        """Inside, master, optimizer state and parameters are in memory, to be read, and with `write` to be changed."""
        if write:
            self._tiers.wait_for_snapshot()
        self._will_change = self._will_change or (write and self._in_memory)
        if not self._offloaded or self._in_memory:
            yield
            return
        self._tiers.load_for_reading(None)  # also if it is this unit: what was loaded for reading is not written back
        self._load()
        self._in_memory, self._will_change = True, write
        try:
            yield
        finally:
            self._in_memory = False
            self._unload(changed=self._will_change)

    def keep_state_in_memory(self) -> None:
        """Loads master, optimizer state and parameters for reading in several calls, as a save does: they stay in
        memory until another unit is loaded for reading, or none."""
        if self._offloaded and not self._in_memory:
            self._tiers.load_for_reading(self)

    def _load(self) -> None:
        self.flat_params.wait_for_update()
        try:
            if self.updated_on_host:
                self.start_load()
                self.finish_load()
            else:
                self.flat_params.load_shard()
        except Exception:
            with suppress(Exception):
                self._unload(changed=False)
            raise

    def _unload(self, *, changed: bool) -> None:
        if self.updated_on_host:
            self.store(changed=changed).stream_wait()
            self.wait_stored()
        else:
            self.flat_params.unload_shard(changed=changed)
            self.flat_params.wait_stored()

    def set_loaded(self, loaded: bool) -> None:
        self._load() if loaded else self._unload(changed=False)

    def move_optimizer(self, placement: Placement) -> None:
        """Keeps master and optimizer state on another tier from now on, where the unit is then updated; its unit
        optimizers must follow. Users' edits are in the master; no update and no reduction is in flight."""
        self._tiers.load_for_reading(None)
        self._tiers.wait_for_snapshot()  # what is moved is freed
        self.flat_params.wait_for_update()
        self.wait_stored()
        if self.image is not None:
            self.image.load()
        before, stored = self.image, self.master.tensors()
        leaves, self.parked = self._long_state(), False
        self._take_placement(placement, self.master.owned)
        moved = [self._in_its_place(leaf) for leaf in leaves]
        if before is not None:
            before.store(changed=False)
        for leaf, new in zip(leaves, moved, strict=True):
            leaf.data = new
        self.master = make_master(
            self.staging or self.flat_params, self.master.owned, stored[0] if stored else None, self.pool
        )
        self.gradients.update_on(self._tiers.host if self.updated_on_host else None)
        self.flat_params.hide_between_passes(placement.hidden_between_passes)
        self._make_image()

    def move_parameters(self, placement: Placement) -> None:
        """Keeps this rank's shard of the parameters on another tier from now on. They are sharded, and nothing is in
        flight; the unit optimizers must follow."""
        self._tiers.load_for_reading(None)
        self.flat_params.wait_for_update()
        self.wait_stored()
        self.flat_params.move_shard(placement.parameters_tier)
        image, stored = self.image, self.master.tensors()
        self._take_placement(placement, self.master.owned)
        self.image = image  # optimizer state stays where it is
        self.master = make_master(
            self.staging or self.flat_params, self.master.owned, stored[0] if stored else None, self.pool
        )

    def park(self) -> None:
        """Keeps master and optimizer state of a unit that the device updates in host memory until `unpark`, since a
        forward may need the room. It is not updated meanwhile."""
        self._tiers.wait_for_snapshot()
        self.parked = True
        for leaf in self._long_state():
            leaf.data = self._in_host_memory(leaf)

    def unpark(self) -> None:
        """Ends `park`; its unit optimizers must follow."""
        self.parked = False
        for leaf in self._long_state():
            leaf.data = self._in_its_place(leaf)

    def _long_state(self) -> list[Tensor]:
        """The tensors of master and optimizer state that may leave the device; step counts stay."""
        return [leaf for leaf in self.state_tensors() if leaf.dim()]

    def _in_its_place(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor of the master or of the optimizer state, in host memory or on the device."""
        if self.updated_on_host:
            return self._in_host_memory(tensor)
        return torch.empty_like(tensor, device=self._device_pool.device).copy_(tensor)

    def _in_host_memory(self, tensor: Tensor) -> Tensor:
        """A copy with the same strides, on which bits of sums depend, if the tensor fills its memory."""
        if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
            tensor = tensor.contiguous()
        in_line = tensor.as_strided((tensor.numel(),), (1,))
        return self._tiers.host.keep(in_line, pinned=False).as_strided(tensor.size(), tensor.stride())

    # -- the master --------------------------------------------------------------------------------------------------

    def free_training_state(self) -> None:
        """Frees master and gradients: the parameters as they are stand for both. Nothing is in flight. What is kept in
        a file stays there."""
        self.take_edits()
        self.gradients.drop()
        self.gradients.free()
        if self.image is None:
            self.master, self.has_training_state = Master(self.staging or self.flat_params, self.master.owned), False

    def make_training_state(self) -> None:
        """Makes the master anew, from the parameters as they are."""
        if not self.has_training_state:
            if self.dtypes.narrow:
                with self.state_in_memory():
                    wide = torch.empty(self.master.owned.numel, dtype=torch.float32, device=self.pool.device)
                    self.master.read(self.master.owned, wide)
                    stored = stored_master(wide, self.dtypes.master)
                stored = self._tiers.host.keep(stored, pinned=False) if stored is not None and self.staging else stored
                self.master = make_master(self.staging or self.flat_params, self.master.owned, stored, self.pool)
            self.has_training_state = True

    @property
    def rank(self) -> int:
        """This rank's place among those that share the unit."""
        return self._comm.rank

    def size(self, slot: int) -> torch.Size:
        """The shape of a parameter; of a DTensor, that of its local tensor."""
        return self._views.size(slot)

    def stride(self, slot: int) -> tuple[int, ...]:
        """The strides of a parameter in the flat buffer; the same while it is sharded."""
        return self._views.stride(slot)

    def in_memory_order(self, tensor: Tensor, slot: int) -> Tensor:
        """A tensor of a parameter's shape as a vector, its elements in the order of the flat buffer."""
        return self._views.in_memory_order(tensor, slot)

    def load_master(self, slot: int, value: Tensor) -> None:
        """Sets the master of one parameter from its unsharded values; this rank keeps the elements it owns. fp32 values
        replace the master; values in the compute dtype, as state_dict() gives them, replace those of its elements that
        round to another value."""
        part = self.layout.slots[slot].span.clip(self.master.owned)
        self.flat_params.finish_posted()  # peers may still be reading the old shard
        if part.numel:
            flat = self._views.in_memory_order(value, slot)
            at = part.shift(-self.layout.slots[slot].start)
            with self.state_in_memory(write=True):
                write = self.master.write if value.dtype is torch.float32 else self.master.write_rounded
                write(part, flat[at.start : at.stop].to(self.pool.device))

    def unsharded_master(self) -> list[Tensor]:
        """The fp32 master of every parameter, all-gathered. Collective where the optimizer is sharded."""
        owned = self.master.owned
        with self.state_in_memory():
            mine = torch.empty(owned.numel, dtype=torch.float32, device=self.pool.device)
            self.master.read(owned, mine)
        return self.unsharded(mine, owned, gather=self.placement.optimizer is Scope.SHARDED)

    def unsharded(self, vector: Tensor, span: Span, *, gather: bool) -> list[Tensor]:
        """Every parameter's view of a flat vector of which this rank has the elements in `span`: its own, which are
        all-gathered, or without `gather` all."""
        flat = torch.zeros(self.layout.numel, dtype=vector.dtype, device=self._views.device)
        flat[span.start : span.stop].copy_(vector)
        if gather:
            self._comm.all_gather(flat, Label("gather", self.name)).wait()
        return self._views.all(flat)
