"""The masters of a sharded model for reading: this rank's elements of each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from onefold.runtime.engine import engine_of
from onefold.runtime.refusals import Call


def shards(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The names of trained parameters, and a copy of this rank's elements of each master, flat.

    Each element is in the copy of one rank of the mesh axis "shard", at every stage and on every tier: sums over
    copies and ranks count it once. Collective: every rank calls it.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=3, precision="bf16")
    >>> [(name, master.dtype, master.numel()) for name, master in onefold.shards(model)]
    [('weight', torch.float32, 64), ('bias', torch.float32, 8)]
    """
    engine = engine_of(model)
    engine.check(Call.FULL_STATE_DICT)
    engine.quiesce()

    def copies() -> Iterator[tuple[str, Tensor]]:
        for unit in engine.units:
            for slot in unit.layout.slots:
                part = slot.span.clip(unit.mine)
                if part.numel:
                    with torch.no_grad(), unit.state_in_memory():
                        copy = torch.empty(part.numel, dtype=unit.master.dtype, device=unit.pool.device)
                        unit.master.read(part, copy)
                    yield slot.name, copy

    return copies()
