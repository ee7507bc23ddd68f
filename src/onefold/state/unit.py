"""One flat unit: a few parameters whose values and gradients live, move and are updated together.

Where the host updates, the master and the optimizer's state are the host's, in memory or in a file, and values come to
a *staging buffer* there: `state_in_memory` is for whoever wants to see or change them between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.cost.layout import UnitLayout
from onefold.offload.host import Mark
from onefold.offload.image import Image
from onefold.offload.tiers import Tiers
from onefold.settings.placement import Placement, Scope, Tier
from onefold.settings.precision import Dtypes
from onefold.state.edits import Author, Edits
from onefold.state.flat_parameters import FlatParameters
from onefold.state.gradients import Gradients
from onefold.state.master import beside, master_of
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
        self.layout, self.params, self.placement, self.dtypes = layout, list(params), placement, dtypes
        self.name, self.trained = layout.name, trained
        self.mine = layout.shard(comm.rank)
        views = FlatViews(layout, params, dtypes.compute)
        owned = layout.body if placement.optimizer is Scope.REPLICATED else layout.body.clip(self.mine)
        self.updated_on_host = placement.updated_on_host and trained  # the host updates
        wide = views.lay(params, owned, torch.float32) if trained and dtypes.narrow else None
        self.edits = Edits(params)
        self.flat_params = FlatParameters(views, params, placement, comm, tiers.host, self.edits)
        self._views, self._comm = views, comm
        self.pool = tiers.host.scratch if self.updated_on_host else pool  # for updates
        self.staging = StagingBuffer(self.flat_params, owned, tiers.host) if self.updated_on_host else None
        kept = beside(wide, dtypes.master) if wide is not None else None
        kept = tiers.host.keep(kept, pinned=False) if kept is not None and self.updated_on_host else kept
        self.master = master_of(self.staging or self.flat_params, owned, kept, self.pool)
        host = tiers.host if self.updated_on_host else None
        self.gradients = Gradients(views, placement.gradients, comm, replicas, pool, dtypes, host)
        self.more_state: Callable[[], list[Tensor]] = list  # of the optimizer
        self.image: Image | None = None  # of master and state, where they are in a file
        if self.updated_on_host and placement.optimizer_tier is Tier.DISK:
            self.image = tiers.image(f"optimizer state of {self.name}", tiers.host.scratch, self.state_tensors)
        if self.image is not None:
            self.image.close(changed=True)
            self.image.reap()  # or the buffers of all units would be held at once
        if placement.parameters_tier is Tier.DISK:
            offloaded_or_updating = tiers.image(
                f"parameters of {self.name}", tiers.host.staging, self.flat_params.shards
            )
            assert offloaded_or_updating is not None
            self.flat_params.rest(offloaded_or_updating)
        self._tiers, self._held, self._will_change = tiers, False, False
        self._elsewhere = (
            self.updated_on_host or self.flat_params.image is not None
        )  # frozen ones may rest in a file, too
        self._seen_in_passes = placement.parameters is Scope.SHARDED or placement.late
        self._may_be_edited = dtypes.narrow and placement.parameters is Scope.REPLICATED and not placement.late

    @property
    def gathers_updated(self) -> bool:
        """Each rank updates its shard, and all have them whole."""
        return self.placement.optimizer is Scope.SHARDED and self.placement.parameters is Scope.REPLICATED

    def state_tensors(self) -> list[Tensor]:
        """The master and the optimizer's state."""
        return [*self.master.tensors(), *self.more_state()]

    def take_edits(self) -> None:
        """Whole 16-bit parameters that were edited in place tell their master."""
        if self._may_be_edited and (written := self.edits.written()):
            with self.state_in_memory(write=True):
                for slot in written:
                    self.master.adopt(self.layout.slots[slot].span)
            self.edits.accept(Author.USER)

    @contextmanager
    def update(self, kept: Sequence[int] | None = None) -> Iterator[None]:
        """Around every update by the optimizer, of all parameters or of those that are kept (a flag each): what users
        wrote before counts, and what is written inside is ours."""
        self.take_edits()
        yield
        self.edits.ours(Author.TRAINING, kept)

    def watch(self) -> None:
        """From here on users may write values of which every element counts by itself."""
        if self.dtypes.narrow:
            self.take_edits()
            with self.state_in_memory():
                self.master.watch()

    def absorb(self) -> None:
        """What users have written since `watch` is the truth."""
        if self._seen_in_passes:
            self.flat_params.write_back(Author.USER)
        if self.trained and self.dtypes.narrow:
            with self.state_in_memory(write=True):
                self.master.absorb()
            if self._may_be_edited:
                self.edits.accept(Author.USER)

    def unwatch(self) -> None:
        """What users have written since `watch` is dropped where values are sharded, and is no edit."""
        if self._seen_in_passes:
            self.flat_params.forget_writes()
        self.master.unwatch()

    # -- on the host -------------------------------------------------------------------------------------------------

    def prepare(self, after: Mark | None = None, *, values: bool = True) -> None:
        """Start to bring what an update needs to where it runs."""
        if self.image is not None:
            self.image.start()
        if self.staging is not None:
            self.staging.start(after, fill=values)

    def open(self) -> None:
        """It is there."""
        if self.image is not None:
            self.image.open()
        if self.staging is not None:
            self.staging.open()

    def close(self, *, changed: bool, after: Mark | None = None) -> Mark:
        """Back to where it belongs; when the values are there."""
        if self.image is not None:
            self.image.close(changed=changed)
        return self.staging.close(changed=changed, after=after) if self.staging is not None else Mark()

    def reap(self) -> None:
        """Wait until what was changed is back."""
        if self.image is not None:
            self.image.reap()
        if self.staging is not None:
            self.staging.reap()

    @contextmanager
    def state_in_memory(self, *, write: bool = False) -> Iterator[None]:
        """Master and state can be read, and with `write` changed."""
        self._will_change = self._will_change or (write and self._held)
        if not self._elsewhere or self._held:
            yield
            return
        self._tiers.turn_to(None)  # this one too: nobody writes what was brought to be read
        self._bring()
        self._held, self._will_change = True, write
        try:
            yield
        finally:
            self._held = False
            self._take_away(changed=self._will_change)

    def keep_state_in_memory(self) -> None:
        """The same for whoever reads bit by bit: until another unit, or none, is turned to."""
        if self._elsewhere and not self._held:
            self._tiers.turn_to(self)

    def _bring(self) -> None:
        self.flat_params.wait_for_update()
        try:
            if self.updated_on_host:
                self.prepare()
                self.open()
            else:
                self.flat_params.load_shard()
        except Exception:
            with suppress(Exception):
                self._take_away(changed=False)
            raise

    def _take_away(self, *, changed: bool) -> None:
        if self.updated_on_host:
            self.close(changed=changed).order()
            self.reap()
        else:
            self.flat_params.unload_shard(changed=changed)
            self.flat_params.reap()

    def turned_to(self, here: bool) -> None:
        self._bring() if here else self._take_away(changed=False)

    # -- of the master -----------------------------------------------------------------------------------------------

    def stride(self, slot: int) -> tuple[int, ...]:
        """In which order the elements of a parameter lie here, whole or not."""
        return self._views.stride(slot)

    def load_master(self, slot: int, value: Tensor) -> None:
        """New fp32 values of one parameter, on every rank alike; each keeps what it owns."""
        part = self.layout.slots[slot].span.clip(self.master.owned)
        self.flat_params.finish_posted()  # peers have had the old ones
        if part.numel:
            flat = self._views.in_memory_order(value, slot)
            at = part.shift(-self.layout.slots[slot].start)
            with self.state_in_memory(write=True):
                self.master.poke(part, flat[at.start : at.stop].to(self.pool.device))

    def unsharded_master(self) -> list[Tensor]:
        """Every parameter as the master has it, gathered from all ranks. Collective where the optimizer is sharded."""
        flat = torch.zeros(self.layout.numel, dtype=torch.float32, device=self._views.device)
        owned = self.master.owned
        with self.state_in_memory():
            mine = torch.empty(owned.numel, dtype=torch.float32, device=self.pool.device)
            self.master.peek(owned, mine)
        flat[owned.start : owned.stop].copy_(mine)
        if self.placement.optimizer is Scope.SHARDED:
            self._comm.gather(flat, Label("gather", self.name)).wait()
        return self._views.all(flat)
