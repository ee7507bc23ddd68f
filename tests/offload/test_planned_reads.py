"""Parameters on disk: the buffers in which all-gathers read them are in the plan of host memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onefold
from onefold.cost.limits import reading_bytes
from onefold.cost.peak import staging_bytes
from onefold.cost.states import StateCost
from onefold.runtime.engine import engine_of
from onefold.settings.placement import Tier
from tests.harness import run_ranks

WIDTH, UNITS = 64, 12


def evaluated(path: str, prefetch: int) -> tuple[int, int, int]:
    """Bytes of a shard, of the buffers after two evaluations, and of those that are planned for reading."""
    onefold.init()
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)))
    offload = onefold.Offload(optimizer="disk", parameters="disk", path=path)
    model = onefold.shard(layers, stage=3, offload=offload, units=(nn.Linear,), bucket_bytes=1, prefetch=prefetch)
    with torch.no_grad():
        for _ in range(2):
            model(torch.randn(2, WIDTH))
    engine = engine_of(model)
    units = [unit.size(engine.comm.rank, engine.resolved.precision) for unit in engine.resolved.units]
    on_disk = [unit.placement for unit in engine.resolved.units]
    in_memory = [row.on(row.optimizer_tier, Tier.DEVICE) for row in on_disk]
    planned = [
        staging_bytes(units, rows, StateCost(0), in_backward=False, prefetch=prefetch).copied
        for rows in (on_disk, in_memory)
    ]
    return units[0].shard * 4, sum(b.nbytes for b in engine.tiers.host.staging.buffers()), planned[0] - planned[1]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_what_forward_reads_ahead_is_planned(prefetch: int, tmp_path) -> None:
    for shard, held, planned in run_ranks(2, evaluated, str(tmp_path), prefetch):
        assert 2 * shard <= held <= planned == reading_bytes([shard] * UNITS, prefetch), (shard, held, planned)
