"""Process groups: joining the world, and the axis of ranks that share one model's state."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from onefold.errors import ConfigError, StateError


def init(*, timeout_s: float = 600.0) -> None:
    """Join torchrun's world, or start a world of one; NCCL where there is CUDA, gloo elsewhere. May be called again.

    >>> import onefold
    >>> onefold.init()
    """
    if dist.is_initialized():
        return
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    wanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = [name for name in wanted if name in os.environ]
    timeout = timedelta(seconds=timeout_s)
    if len(found) == len(wanted):
        dist.init_process_group(backend, timeout=timeout)
    elif "RANK" in found or "WORLD_SIZE" in found:
        missing = ", ".join(name for name in wanted if name not in found)
        raise ConfigError(f"the environment sets {', '.join(found)} but not {missing}; start with torchrun, or set all")
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


@dataclass(frozen=True)
class Axis:
    """The ranks that share one model's state, and this process's place among them."""

    group: dist.ProcessGroup
    rank: int
    size: int
    world_ranks: tuple[int, ...]

    def backend(self, device: torch.device) -> str:
        """The name of the backend that moves tensors of this device."""
        return str(self.group._get_backend(device).name())


def shard_axis(mesh: DeviceMesh | None) -> Axis:
    """The axis a mesh describes; all ranks where there is none."""
    if not dist.is_initialized():
        raise StateError("no process group: call onefold.init() before onefold.shard()")
    if mesh is None:
        group = dist.group.WORLD
    elif not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh={mesh!r} is not a torch DeviceMesh; make one with init_device_mesh")
    elif mesh.ndim != 1:
        raise ConfigError(f"mesh has {mesh.ndim} axes {mesh.mesh_dim_names}; one axis is wanted: mesh['shard']")
    elif mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in {mesh.mesh.tolist()}; call shard() on the mesh's ranks only"
        )
    else:
        group = mesh.get_group()
    assert group is not None
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(group=group, rank=ranks.index(dist.get_rank()), size=len(ranks), world_ranks=ranks)
