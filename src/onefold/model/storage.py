"""The memory of a tensor: its storage, and the order of its elements."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from onefold.comm.buffers import key_of
from onefold.model.dtensor_shards import local_tensor


def storage_key(tensor: Tensor) -> int:
    return key_of(local_tensor(tensor))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of these tensors, each storage once."""
    return sum({storage_key(t): local_tensor(t).untyped_storage().nbytes() for t in tensors}.values())


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it is dense (channels_last stays so), else those of a contiguous tensor."""
    tensor = local_tensor(tensor)
    dims = sorted((stride, size) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1)
    filled = 1
    for stride, size in dims:
        if stride != filled:
            return tuple(torch.empty(tensor.size(), device="meta").stride())
        filled *= size
    return tuple(tensor.stride())
