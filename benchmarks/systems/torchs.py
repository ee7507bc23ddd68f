"""What PyTorch itself offers: no communication at all, autocast, DDP, ZeroRedundancyOptimizer, FSDP2.

What only one of them needs is imported there: a process pays for its own system and no other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.fill import real
from benchmarks.systems.loop import Ready, compile_blocks, numel, plain_loop, recompute_blocks
from benchmarks.work import Work


def whole(work: Work, *, compiled: bool = False) -> nn.Module:
    """All of the model in fp32 on the device."""
    model = real(work.blank(), on=work.target, maker=work.target)
    if work.recompute:
        recompute_blocks(model)
    if compiled:
        compile_blocks(model)
    return model


def floor(work: Work) -> Ready:
    """Compute only. In bf16 also the parameters and moments are bf16: a bound on time, not a way to train."""
    model = whole(work).to(work.compute)
    adamw = torch.optim.AdamW(model.parameters(), fused=True, **work.adamw)
    return Ready(plain_loop(model, adamw, work.micro_batches), numel(model))


def amp(work: Work, *, compiled: bool = False) -> Ready:
    """fp32 parameters, cast where they are used."""
    model = whole(work, compiled=compiled)
    adamw = torch.optim.AdamW(model.parameters(), fused=True, **work.adamw)
    return Ready(plain_loop(model, adamw, work.micro_batches, autocast=autocast(work)), numel(model))


def ddp(work: Work) -> Ready:
    model = DistributedDataParallel(whole(work), gradient_as_bucket_view=work.device == "cuda")
    adamw = torch.optim.AdamW(model.parameters(), fused=True, **work.adamw)
    return Ready(plain_loop(model, adamw, work.micro_batches, autocast=autocast(work)), numel(model))


def zero1(work: Work) -> Ready:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(whole(work), gradient_as_bucket_view=True)
    adamw = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **work.adamw)
    return Ready(plain_loop(model, adamw, work.micro_batches, autocast=autocast(work)), numel(model))


def autocast(work: Work) -> torch.device | None:
    return work.target if work.precision == "bf16" else None


def fsdp2(work: Work, *, compiled: bool = False) -> Ready:
    """One unit per block and one for the rest. In bf16: bf16 parameters, gradients reduced in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    fields: dict[str, Any] = {"mesh": init_device_mesh(work.device, (work.world,))}
    if work.precision == "bf16":
        fields["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rests = work.target
    if work.away:
        rests = torch.device("cpu")
        if work.device == "cuda":  # from a CPU there is nowhere to go
            fields["offload_policy"] = CPUOffloadPolicy()
    model: Any = work.blank()
    if work.recompute:
        recompute_blocks(model)
    if compiled:
        compile_blocks(model)
    for block in model.layers:
        fully_shard(block, **fields)
    fully_shard(model, **fields)
    real(model, on=rests, maker=work.target)
    adamw = torch.optim.AdamW(model.parameters(), fused=True, **work.adamw)
    return Ready(plain_loop(model, adamw, work.micro_batches), numel(model))
