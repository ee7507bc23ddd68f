"""A run of a small model whose blocks take what blocks in the wild take: the same at every policy."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from tests.harness import device
from tests.models import WIDE, ManyInputsNet

DIM, SEQ, BATCH, LAYERS = WIDE, 8, 2, 4
INPUT_BYTES = BATCH * SEQ * DIM * 4  # of one block
HOSTLESS = ("keep", "checkpoint", "checkpoint+host")
SHARED = ("partition", "partition+host")
POLICIES = (*HOSTLESS, *SHARED)


class Trained(NamedTuple):
    digest: str  # of all losses, parameters and norms
    memory: onefold.MemoryReport  # after the last forward
    traffic: onefold.TrafficReport  # of the last step


def mesh_of(policy: str) -> Any:
    """All ranks tensor-parallel, where inputs are to be shared; they run the same batch."""
    if not policy.startswith("partition"):
        return None
    return init_device_mesh(device(), (1, dist.get_world_size()), mesh_dim_names=("shard", "tp"))


def made(policy: str, stage: int = 2, model: nn.Module | None = None, **fields: Any) -> tuple[nn.Module, Any]:
    onefold.init()
    torch.manual_seed(7)
    fields = {"bucket_bytes": 8 << 10, "mesh": mesh_of(policy), **fields}
    model = onefold.shard((model or ManyInputsNet(LAYERS)).to(device()), stage=stage, activations=policy, **fields)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)


def batch(step: int, rank: int, numel: int = BATCH) -> Tensor:
    return torch.randn(numel, SEQ, DIM, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device())


def train(policy: str, stage: int, same_batch: bool, steps: int = 2, micro: int = 1, **fields: Any) -> Trained:
    """On a rank. With `same_batch` all ranks see one batch, as those of a tensor-parallel group do."""
    torch.manual_seed(7)
    net = ManyInputsNet(LAYERS, shared=fields.pop("shared", False))
    model, optimizer = made(policy, stage, net, **fields)
    said = hashlib.sha256()
    for step in range(steps):
        for part in range(micro):
            torch.manual_seed(step)
            with onefold.accumulate(model, reduce="each") if part < micro - 1 else nullcontext():
                seen = batch(step * 10 + part, 0 if same_batch else dist.get_rank())
                loss = model(seen).square().mean()
                memory = onefold.memory(model)
                loss.backward()
            said.update(repr(loss.item()).encode())
        said.update(repr(optimizer.clip_grad_norm(0.5).item()).encode())
        optimizer.step()
        optimizer.zero_grad()
    with onefold.full_parameters(model):
        for param in model.parameters():
            said.update(param.detach().float().cpu().clone().numpy().tobytes())
    return Trained(said.hexdigest(), memory, onefold.traffic(model))
