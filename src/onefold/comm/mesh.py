"""Process groups: init(), device meshes, and the axes of ranks along which one model communicates.

State is sharded along "shard" and "sequence" together, and replicated along "replica". "sequence" cuts the sequences of
a batch. "tp" splits tensors and "pp" splits the model: ranks with different coordinates there hold different
parameters, so ZeRO runs among ranks of equal "tp" and "pp" coordinates.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from onefold.comm.last_words import leave_last_words
from onefold.comm.nccl_settings import prepare_nccl
from onefold.comm.rendezvous import Place, join
from onefold.comm.spans import named_span
from onefold.comm.watching import ensure_watcher
from onefold.errors import ConfigError, StateError

Mesh: TypeAlias = DeviceMesh  # for other rooms, which do not import torch.distributed
NAMES = ("replica", "pp", "shard", "sequence", "tp")  # of axes, the outermost first: neighbouring ranks share "tp"


def init(*, timeout_s: float = 600.0) -> None:
    """Join the ranks that `onefold run` or torchrun started, or make a world of this one process.

    NCCL moves CUDA tensors, gloo the others, and this rank's GPU becomes the current one. A process group that exists
    already is left alone, so init() may be called again. `timeout_s` is how long the ranks wait for each other. If
    torchrun's own store listens on every interface, `onefold.errors.ExposedWarning` says so once.

    >>> import onefold
    >>> onefold.init()
    """
    leave_last_words()
    if dist.is_initialized():
        ensure_watcher()
        return
    if not torch.cuda.is_available():
        join("gloo", timeout_s)
        ensure_watcher()
        return
    place = Place.here()
    prepare_nccl(place.world if place else 1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    join("cpu:gloo,cuda:nccl", timeout_s, device)
    ensure_watcher()


@dataclass(frozen=True)
class Axis:
    """A set of ranks that communicate with each other, and this process's rank in it."""

    group: dist.ProcessGroup
    rank: int
    size: int
    world_ranks: tuple[int, ...]
    plays: str | None = None  # simulated, as if over this backend: there are no peers, and messages go nowhere
    node_ranks: int | None = None  # simulated: ranks of the world on each node

    def backend(self, device: torch.device) -> str:
        """The name of the backend that moves tensors of this device."""
        if self.plays:
            return self.plays
        return str(self.group._get_backend(device).name())


@lru_cache(maxsize=64)
def link_name(kind: str, axis: Axis) -> str:
    """A name of a link, the same on all its ranks."""
    return kind if axis.size == dist.get_world_size() else f"{kind} {crc32(repr(axis.world_ranks).encode()):x}"


class Axes(NamedTuple):
    """The axes along which one model communicates, each of the ranks that share this rank's other coordinates.

    State is sharded along `shard` and replicated along `replica`; `everyone` is both together.
    """

    shard: Axis  # "shard" and "sequence" of the mesh
    replica: Axis
    everyone: Axis
    tp: Axis  # tensors are split along it; block inputs are the same
    pp: Axis  # the model is split along it
    sequence: Axis  # sequences are cut along it; a part of `shard`
    owners: Axis  # shard and tp: each tensor that is updated whole has its owner among these ranks
    holders: Axis  # shard, tp and pp: together these ranks hold one model, each element once
    world: Axis  # all ranks of the mesh


def mesh(
    *,
    shard: int | None = None,
    tp: int = 1,
    replica: int = 1,
    pp: int = 1,
    sequence: int = 1,
    device: str | None = None,
) -> DeviceMesh:
    """All ranks as a torch DeviceMesh with the axes "replica", "pp", "shard", "sequence" and "tp", the outermost first.

    The sizes multiply to the number of ranks. One of them may be -1, which stands for the ranks that are left; by
    default that one is `shard`. Neighbouring ranks share "tp". Axes of size 1 are left out. `device` is by default
    "cuda" where there is a GPU, else "cpu". Call init() first. Collective.

    >>> import onefold
    >>> onefold.init()
    >>> onefold.mesh(tp=1).mesh_dim_names
    ('shard',)
    """
    if shard is None:
        shard = 1 if -1 in (tp, replica, pp, sequence) else -1
    if not dist.is_initialized():
        raise StateError("no process group: call onefold.init() before onefold.mesh()")
    asked = {"replica": replica, "pp": pp, "shard": shard, "sequence": sequence, "tp": tp}
    sizes = _sizes(asked, dist.get_world_size())
    kept = {name: size for name, size in sizes.items() if size > 1} or {"shard": 1}
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(kind, tuple(kept.values()), mesh_dim_names=tuple(kept))


