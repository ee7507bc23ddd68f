"""A small model trained as a pipeline, and by one process alone: what the tests here compare."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import onefold
from onefold.runtime.engine import engine_of
from tests.harness import device
from tests.models import PipelinePart
from tests.pipeline.steps import place_in, stepped

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
WIDTH, LAYERS, MICRO, STEPS, BATCH, CLIP = 32, 4, 4, 3, 8, 0.3


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]
    sent: dict[str, int]  # in the last step, by purpose
    units: dict[str, int]  # bytes of each unit's shard


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randn(BATCH, WIDTH, generator=generator)


def alone(clip: float = CLIP) -> Trained:
    torch.manual_seed(0)
    model = PipelinePart(0, LAYERS, depth=LAYERS, dim=WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, norms, {name: p.detach() for name, p in model.named_parameters()}, {}, {})


def piped(
    stages: int, zero: int, schedule: str, reduce: str = "each", keep_bytes: int = 0, *, muon: bool = False
) -> Trained:
    shards = dist.get_world_size() // stages
    mesh = onefold.mesh(pp=stages, shard=shards, device=device())
    at, shard, _ = place_in(mesh)
    torch.manual_seed(0)
    part = PipelinePart(LAYERS * at // stages, LAYERS * (at + 1) // stages, depth=LAYERS, dim=WIDTH).to(device())
    onefold.shard(part, stage=zero, mesh=mesh, bucket_bytes=1 << 12)
    stage = onefold.PipelineStage(part, mesh, reduce=reduce, keep_bytes=keep_bytes)
    optimizer = (
        onefold.Muon(part, lr=0.01, place={"*.down.weight": "muon"})
        if muon
        else onefold.Optimizer(part, torch.optim.SGD, lr=0.1, momentum=0.9)
    )
    run = SCHEDULES[schedule](stage, MICRO, loss_fn=nn.MSELoss(), scale_grads=False)
    means, norms = [], []
    for step in range(STEPS):
        x, y = (t.tensor_split(shards)[shard].to(device()) for t in batch(step))
        norm, mean = stepped(run, stage, optimizer, mesh, x, y, CLIP)
        norms.append(norm)
        means += mean
    sent = onefold.traffic(part).by_purpose
    units = {unit.name: unit.layout.shard_numel * unit.layout.itemsize for unit in engine_of(part).units}
    return Trained(means, norms, onefold.full_state_dict(part), sent, units)


def together(ranks: list[Trained]) -> Trained:
    losses = next(rank.losses for rank in reversed(ranks) if rank.losses)
    params = {name: value for rank in ranks for name, value in rank.params.items()}
    return Trained(losses, ranks[0].norms, params, {}, {})
