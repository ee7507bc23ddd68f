"""A world of simulated ranks for torch itself: a mesh whose messages go nowhere, for models that torch splits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from onefold.errors import StateError


@contextmanager
def simulated_mesh(ranks: int, tp: int, device: str) -> Iterator[DeviceMesh]:
    """Inside, this process is rank 0 of ranks × tp, without peers, with a mesh of the axes "shard" and "tp".
    Collectives of torch return at once, and what they would receive is this rank's own or uninitialised."""
    if dist.is_initialized():
        raise StateError(
            "a model split over 'tp' is simulated in a process that has joined no ranks; call simulate() in a process "
            "of its own, before onefold.init()"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers torch's backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks * tp)
    try:
        yield init_device_mesh(device, (ranks, tp), mesh_dim_names=("shard", "tp"))
    finally:
        dist.destroy_process_group()