def _sizes(asked: dict[str, int], world: int) -> dict[str, int]:
    """The sizes of all axes, -1 replaced; raises unless their product is the number of ranks."""
    said = ", ".join(f"{name}={size!r}" for name, size in asked.items() if size != 1) or "nothing"
    odd = [name for name, size in asked.items() if type(size) is not int or (size < 1 and size != -1)]
    open_ones = [name for name in asked if name not in odd and asked[name] == -1]
    if odd or len(open_ones) > 1:
        raise ConfigError(f"mesh({said}): sizes are whole numbers of at least 1, and one of them may be -1 (the rest)")
    known = math.prod(size for size in asked.values() if size != -1)
    if world % known or (not open_ones and known != world):
        fitting = ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)
        raise ConfigError(
            f"mesh({said}) needs {'a multiple of ' * bool(open_ones)}{known} ranks, and there are {world}; the sizes "
            f"must multiply to {world}, so each is one of {fitting}: for example shard={world}, or tp=… and shard=-1"
        )
    return asked | {name: world // known for name in open_ones}


def axes_of(mesh: DeviceMesh | None) -> Axes:
    """The axes of a mesh; without a mesh, state is sharded over all ranks."""
    if not dist.is_initialized():
        raise StateError("no process group: call onefold.init() before onefold.shard()")
    if mesh is None:
        group = dist.group.WORLD
        assert group is not None
        world, alone = _axis(group), _alone(group)
        return Axes(world, alone, world, alone, alone, alone, world, world, world)
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"mesh={mesh!r} is not a torch DeviceMesh; make one with onefold.mesh or init_device_mesh")
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in {mesh.mesh.tolist()}; call shard() on the mesh's ranks only"
        )
    names = mesh.mesh_dim_names or ()
    if mesh.ndim == 1 and not set(names) & set(NAMES) - {"shard"}:  # its one axis is "shard", whatever its name
        shard = _axis(mesh.get_group())
        alone = _alone(mesh.get_group())
        return Axes(shard, alone, shard, alone, alone, alone, shard, shard, shard)
    if not set(names) <= set(NAMES) or len(names) != mesh.ndim:
        raise ConfigError(
            f"mesh has axes {names or mesh.ndim}; use one axis, or several named 'replica', 'shard', 'sequence', 'pp' "
            f"or 'tp': see onefold.mesh"
        )

    def along(*wanted: str) -> Axis:
        return _along(mesh, [name for name in names if name in wanted])

    return Axes(
        shard=along("shard", "sequence"),
        replica=along("replica"),
        everyone=along("replica", "shard", "sequence"),
        tp=along("tp"),
        pp=along("pp"),
        sequence=along("sequence"),
        owners=along("shard", "sequence", "tp"),
        holders=along("pp", "shard", "sequence", "tp"),
        world=along(*names),
    )


def _along(mesh: DeviceMesh, names: list[str]) -> Axis:
    """The ranks that differ from this one in these coordinates only."""
    if not names:
        return _alone(mesh.get_group(0))
    part = mesh[tuple(names)] if len(names) < mesh.ndim else mesh
    if part.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return _axis(dist.group.WORLD)
    return _axis(part.get_group() if part.ndim == 1 else part._flatten().get_group())


class NoPeers:
    """A simulated process group whose messages do nothing: for tensors without memory."""

    def _sent(self, *_: Any) -> Any:
        return FakeWork()

    send = recv = broadcast = alltoall = alltoall_base = _allgather_base = _reduce_scatter_base = _sent


STAND_IN = "onefold::stand-in"  # the profiler's name for a copy that stands for a message


