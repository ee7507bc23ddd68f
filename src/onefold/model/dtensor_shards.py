"""Parameters that tensor parallelism has split: the part that is here, and where it lies in the whole.

A DTensor's values are its local tensor's. Assigning `.data` of the wrapper changes nothing, and says nothing; its
storage holds nothing. So whoever reads or places values goes through `held` and `put`.
A plain parameter is a part if it says so (`param.tensor_model_parallel`, as Megatron's modules do), or if the ranks of
"tp" have it in different shapes; else it is the same on all of them, as a replicated DTensor is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onefold.errors import MismatchError, ModelError

PLAIN = (Tensor, nn.Parameter)


def held(tensor: Tensor) -> Tensor:
    """The plain tensor that has the values: a DTensor's local one, or the tensor itself."""
    return tensor if type(tensor) in PLAIN else getattr(tensor, "_local_tensor", tensor)


def is_split(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return held(tensor) is not tensor


def put(param: nn.Parameter, tensor: Tensor) -> None:
    """Let a parameter have these values from now on, where they lie."""
    if not is_split(param):
        param.data = tensor
        return
    if param.dtype is not tensor.dtype:
        become(param, wrapped(param, tensor))
    # with a count of writes of its own: neighbours share the buffer
    param._local_tensor = tensor.data  # type: ignore[attr-defined]


def version(param: Tensor) -> int:
    """Grows with every write through a parameter, or through the local tensor that it gives out."""
    return param._version + (held(param)._version if is_split(param) else 0)


def put_all(params: Sequence[nn.Parameter], tensors: Sequence[Tensor]) -> None:
    """`put` for each. Twice per unit and pass: most parameters are plain, and are not asked twice."""
    for param, tensor in zip(params, tensors, strict=True):
        if type(param) is nn.Parameter:
            param.data = tensor
        else:
            put(param, tensor)


def versions(params: Sequence[nn.Parameter]) -> list[int]:
    """`version` of each."""
    return [param._version if type(param) is nn.Parameter else version(param) for param in params]


def wrapped(param: Any, local: Tensor) -> Tensor:
    """A tensor that is to `param` what `local` is to its local part; they share memory."""
    if not is_split(param):
        return local
    mesh, placements = param.device_mesh, param.placements
    local = local.detach()
    return type(param).from_local(local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())


def become(param: nn.Parameter, value: Tensor) -> None:
    """The same object as a parameter of other values, dtype or class."""
    other = nn.Parameter(value, requires_grad=param.requires_grad)
    other.__dict__.update(param.__dict__)
    try:
        torch.utils.swap_tensors(param, other)
    except RuntimeError as error:
        raise ModelError(
            f"a parameter of shape {tuple(param.shape)} is still held by a graph or by a weak reference and cannot "
            f"be replaced; call shard() before the first forward: {error}"
        ) from error


def cut(like: Any, whole: Tensor) -> Tensor:
    """The DTensor of a whole that every rank has: this rank's part of it, copied."""
    placement, mesh = like.placements[0], like.device_mesh
    if placement.is_replicate():
        return wrapped(like, whole)
    sizes, start = held(like).shape, 0
    if whole.shape[placement.dim]:  # as torch cuts: equal parts, the last ones less or empty
        start = min(mesh.get_local_rank() * -(-whole.shape[placement.dim] // mesh.size()), whole.shape[placement.dim])
    return wrapped(like, whole.narrow(placement.dim, start, sizes[placement.dim]).contiguous())


# -- gradients ---------------------------------------------------------------------------------------------------------


class Aligned(NamedTuple):
    """A gradient laid out as its parameter is, and what this rank sent for it."""

    local: Tensor
    collective: str
    sent_bytes: int


def aligned(grad: Any, param: Any) -> Aligned:
    """This rank's part of a gradient, summed where the ranks of "tp" have partial sums. Collective where it moves."""
    if not is_split(grad):
        return Aligned(grad, "", 0)
    wanted = param.placements if is_split(param) else None  # None: whole
    if grad.placements == wanted or (wanted is None and grad.placements[0].is_replicate()):
        return Aligned(held(grad), "", 0)
    collective, sent_bytes = _moved(grad, whole=wanted is None or wanted[0].is_replicate())
    local = grad.full_tensor() if wanted is None else held(grad.redistribute(placements=wanted))
    return Aligned(local, collective, sent_bytes)


def _moved(grad: Any, whole: bool) -> tuple[str, int]:
    """The collective that torch uses from these placements, and the bytes it makes a rank send."""
    others, local_bytes, n = grad.device_mesh.size() - 1, held(grad).nbytes, grad.device_mesh.size()
    placement = grad.placements[0]
    if placement.is_partial():
        return ("all-reduce", 2 * local_bytes * others // n) if whole else ("reduce-scatter", local_bytes * others // n)
    if placement.is_replicate():
        return "", 0
    return ("all-gather", local_bytes * others) if whole else ("all-to-all", local_bytes * others // n)


# -- which part of the whole -------------------------------------------------------------------------------------------


class TensorShard(NamedTuple):
    """Where one rank's part of a parameter lies in the whole."""

    shape: tuple[int, ...]  # of the whole
    dim: int  # along which it is split
    bounds: tuple[int, ...]  # of the parts, along that dim: part i is bounds[i]:bounds[i + 1]
    place: int  # this rank's

    @property
    def start(self) -> int:
        return self.bounds[self.place]


TensorShards = Mapping[str, "TensorShard | None"]  # of what is split; None where nobody said along which dim


def check(name: str, tensor: Any, tp_ranks: Sequence[int]) -> None:
    """A DTensor is split along "tp" or the same there, and along no other axis; a buffer is not split."""
    if not is_split(tensor):
        return
    mesh, placements = tensor.device_mesh, tensor.placements
    ranks = mesh.mesh.flatten().tolist()
    if mesh.ndim != 1 or ranks != list(tp_ranks):
        axes = mesh.mesh_dim_names or f"{mesh.ndim} axes"
        raise ModelError(
            f"{name} is a DTensor over {axes} of ranks {ranks}, and those of 'tp' are {list(tp_ranks)}; parallelize "
            f"over mesh['tp'] only and give shard(mesh=…) the whole mesh: ZeRO itself spreads over the other axes"
        )
    if not (placements[0].is_replicate() or type(placements[0]).__name__ == "Shard"):
        raise ModelError(
            f"{name} is a DTensor with placement {placements[0]}; a parameter is split (Shard) or the same (Replicate) "
            f"on the ranks of 'tp': redistribute it before shard()"
        )
    if not (isinstance(tensor, nn.Parameter) or placements[0].is_replicate()):
        raise ModelError(
            f"buffer {name} is split over the ranks of 'tp', and a checkpoint would keep one part of it; replicate it, "
            f"or make it a parameter that is frozen"
        )


class Told(NamedTuple):
    """What the ranks of "tp" tell each other of a parameter."""

    name: str
    kind: str
    shape: Sequence[int]  # here
    dim: int | None = None  # along which it is split, where that is known
    whole: Sequence[int] | None = None  # the shape of a DTensor
    trained: bool = True

    def __str__(self) -> str:
        of = f" of {tuple(self.whole)}" if self.whole is not None and self.kind == PART else ""
        along = f" along dim {self.dim}" if self.dim is not None else ""
        where = "" if self.kind == LOCAL else f" ({self.kind}{of}{along})"
        return f"{self.name}: shape {tuple(self.shape)}{where}, requires_grad={self.trained}"


PART, SAME, LOCAL = "a part", "the same on all", "plain"


def tell(name: str, param: Any) -> Told:
    shape, trained = list(held(param).shape), param.requires_grad
    if is_split(param):
        placement, whole = param.placements[0], list(param.shape)
        if placement.is_replicate():
            return Told(name, SAME, shape, None, whole, trained)
        return Told(name, PART, shape, placement.dim % len(whole), whole, trained)
    if not getattr(param, "tensor_model_parallel", False):
        return Told(name, LOCAL, shape, trained=trained)
    dim: Any = getattr(param, "partition_dim", None)
    known = type(dim) is int and -param.ndim <= dim < param.ndim and getattr(param, "partition_stride", 1) == 1
    return Told(name, PART, shape, dim % param.ndim if known else None, trained=trained)


def agree_on_tensor_shards(
    exchange: Callable[[bytes], list[bytes]], rank: int, named: Sequence[tuple[str, nn.Parameter]]
) -> TensorShards:
    """What is split, as all ranks of "tp" tell it; raises where they do not hold parts of one model. Collective."""
    mine = json.dumps([tell(name, param) for name, param in named]).encode()
    rows = [[Told(*row) for row in json.loads(blob)] for blob in exchange(mine)]
    parts: dict[str, TensorShard | None] = {}
    for told in zip(*rows):
        for place, one in enumerate(told):
            if one._replace(shape=()) != told[0]._replace(shape=()):
                raise MismatchError(
                    f"rank {place} of 'tp' has [{one}], rank 0 has [{told[0]}]; parallelize the same model in the same "
                    f"way on every rank of 'tp'"
                )
        if told[0].kind == PART or (told[0].kind == LOCAL and any(one.shape != told[0].shape for one in told)):
            parts[told[0].name] = _part(told, rank)
    if len({len(row) for row in rows}) > 1:
        raise MismatchError(
            f"the ranks of 'tp' hold {sorted({len(row) for row in rows})} parameters; they must hold parts of one model"
        )
    return MappingProxyType(parts)


def _part(told: Sequence[Told], rank: int) -> TensorShard | None:
    dim, shapes = told[0].dim, [one.shape for one in told]
    if dim is None:
        return None
    bounds = tuple(accumulate((shape[dim] for shape in shapes), initial=0))
    wholes = [[bounds[-1] if i == dim else size for i, size in enumerate(shape)] for shape in shapes]
    if any(whole != (told[0].whole or wholes[0]) for whole in wholes):
        raise MismatchError(
            f"the parts {shapes} of {told[0].name} make no tensor when laid along dim {dim}; set param.partition_dim "
            f"to the dim along which it is split"
        )
    return TensorShard(tuple(wholes[0]), dim, bounds, rank)
