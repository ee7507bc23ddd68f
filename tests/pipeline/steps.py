"""One step of a schedule, and the loss it had over all ranks of the last stage."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import onefold


def place_in(mesh: DeviceMesh) -> tuple[int, int, int]:
    """This rank's stage, its shard, and how many shards there are; an axis of one rank is left out of a mesh."""
    names = mesh.mesh_dim_names or ()
    at, shard = (mesh.get_local_rank(name) if name in names else 0 for name in ("pp", "shard"))
    return at, shard, mesh["shard"].size() if "shard" in names and mesh.ndim > 1 else 1


def stepped(
    run: Any, stage: onefold.PipelineStage, optimizer: onefold.Optimizer, mesh: DeviceMesh, x: Tensor, y: Tensor,
    clip: float,
) -> tuple[float, list[float]]:  # fmt: skip
    """The gradient norm, and on the last stage the mean loss."""
    losses: list[Tensor] = []
    run.step(*[x] * stage.is_first, target=y if stage.is_last else None, losses=losses)
    norm = optimizer.clip_grad_norm(clip).item()
    optimizer.step()
    optimizer.zero_grad()
    if not stage.is_last:
        return norm, []
    mean = torch.stack(losses).mean().detach()
    shards = place_in(mesh)[2]
    if shards > 1:
        dist.all_reduce(mean, group=mesh.get_group("shard"))
    return norm, [mean.item() / shards]