class EchoPeers(NoPeers):
    """A simulated process group: an all-gather fills the peers' slots with copies of this rank's, and a receive gives
    zeros. Each message costs one or two kernels, however many ranks are simulated.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def _allgather_base(self, flat: Tensor, mine: Tensor, *_: Any) -> Any:
        slots = flat.view(self._size, -1)
        self._stand_in(slots[: self._rank], mine)
        return self._stand_in(slots[self._rank + 1 :], mine)

    def _reduce_scatter_base(self, target: Tensor, flat: Tensor, _: Any) -> Any:
        slots = flat.view(-1, target.numel())  # of this axis, or of its ranks on other nodes
        return self._stand_in(target, slots[self._rank % len(slots)])

    def alltoall(self, received: list[Tensor], sent: list[Tensor], _: Any) -> Any:
        work = FakeWork()
        for target, source in zip(received, sent, strict=True):
            work = self._stand_in(target, source if source.shape == target.shape else None)
        return work

    def alltoall_base(self, target: Tensor, source: Tensor, *_: Any) -> Any:
        return self._stand_in(target, source)

    def recv(self, tensors: list[Tensor], *_: Any) -> Any:
        return self._stand_in(tensors[0], None)

    def _stand_in(self, target: Tensor, source: Tensor | None) -> Any:
        with torch.no_grad(), named_span(STAND_IN):
            target.zero_() if source is None else target.copy_(source)
        return FakeWork()


def simulated_axes(
    ranks: int,
    rank: int = 0,
    *,
    plays: str,
    replicas: int = 1,
    tp: int = 1,
    pp: int = 1,
    stage: int = 0,
    values: bool = True,
    node_ranks: int | None = None,
) -> Axes:
    """The axes of one simulated rank without peers, in a world of ranks × replicas × tp × pp over the backend `plays`,
    with `node_ranks` on each node (None: as this process's launcher said, or 8). The rank is the first of "tp", in
    pipeline stage `stage`.

    With `values`, received tensors are filled with copies of what this rank has, or zeros; else they are left alone.
    """

    def axis(size: int, at: int, apart: int = 1, first: int = 0) -> Axis:
        return _simulated(size, at, range(first, first + size * apart, apart), plays, values, node_ranks)

    of_stage, mine = stage * ranks * tp, (stage * ranks + rank) * tp
    shard, everyone, alone = axis(ranks, rank, tp, of_stage), axis(ranks * replicas, rank, tp, of_stage), axis(1, 0)
    cut = tp * pp > 1
    holders = axis(ranks * tp * pp, mine) if cut else shard
    world = axis(ranks * replicas * tp * pp, mine) if cut else everyone
    along_tp, along_pp = axis(tp, 0, first=mine), axis(pp, stage, ranks * tp, rank * tp)
    owners = axis(ranks * tp, rank * tp, first=of_stage) if tp > 1 else shard
    return Axes(shard, axis(replicas, 0), everyone, along_tp, along_pp, alone, owners, holders, world)


def simulated_ends(stage: int, stages: int, *, plays: str, values: bool) -> Axis:
    """The axis of the first and the last stage of a simulated pipeline, on one of the two."""
    return _simulated(2, int(stage > 0), (0, stages - 1), plays, values)


def _simulated(
    size: int, at: int, world_ranks: Iterable[int], plays: str, values: bool, node_ranks: int | None = None
) -> Axis:
    group: Any = EchoPeers(at, size) if values else NoPeers()
    return Axis(group, at, size, tuple(world_ranks), plays, node_ranks)


def new_gloo_axis(axis: Axis, name: str, timeout_s: float) -> Axis:
    """An axis of the same ranks over a new gloo group, for another thread or another direction. `name` is equal on all
    ranks, and used once. Collective.

    The group is not registered with torch, so destroy_process_group() in the main thread does not cut its messages off.
    """
    store = dist.PrefixStore(f"onefold/{name}", dist.distributed_c10d._get_default_store())
    gloo = dist.ProcessGroupGloo(store, axis.rank, axis.size, timedelta(seconds=timeout_s))
    group = dist.ProcessGroup(store, axis.rank, axis.size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return Axis(group=group, rank=axis.rank, size=axis.size, world_ranks=axis.world_ranks)


def end_ranks(mesh: DeviceMesh, name: str) -> Axis:
    """An axis of the first and the last rank along an axis of a mesh. Collective over these two."""
    row = dist.get_process_group_ranks(mesh.get_group(name))
    world = dist.group.WORLD
    assert world is not None
    # with a bound device torch would split NCCL's communicator of all ranks, and all would have to take part
    device, world.bound_device_id = world.bound_device_id, None
    try:
        return _axis(dist.new_group([row[0], row[-1]], use_local_synchronization=True))
    finally:
        world.bound_device_id = device


def _axis(group: dist.ProcessGroup) -> Axis:
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(group=group, rank=ranks.index(dist.get_rank()), size=len(ranks), world_ranks=ranks)


def _alone(group: dist.ProcessGroup) -> Axis:
    """An axis of this rank only."""
    return Axis(group=group, rank=0, size=1, world_ranks=(dist.get_rank(),))
