"""One flat unit: a few parameters whose values and gradients live, move and are updated together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onefold.comm import Comm, Label
from onefold.gradients import Gradients
from onefold.layout import UnitLayout
from onefold.master import master_of
from onefold.memory import Pool
from onefold.parts import version
from onefold.placement import Placement, Scope
from onefold.precision import Dtypes
from onefold.values import Values
from onefold.views import FlatViews


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
        *,
        trained: bool,
    ) -> None:
        self.layout, self.params, self.placement, self.dtypes = layout, list(params), placement, dtypes
        self.name, self.trained = layout.name, trained
        self.mine = layout.shard(comm.rank)
        views = FlatViews(layout, params, dtypes.compute)
        owned = layout.body if placement.optimizer is Scope.WHOLE else layout.body.clip(self.mine)
        wide = views.lay(params, owned, torch.float32) if trained and dtypes.narrow else None
        self.values = Values(views, params, placement.parameters, comm)
        self.master = master_of(self.values, owned, wide, dtypes.master, pool)
        self._views, self._comm = views, comm
        self.gradients = Gradients(views, placement.gradients, comm, replicas, pool, dtypes)
        self._versions: list[int] = []
        self.know_edits()

    def take_edits(self) -> None:
        """Whole 16-bit parameters that were edited in place tell their master."""
        if self.dtypes.narrow and self.placement.parameters is Scope.WHOLE:
            for slot, param, before in zip(self.layout.slots, self.params, self._versions, strict=True):
                if version(param) != before:
                    self.master.adopt(slot.span)
            self.know_edits()

    def know_edits(self) -> None:
        """Whatever was edited by now has reached the master."""
        self._versions = [version(param) for param in self.params]

    def stride(self, slot: int) -> tuple[int, ...]:
        """In which order the elements of a parameter lie here, whole or not."""
        return self._views.stride(slot)

    def load_master(self, slot: int, value: Tensor) -> None:
        """New fp32 values of one parameter, on every rank alike; each keeps what it owns."""
        part = self.layout.slots[slot].span.clip(self.master.owned)
        self.values.finish_offers()  # peers have had the old ones
        if part.numel:
            flat = self._views.in_memory_order(value, slot)
            at = part.shift(-self.layout.slots[slot].start)
            self.master.poke(part, flat[at.start : at.stop].to(self._views.device))

    def whole_master(self) -> list[Tensor]:
        """Every parameter as the master has it, gathered from all ranks. Collective where the optimizer is sharded."""
        flat = torch.zeros(self.layout.numel, dtype=torch.float32, device=self._views.device)
        self.master.peek(self.master.owned, flat[self.master.owned.start : self.master.owned.stop])
        if self.placement.optimizer is Scope.SHARD:
            self._comm.gather(flat, Label("gather", self.name)).wait()
        return self._views.all(flat)
