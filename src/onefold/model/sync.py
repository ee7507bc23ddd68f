"""Before parameters are cut into shards, every rank's are brought in line with rank 0's, or compared: shard(sync=…)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from onefold.comm.agreement import AGREE, compare_values, fingerprint, together
from onefold.comm.communicator import Comm, Comms
from onefold.errors import MismatchError, ModelError
from onefold.model.dtensor_shards import is_dtensor, local_tensor
from onefold.model.resolved import Resolved
from onefold.settings.zero import Zero


def sync_parameters(model: nn.Module, resolved: Resolved, comms: Comms) -> None:
    """Ranks that hold the same parameters and buffers have rank 0's values, or are found to have them; and what is not
    split over "tp" is the same there. Collective. A model on the meta device has no values yet."""
    named = sorted(model.named_parameters(), key=lambda pair: not pair[1].requires_grad)  # trained ones first
    split = resolved.tensor_shards
    if resolved.meta and (local := [name for name, param in named if name in split and not is_dtensor(param)]):
        raise ModelError(
            f"{', '.join(local[:5])} is a part of a tensor, on the meta device: filled here it would be alike on all "
            f"ranks of 'tp'; build it with its values, or split it with torch's parallelize_module"
        )
    every = [*named, *model.named_buffers()]
    together(comms, lambda: _sync(comms.everyone, every, resolved.settings, resolved.device))
    if comms.tp.size > 1 and not resolved.meta:
        together(comms, lambda: _compare_over_tp(comms.tp, [(n, p) for n, p in named if n not in split]))


def _sync(comm: Comm, named: Sequence[tuple[str, Tensor]], settings: Zero, device: torch.device) -> None:
    """Broadcasts rank 0's parameters and buffers, or compares them. Tensors that are not on the device are copied there
    to be sent, one batch at a time, and back."""
    real = [(name, local_tensor(tensor)) for name, tensor in named if tensor.device.type != "meta"]
    if settings.sync == "check":
        compare_values(comm, real)
        return
    for batch in _batches([tensor for _, tensor in real], settings.bucket_bytes):
        with torch.no_grad():
            sent = [tensor.detach().to(device) for tensor in batch] if comm.size > 1 else batch
            comm.broadcast(sent, AGREE)
            for tensor, values in zip(batch, sent, strict=True):
                if values.device != tensor.device:
                    tensor.copy_(values)


def _batches(tensors: Sequence[Tensor], limit_bytes: int) -> Iterator[list[Tensor]]:
    batch: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if batch and filled + tensor.nbytes > limit_bytes:
            yield batch
            batch, filled = [], 0
        batch.append(tensor)
        filled += tensor.nbytes
    if batch:
        yield batch


def _compare_over_tp(tp: Comm, named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """What is not split is the same on all ranks of "tp"; a part that nobody marked would be silently wrong."""
    mine = [fingerprint(local_tensor(param)) for _, param in named]
    rows = [json.loads(row) for row in tp.exchange(json.dumps(mine).encode(), AGREE)]
    for rank, row in enumerate(rows):
        if other := [name for (name, _), theirs, ours in zip(named, row, rows[0], strict=True) if theirs != ours]:
            raise MismatchError(
                f"{', '.join(other[:5])} has other values on rank {tp.world_rank(rank)} than on {tp.world_rank(0)}; "
                f"they share 'tp'; fill it alike on both, or, if it is a part of a larger tensor, set "
                f"param.tensor_model_parallel = True (and param.partition_dim) before shard()"
            )
