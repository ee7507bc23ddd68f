"""Train one small model for a few steps on this rank; what every parity test compares.

A run is data: the same run at another stage must give the same bits.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import onefold
from tests.harness import device
from tests.models import MODELS

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
    "adamw-bf16": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "state": "bf16"}),
    "adamw-8bit": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "state": "8bit"}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
}


@dataclass(frozen=True)
class Run:
    model: str = "gpt"
    stage: int = 0
    optimizer: str = "adamw"
    clip: float | None = None
    grouped: bool = False
    micro: int = 1
    reduce: str | None = None
    steps: int | None = None  # as many as its model needs to show what is odd about it
    bucket_bytes: int = 64 << 10
    threads: int = 1
    step_in_backward: bool = False
    fields: tuple[tuple[str, Any], ...] = ()

    def at(self, stage: int) -> Run:
        return dataclasses.replace(self, stage=stage)


@dataclass
class Trained:
    params: dict[str, Tensor]
    losses: list[float]
    norms: list[Tensor]
    traffic: dict[str, int]


def batch_for(step: int, micro: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_000 * step + 1_000 * micro + rank)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not: neighbours in the model, apart in the optimizer."""
    params = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in params if p.ndim > 1], [p for p in params if p.ndim <= 1]
    groups = [{"params": matrices}, {"params": vectors, "lr": 3e-3, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def train(run: Run, mesh: DeviceMesh | None = None) -> Trained:
    """On every rank: our engine."""
    onefold.init()
    torch.set_num_threads(run.threads)
    torch.manual_seed(1234)
    case = MODELS[run.model]
    model = case.build().to(device())
    onefold.shard(model, stage=run.stage, bucket_bytes=run.bucket_bytes, mesh=mesh, **dict(run.fields))
    cls, kwargs = OPTIMIZERS[run.optimizer]
    kwargs = {**kwargs, "step_in_backward": run.step_in_backward}
    optimizer = onefold.Optimizer(model, cls, groups=groups_of(model) if run.grouped else None, **kwargs)

    def clip() -> list[Tensor]:
        return [optimizer.clip_grad_norm(run.clip)] if run.clip is not None else []

    trained = loop(run, model, case.loss, optimizer, clip, lambda: onefold.accumulate(model, reduce=run.reduce))
    trained.traffic = onefold.traffic(model).by_purpose
    return trained


def train_ddp(run: Run) -> Trained:
    """On every rank: torch's DistributedDataParallel on the same work."""
    torch.set_num_threads(run.threads)
    torch.manual_seed(1234)
    case = MODELS[run.model]
    model = case.build()
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    cls, kwargs = OPTIMIZERS[run.optimizer]
    optimizer = cls(groups_of(model) if run.grouped else list(model.parameters()), **kwargs)

    def clip() -> list[Tensor]:
        return [torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)] if run.clip is not None else []

    return loop(run, wrapped, case.loss, optimizer, clip, wrapped.no_sync)


def loop(
    run: Run,
    model: nn.Module,
    loss_of: Callable[[nn.Module, torch.Generator, int], Tensor],
    optimizer: torch.optim.Optimizer,
    clip: Callable[[], list[Tensor]],
    accumulating: Callable[[], Any],
) -> Trained:
    losses, norms = [], []
    bare = getattr(model, "module", model)
    for step in range(run.steps or MODELS[run.model].steps):
        for micro in range(run.micro):
            last = micro == run.micro - 1
            torch.manual_seed(step)  # dropout
            with nullcontext() if last else accumulating():
                loss = loss_of(model, batch_for(step, micro, dist.get_rank()), step) / run.micro
                optimizer.backward(loss) if isinstance(optimizer, onefold.Optimizer) else loss.backward()
                losses.append(loss.item())
        norms += clip()
        optimizer.step()
        optimizer.zero_grad()
    with onefold.full_parameters(model) if bare is model else nullcontext():
        params = {name: p.detach().clone() for name, p in bare.named_parameters()}
    return Trained(params, losses, norms, {})


@dataclass
class Verdict:
    """What one rank saw when it trained a run at several stages."""

    differences: list[str]  # from stage 0 on the same rank
    digest: str  # of stage 0's parameters, to compare ranks
    norms: list[float]


def compare_stages(run: Run, stages: tuple[int, ...], mesh: DeviceMesh | None = None) -> Verdict:
    """On every rank: train at stage 0 and at each of `stages`."""
    reference = train(run.at(0), mesh)
    differences = []
    for stage in stages:
        trained = train(run.at(stage), mesh)
        differences += [f"stage {stage}: {name}" for name in differing(trained, reference)]
        if not all(same_bits(a, b) for a, b in zip(trained.norms, reference.norms, strict=True)):
            differences.append(f"stage {stage}: gradient norms {trained.norms} instead of {reference.norms}")
        if trained.losses != reference.losses:
            differences.append(f"stage {stage}: losses {trained.losses} instead of {reference.losses}")
    return Verdict(differences, digest_of(reference), [float(norm) for norm in reference.norms])


def digest_of(trained: Trained) -> str:
    digest = hashlib.sha256()
    for name, value in trained.params.items():
        digest.update(name.encode())
        digest.update(value.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def differing(ours: Trained, theirs: Trained) -> list[str]:
    """Names of parameters that are not equal bit for bit."""
    assert ours.params.keys() == theirs.params.keys()
    return [name for name, value in ours.params.items() if not same_bits(value, theirs.params[name])]


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
