"""A few real steps of a model, whole or cut over ranks, beside a rehearsal: what was planned, and what was seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from onefold.comm.mesh import Axes, Mesh
from onefold.comm.meter import Flow
from onefold.cost.shapes import Shape
from onefold.observe.passes import Cut
from onefold.observe.rehearsal import Rehearsal, rehearse
from onefold.observe.reports import placement
from onefold.observe.simulation import train_step
from onefold.observe.tensor_messages import TensorMessages
from onefold.optim.named import choose
from onefold.optim.optimizer import Optimizer
from onefold.settings.offload import AUTO, Offload
from onefold.settings.zero import Zero
from onefold.sharding import shard
from onefold.train.run.model import initialise

WARM_UP = 2  # steps until buffers are allocated and schedules learnt


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialWork:
    """What is trained: a model or this rank's stage of it, and how it is cut."""

    build: Callable[[], nn.Module]
    sample: Any
    zero: Zero
    shape: Shape | None  # of the built-in GPT
    cut: Cut
    axes: Axes
    mesh: Mesh | None  # if "tp" or "pp" cuts the model
    ranks: int
    micro_batches: int
    optimizer: str
    optimizer_state: str


class TrialResult(NamedTuple):
    """A rehearsal of a step, and the model after some, with the last one's peak and messages of "tp"."""

    planned: Rehearsal
    model: nn.Module
    optimizer: Optimizer  # the model holds it weakly, and counts its state while it lives
    peak_bytes: int
    messages: Mapping[tuple[str, str], Flow]


def try_steps(work: TrialWork, device: torch.device) -> TrialResult:
    """Rehearses a step and trains a few; with offload="auto" rehearses with the tiers that they decided. Collective."""
    cut, axes, mesh = work.cut, work.axes, work.mesh
    with torch.device("meta"):
        blank = work.build()
    chosen = choose(work.optimizer, state=work.optimizer_state)
    rehearsed = partial(
        rehearse, sample=work.sample, zero=work.zero, cost=chosen.cost, ranks=axes.shard.size, rank=axes.shard.rank,
        plays="nccl" if device.type == "cuda" else "gloo", node_ranks=work.ranks,
        micro_batches=work.micro_batches, optimizer=chosen.make_whole, cut=cut,
    )  # fmt: skip
    decides = Offload.of(work.zero.offload).optimizer == AUTO  # the first step says where optimizer state is
    planned = None if decides else rehearsed(blank)
    if mesh is None or work.shape is None:
        model = shard(work.build().to(device), work.zero)
    else:
        if cut.split is not None:
            cut.split(blank)
        fill = partial(initialise, layers=work.shape.layers)
        model = shard(blank, dataclasses.replace(work.zero, mesh=mesh, init=fill), device=str(device))
    passes = cut.passes(None, work.micro_batches)
    if cut.pp > 1 and mesh is not None and cut.loss is not None:
        from onefold.parallel.pipeline import Schedule  # here: torch's schedules take a second to import

        passes = Schedule(model, mesh, work.micro_batches, cut.loss, cut.tied)
    optimizer = chosen.make(model)
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), work.sample)
    for _ in range(WARM_UP):
        train_step(model, optimizer, inputs, passes)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with TensorMessages(cut.tp) if cut.tp > 1 else nullcontext() as messages:
        peak = train_step(model, optimizer, inputs, passes)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
    if planned is None:
        with torch.device("meta"):
            blank = work.build()
        found = placement(model)
        planned = rehearsed(blank, tiers=found.optimizer_tiers, parameter_tiers=found.parameter_tiers)
    return TrialResult(planned, model, optimizer, peak, messages.flows if messages is not None else {})
