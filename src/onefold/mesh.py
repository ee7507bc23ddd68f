"""Process groups: joining the world, and the axis of ranks that share one model's state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, FakeWork
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
    plays: str | None = None  # there are no peers, and this backend is only played: what is sent goes nowhere

    def backend(self, device: torch.device) -> str:
        """The name of the backend that moves tensors of this device."""
        if self.plays:
            return self.plays
        return str(self.group._get_backend(device).name())


class Axes(NamedTuple):
    """State is sharded along `shard`, the same on every rank of `replica`; `everyone` is both."""

    shard: Axis
    replica: Axis
    everyone: Axis


def axes_of(mesh: DeviceMesh | None) -> Axes:
    """The axes a mesh describes; without one, all ranks share the state."""
    if not dist.is_initialized():
        raise StateError("no process group: call onefold.init() before onefold.shard()")
    if mesh is None:
        group = dist.group.WORLD
        assert group is not None
        world = _axis(group)
        return Axes(world, _alone(group), world)
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh={mesh!r} is not a torch DeviceMesh; make one with init_device_mesh")
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in {mesh.mesh.tolist()}; call shard() on the mesh's ranks only"
        )
    if mesh.ndim == 1:
        shard = _axis(mesh.get_group())
        return Axes(shard, _alone(mesh.get_group()), shard)
    names = mesh.mesh_dim_names or ()
    if sorted(names) != ["replica", "shard"]:
        raise ConfigError(f"mesh has axes {names or mesh.ndim}; one axis is wanted, or two named 'replica' and 'shard'")
    everyone = dist.group.WORLD if mesh.size() == dist.get_world_size() else mesh._flatten().get_group()
    assert everyone is not None
    return Axes(_axis(mesh.get_group("shard")), _axis(mesh.get_group("replica")), _axis(everyone))


def named_mesh(axes: Mapping[str, int], device_type: str) -> DeviceMesh:
    """All ranks, as a grid with these axes. Collective."""
    return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))


class Nobody:
    """A group whose messages cost nothing and go nowhere: for tensors that have no values."""

    def _sent(self, *_: Any) -> Any:
        return FakeWork()

    send = recv = broadcast = _allgather_base = _reduce_scatter_base = _sent


def simulated_axes(ranks: int, rank: int = 0, *, plays: str, replicas: int = 1, values: bool = True) -> Axes:
    """The axes of one rank that has no peers, as if it were of a world of ranks × replicas that talk over a backend.

    With `values`, what is gathered is filled with copies of what this rank has.
    """

    def axis(size: int, at: int) -> Axis:
        group: Any = FakeProcessGroup._create_internal(at, size) if values else Nobody()
        return Axis(group, at, size, tuple(range(size)), plays)

    return Axes(axis(ranks, rank), axis(replicas, 0), axis(ranks * replicas, rank))


def beside(axis: Axis, name: str, timeout_s: float) -> Axis:
    """A gloo group of the same ranks for other threads; `name` is the same on all of them and used once. Collective.

    torch does not know of it, so destroy_process_group() in the main thread leaves what is on the way there alone.
    """
    store = dist.PrefixStore(f"onefold/{name}", dist.distributed_c10d._get_default_store())
    gloo = dist.ProcessGroupGloo(store, axis.rank, axis.size, timedelta(seconds=timeout_s))
    group = dist.ProcessGroup(store, axis.rank, axis.size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return Axis(group=group, rank=axis.rank, size=axis.size, world_ranks=axis.world_ranks)


def _axis(group: dist.ProcessGroup) -> Axis:
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(group=group, rank=ranks.index(dist.get_rank()), size=len(ranks), world_ranks=ranks)


def _alone(group: dist.ProcessGroup) -> Axis:
    """An axis of this rank only: nothing moves along it."""
    return Axis(group=group, rank=0, size=1, world_ranks=(dist.get_rank(),))
