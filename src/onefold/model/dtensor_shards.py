"""DTensor shards: parameters split by tensor parallelism, this rank's local tensor, and its place in the full tensor.

The values of a DTensor are in its local tensor. Assigning `.data` of the DTensor changes nothing, without an error, and
its storage is empty. So code that reads or sets a parameter's values uses `local_tensor` and `set_local_tensor`.
A plain parameter counts as split if it says so (`param.tensor_model_parallel`, as Megatron's modules do), or if the
ranks of "tp" have it in different shapes; else it is the same on all of them, as a replicated DTensor is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onefold.errors import MismatchError, ModelError

PLAIN = (Tensor, nn.Parameter)


def local_tensor(tensor: Tensor) -> Tensor:
    """A DTensor's local tensor, or the tensor itself."""
    cls = type(tensor)
    return tensor if cls in PLAIN or issubclass(cls, nn.Parameter) else getattr(tensor, "_local_tensor", tensor)


def is_dtensor(tensor: Tensor) -> bool:
    return local_tensor(tensor) is not tensor


def set_local_tensor(param: nn.Parameter, tensor: Tensor) -> None:
    """Makes a parameter, or its local tensor, refer to this tensor's memory."""
    if not is_dtensor(param):
        param.data = tensor
        return
    if param.dtype is not tensor.dtype:
        replace_in_place(param, wrapped(param, tensor))
    # .data has a version counter of its own: the parameters of a unit are views of one buffer
    param._local_tensor = tensor.data  # type: ignore[attr-defined]


def write_count(param: Tensor) -> int:
    """A counter that grows with every in-place write to a parameter, or to its local tensor."""
    return param._version + (local_tensor(param)._version if is_dtensor(param) else 0)


