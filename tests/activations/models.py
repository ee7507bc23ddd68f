"""A small model whose blocks take what blocks in the wild take, and a run of it: the same at every policy."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import onefold

DIM, SEQ, BATCH, LAYERS = 32, 8, 2, 4
INPUT_BYTES = BATCH * SEQ * DIM * 4  # of one block
HOSTLESS = ("keep", "checkpoint", "checkpoint+host")
SHARED = ("partition", "partition+host")
POLICIES = (*HOSTLESS, *SHARED)


class Block(nn.Module):
    """Dropout, a mask, a table that all blocks share, None, a number, a second tensor by keyword."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.drop = nn.Dropout(0.2)

    def forward(
        self, x: Tensor, pair: tuple[Tensor, None], scale: float = 1.0, *, table: Tensor | None = None
    ) -> Tensor:
        mask, nothing = pair
        assert nothing is None
        y = self.norm(x) * mask
        if table is not None:
            y = y + table
        return x + scale * self.drop(self.down(F.gelu(self.up(y))))


class Net(nn.Module):
    def __init__(self, layers: int = LAYERS, dim: int = DIM, shared: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 5)
        self.shared = shared  # the table carries a gradient, and goes into every block

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        table = torch.linspace(0, 1, x.shape[-1]).expand_as(x).to(x.dtype)
        table = torch.tanh(x * table) if self.shared else table
        mask = (x.detach() > -2).to(x.dtype)
        for block in self.blocks:
            x = block(x, (mask, None), 0.5, table=table)
        return self.head(x)


class Trained(NamedTuple):
    digest: str  # of all losses, parameters and norms
    memory: onefold.MemoryReport  # after the last forward
    traffic: onefold.TrafficReport  # of the last step


def mesh_of(policy: str) -> Any:
    """All ranks tensor-parallel, where inputs are to be shared; they run the same batch."""
    if not policy.startswith("partition"):
        return None
    return init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("shard", "tp"))


def made(policy: str, stage: int = 2, model: nn.Module | None = None, **fields: Any) -> tuple[nn.Module, Any]:
    onefold.init()
    torch.manual_seed(7)
    fields = {"bucket_bytes": 8 << 10, "mesh": mesh_of(policy), **fields}
    model = onefold.shard(model or Net(), stage=stage, activations=policy, **fields)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)


def batch(step: int, rank: int, numel: int = BATCH) -> Tensor:
    return torch.randn(numel, SEQ, DIM, generator=torch.Generator().manual_seed(1000 * step + rank))


def train(policy: str, stage: int, same_batch: bool, steps: int = 2, micro: int = 1, **fields: Any) -> Trained:
    """On a rank. With `same_batch` all ranks see one batch, as those of a tensor-parallel group do."""
    torch.manual_seed(7)
    net = Net(shared=fields.pop("shared", False))
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
            said.update(param.detach().float().clone().numpy().tobytes())
    return Trained(said.hexdigest(), memory, onefold.traffic(model))
