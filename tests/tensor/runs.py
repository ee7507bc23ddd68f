"""The built-in GPT, trained on a mesh and by one process alone: what the tests here compare.

A run is data. The same run at another stage must give the same bits, on another mesh the same numbers.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import onefold
from onefold.cost.shapes import Shape
from onefold.train.run.model import GPT
from onefold.train.run.tensor_parallel import parallelize
from tests.harness import device

SHAPE = Shape(layers=2, hidden=16, heads=4, seq=8, vocab=50)  # 4 does not divide 50
LR = {"lr": 0.1, "momentum": 0.9}


@dataclass(frozen=True)
class Run:
    shard: int
    tp: int
    stage: int = 0
    sequence: bool = False
    micro: int = 1
    reduce: str | None = None
    clip: float = 1.0
    steps: int = 3
    fields: tuple[tuple[str, Any], ...] = ()

    def at(self, stage: int) -> Run:
        return dataclasses.replace(self, stage=stage)

    @property
    def ranks(self) -> int:
        return self.shard * self.tp


class Trained(NamedTuple):
    params: dict[str, Tensor]  # whole ones, on the first rank
    losses: list[float]
    norms: list[Tensor]
    sent: dict[str, int]


def tokens(step: int, micro: int, stream: int) -> tuple[Tensor, Tensor]:
    """All ranks of one "tp" read the same stream."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + stream)
    drawn = torch.randint(0, SHAPE.vocab, (2, SHAPE.seq + 1), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


def fresh(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(SHAPE)


def stream_of(mesh: DeviceMesh) -> int:
    names = mesh.mesh_dim_names or ()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return coordinate[names.index("shard")] if "shard" in names else 0


def built(run: Run, mesh: DeviceMesh, seed: int = 0, **more: Any) -> tuple[GPT, onefold.Optimizer]:
    model = parallelize(fresh(seed).to(device()), mesh, run.sequence)
    fields = {"bucket_bytes": 8 << 10, **dict(run.fields)}
    onefold.shard(model, stage=run.stage, mesh=mesh, **fields)
    return model, onefold.Optimizer(model, torch.optim.SGD, **LR, **more)


def turn(run: Run, model: GPT, optimizer: onefold.Optimizer, step: int, stream: int) -> tuple[list[float], Tensor]:
    losses = []
    for micro in range(run.micro):
        last = micro == run.micro - 1
        with nullcontext() if last else onefold.accumulate(model, reduce=run.reduce):
            loss = model(*(drawn.to(device()) for drawn in tokens(step, micro, stream))) / run.micro
            optimizer.backward(loss)
            losses.append(loss.item())
    norm = optimizer.clip_grad_norm(run.clip)
    optimizer.step()
    optimizer.zero_grad()
    return losses, norm


def train(runs: list[Run]) -> list[Trained]:
    """On every rank: all of them, one after the other; meshes are shared."""
    torch.set_num_threads(1)
    meshes = cache(lambda shard, tp: onefold.mesh(shard=shard, tp=tp, device=device()))
    return [_train(run, meshes(run.shard, run.tp)) for run in runs]


def _train(run: Run, mesh: DeviceMesh) -> Trained:
    model, optimizer = built(run, mesh)
    losses, norms = [], []
    for step in range(run.steps):
        found, norm = turn(run, model, optimizer, step, stream_of(mesh))
        losses += found
        norms.append(norm)
    sent = onefold.traffic(model).by_purpose
    return Trained(onefold.full_state_dict(model), losses, norms, sent)


def alone(streams: int, micro: int = 1, clip: float = 1.0, steps: int = 3) -> Trained:
    """In one process, by plain PyTorch: the mean over all streams and micro-batches."""
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), **LR)
    losses, norms = [], []
    for step in range(steps):
        for one in range(micro):
            total = 0.0
            for stream in range(streams):
                loss = model(*tokens(step, one, stream)) / (streams * micro)
                loss.backward()
                total += loss.item()
            losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return Trained({name: value.clone() for name, value in model.state_dict().items()}, losses, norms, {})


def mean_losses(per_rank: list[Trained], run: Run) -> list[float]:
    """Of all streams; ranks of one "tp" have the same, bit for bit."""
    streams = [per_rank[first : first + run.tp] for first in range(0, run.ranks, run.tp)]
    for ranks in streams:
        assert all(rank.losses == ranks[0].losses for rank in ranks)
    return [sum(step) / run.shard for step in zip(*(ranks[0].losses for ranks in streams))]