def set_local_tensors(params: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
    """`set_local_tensor` for each parameter; fast for plain ones, since it runs twice per unit in each forward."""
    for param, tensor in zip(params, tensors, strict=True):
        if issubclass(type(param), nn.Parameter):
            param.data = tensor
        else:
            set_local_tensor(param, tensor)


def write_counts(params: Sequence[nn.Parameter]) -> list[int]:
    return [param._version if issubclass(type(param), nn.Parameter) else write_count(param) for param in params]


def wrapped(param: Any, local: Tensor) -> Tensor:
    """A DTensor placed as `param` is, with this local tensor; if `param` is plain, `local` itself."""
    if not is_dtensor(param):
        return local
    mesh, placements = param.device_mesh, param.placements
    local = local.detach()
    return type(param).from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def replace_in_place(param: nn.Parameter, value: Tensor) -> None:
    """Gives a parameter another value, dtype or class, and keeps the object, so that references to it stay valid."""
    other = nn.Parameter(value, requires_grad=param.requires_grad)
    other.__dict__.update(param.__dict__)
    try:
        torch.utils.swap_tensors(param, other)
    except RuntimeError as error:
        raise ModelError(
            f"a parameter of shape {tuple(param.shape)} is still held by a graph or by a weak reference and cannot "
            f"be replaced; call shard() before the first forward: {error}"
        ) from error


def distribute_like(like: Any, whole: Tensor) -> Tensor:
    """A DTensor placed as `like` is, of a full tensor that every rank has: this rank's shard is copied from it."""
    placement, mesh = like.placements[0], like.device_mesh
    if placement.is_replicate():
        return wrapped(like, whole)
    sizes, start = local_tensor(like).shape, 0
    if whole.shape[placement.dim]:  # as torch splits: equal shards, the last ones smaller or empty
        start = min(mesh.get_local_rank() * -(-whole.shape[placement.dim] // mesh.size()), whole.shape[placement.dim])
    return wrapped(like, whole.narrow(placement.dim, start, sizes[placement.dim]).contiguous())


# -- gradients ---------------------------------------------------------------------------------------------------------


class Aligned(NamedTuple):
    """The local tensor of a gradient placed as its parameter is, and what this rank sent to place it so."""

    local: Tensor
    collective: str
    sent_bytes: int


def aligned(grad: Any, param: Any) -> Aligned:
    """Redistributes a DTensor gradient to its parameter's placements: partial sums are summed. Collective over "tp" if
    the placements differ."""
    if not is_dtensor(grad):
        return Aligned(grad, "", 0)
    wanted = param.placements if is_dtensor(param) else None  # None: a plain parameter, which needs the full gradient
    if grad.placements == wanted or (wanted is None and grad.placements[0].is_replicate()):
        return Aligned(local_tensor(grad), "", 0)
    collective, sent_bytes = _moved(grad, whole=wanted is None or wanted[0].is_replicate())
    local = grad.full_tensor() if wanted is None else local_tensor(grad.redistribute(placements=wanted))
    return Aligned(local, collective, sent_bytes)


def _moved(grad: Any, whole: bool) -> tuple[str, int]:
    """The collective by which torch redistributes a gradient, and the bytes that a rank sends in it."""
    others, local_bytes, n = grad.device_mesh.size() - 1, local_tensor(grad).nbytes, grad.device_mesh.size()
    placement = grad.placements[0]
    if placement.is_partial():
        return ("all-reduce", 2 * local_bytes * others // n) if whole else ("reduce-scatter", local_bytes * others // n)
    if placement.is_replicate():
        return "", 0
    return ("all-gather", local_bytes * others) if whole else ("all-to-all", local_bytes * others // n)


# -- shards of full tensors --------------------------------------------------------------------------------------------


class TensorShard(NamedTuple):
    """Which part of a full tensor is this rank's."""

    shape: tuple[int, ...]  # of the full tensor
    dim: int  # along which it is split
    bounds: tuple[int, ...]  # along that dim: rank i has bounds[i]:bounds[i + 1]
    place: int  # this rank's i

    @property
    def start(self) -> int:
        return self.bounds[self.place]


TensorShards = Mapping[str, "TensorShard | None"]  # of parameters that are split; None where the dim is unknown


def check(name: str, tensor: Any, tp_ranks: Sequence[int]) -> None:
    """Raises unless a DTensor is split or replicated over "tp" and over no other axis, and a buffer is not split."""
    if not is_dtensor(tensor):
        return
    mesh, placements = tensor.device_mesh, tensor.placements
    with unset_fake_temporarily():  # a mesh reads its ranks from a tensor of its own
        ranks = mesh.mesh.flatten().tolist()
    if mesh.ndim != 1 or ranks != list(tp_ranks):
        axes = mesh.mesh_dim_names or f"{mesh.ndim} axes"
        raise ModelError(
            f"{name} is a DTensor over {axes} of ranks {ranks}, but those of 'tp' are {list(tp_ranks)}; parallelize "
            f"over mesh['tp'] only and give shard(mesh=…) the whole mesh: ZeRO shards over the other axes"
        )
    if not (placements[0].is_replicate() or type(placements[0]).__name__ == "Shard"):
        raise ModelError(
            f"{name} is a DTensor with placement {placements[0]}; over 'tp' a parameter must be Shard or Replicate: "
            f"redistribute it before shard()"
        )
    if not (isinstance(tensor, nn.Parameter) or placements[0].is_replicate()):
        raise ModelError(
            f"buffer {name} is split over the ranks of 'tp', and a checkpoint would keep one shard of it; replicate "
            f"it, or make it a frozen parameter"
        )


class SplitInfo(NamedTuple):
    """How one rank of "tp" has a parameter; exchanged between the ranks."""

    name: str
    kind: str
    shape: Sequence[int]  # of the local tensor
    dim: int | None = None  # along which it is split, if known
    whole: Sequence[int] | None = None  # the shape of a DTensor's full tensor
    trained: bool = True

    def __str__(self) -> str:
        of = f" of {tuple(self.whole)}" if self.whole is not None and self.kind == PART else ""
        along = f" along dim {self.dim}" if self.dim is not None else ""
        where = "" if self.kind == LOCAL else f" ({self.kind}{of}{along})"
        return f"{self.name}: shape {tuple(self.shape)}{where}, requires_grad={self.trained}"


PART, SAME, LOCAL = "a part", "the same on all", "plain"


def split_info(name: str, param: Any) -> SplitInfo:
    shape, trained = list(local_tensor(param).shape), param.requires_grad
    if is_dtensor(param):
        placement, whole = param.placements[0], list(param.shape)
        if placement.is_replicate():
            return SplitInfo(name, SAME, shape, None, whole, trained)
        return SplitInfo(name, PART, shape, placement.dim % len(whole), whole, trained)
    if not getattr(param, "tensor_model_parallel", False):
        return SplitInfo(name, LOCAL, shape, trained=trained)
    dim: Any = getattr(param, "partition_dim", None)
    known = type(dim) is int and -param.ndim <= dim < param.ndim and getattr(param, "partition_stride", 1) == 1
    return SplitInfo(name, PART, shape, dim % param.ndim if known else None, trained=trained)


def agree_on_tensor_shards(
    exchange: Callable[[bytes], list[bytes]], rank: int, named: Sequence[tuple[str, nn.Parameter]], *, simulated: bool
) -> TensorShards:
    """The parameters that are split, as all ranks of "tp" have them; raises if these are not shards of one model.
    Simulated ranks have what torch would give them. Collective over "tp"."""
    mine = json.dumps([split_info(name, param) for name, param in named]).encode()
    rows = [[SplitInfo(*row) for row in json.loads(blob)] for blob in exchange(mine)]
    if simulated:
        rows = [[_as_split_by_torch(one, place, len(rows)) for one in row] for place, row in enumerate(rows)]
    parts: dict[str, TensorShard | None] = {}
    for infos in zip(*rows):
        for place, one in enumerate(infos):
            if one._replace(shape=()) != infos[0]._replace(shape=()):
                raise MismatchError(
                    f"rank {place} of 'tp' has [{one}], rank 0 has [{infos[0]}]; parallelize the same model in the "
                    f"same way on every rank of 'tp'"
                )
        if infos[0].kind == PART or (infos[0].kind == LOCAL and any(one.shape != infos[0].shape for one in infos)):
            parts[infos[0].name] = _tensor_shard(infos, rank)
    if len({len(row) for row in rows}) > 1:
        raise MismatchError(
            f"the ranks of 'tp' have {sorted({len(row) for row in rows})} parameters, and must have equally many; "
            f"parallelize the same model on every rank of 'tp'"
        )
    return MappingProxyType(parts)


def _as_split_by_torch(info: SplitInfo, place: int, ranks: int) -> SplitInfo:
    """The part of a DTensor that another rank has: equal shards, the last ones smaller or empty."""
    if info.whole is None or info.dim is None:
        return info
    numel, shape = info.whole[info.dim], list(info.shape)
    each = -(-numel // ranks)
    shape[info.dim] = max(0, min(each, numel - place * each))
    return info._replace(shape=shape)


def _tensor_shard(infos: Sequence[SplitInfo], rank: int) -> TensorShard | None:
    dim, shapes = infos[0].dim, [one.shape for one in infos]
    if dim is None:
        return None
    bounds = tuple(accumulate((shape[dim] for shape in shapes), initial=0))
    wholes = [[bounds[-1] if i == dim else size for i, size in enumerate(shape)] for shape in shapes]
    if any(whole != (infos[0].whole or wholes[0]) for whole in wholes):
        raise MismatchError(
            f"the shards {shapes} of {infos[0].name} do not make one tensor along dim {dim}; set param.partition_dim "
            f"to the dim along which it is split"
        )
    return TensorShard(tuple(wholes[0]), dim, bounds, rank)


def holds_dtensors(types: Any) -> bool:
    """Whether any of the classes of an operator's arguments is torch's DTensor, told without its import."""
    return any(kind.__name__ == "DTensor" for kind in types)
