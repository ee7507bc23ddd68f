"""One rank of N with real memory, real compute and no peers: what a cluster's rank would need, measured on one device.

The model is built on the meta device and sharded as rank 0 of N, so only this rank's shards become real. Gathers fill
their buffers with copies of this rank's shard, reductions return its own part: values are meaningless, sizes, kernels
and the order of events are those of the real run. What a network would add is not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from onefold.config import Zero
from onefold.mesh import simulated_axes
from onefold.optimizer import Optimizer
from onefold.planner.dry import Rehearsal, default_loss, rehearse
from onefold.planner.plan import OPTIMIZERS, cost_of
from onefold.planner.states import StateBytes
from onefold.report import memory, track_memory, traffic
from onefold.shard import shard_over


@dataclass(frozen=True)
class Simulation:
    """Planned and measured, of one rank of N."""

    ranks: int
    stage: int
    device: str
    parameters: int
    planned: Rehearsal
    states: StateBytes
    peak_bytes: int  # the allocator's on CUDA; by storages on a CPU
    reserved_bytes: int  # CUDA: what the allocator took from the device
    sent_bytes: int
    steps_s: tuple[float, ...]
    plan_s: float  # how long the rehearsal took
    build_s: float  # and giving the shards their values

    @property
    def states_off(self) -> float:
        """Measured over planned, less one."""
        return self.states.total / self.planned.states.total - 1

    @property
    def peak_off(self) -> float:
        return self.peak_bytes / self.planned.peak_bytes - 1


def simulate(
    build: Callable[[], nn.Module],
    sample: Any,
    zero: Zero,
    *,
    ranks: int,
    steps: int = 2,
    device: str | None = None,
    init: Callable[[nn.Module], None] | None = None,
    optimizer: str = "adamw",
) -> Simulation:
    """Take `steps` steps as rank 0 of `ranks`. `build` makes the model; it is called under the meta device."""
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    plays = "nccl" if target.type == "cuda" else "gloo"
    with torch.device("meta"):
        blank, model = build(), build()
    cost, clock = cost_of(optimizer), time.perf_counter
    began = clock()
    planned = rehearse(blank, sample, zero, cost, ranks=ranks, plays=plays)
    plan_s, began = clock() - began, clock()
    del blank
    axes = simulated_axes(ranks, plays=plays)
    shard_over(axes, model, zero, {"device": str(target), "init": init})
    cls, settings = OPTIMIZERS[optimizer.lower()]
    opt = Optimizer(model, cls, **settings)
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(target), sample)
    cuda, build_s = target.type == "cuda", clock() - began
    if cuda:
        torch.cuda.reset_peak_memory_stats(target)
    times, wait = [], partial(torch.cuda.synchronize, target) if cuda else lambda: None
    peak = 0
    for _ in range(steps):
        wait()
        start = clock()
        peak = max(peak, train_step(model, opt, inputs))
        wait()
        times.append(clock() - start)
    now = memory(model)
    states = StateBytes(now.parameters.measured, now.gradients.measured, now.optimizer.measured)
    return Simulation(
        ranks=ranks,
        stage=zero.stage if isinstance(zero.stage, int) else -1,
        device=torch.cuda.get_device_name(target) if cuda else "cpu",
        parameters=sum(p.numel() for p in model.parameters()),
        planned=planned,
        states=states,
        peak_bytes=torch.cuda.max_memory_allocated(target) if cuda else peak,
        reserved_bytes=torch.cuda.max_memory_reserved(target) if cuda else 0,
        sent_bytes=traffic(model).total,
        steps_s=tuple(times),
        plan_s=plan_s,
        build_s=build_s,
    )


def train_step(model: nn.Module, optimizer: Optimizer, inputs: Any) -> int:
    """One step, and the bytes at its fullest instant where no allocator counts them. Gradients stay, to be counted."""
    on_cuda = optimizer.param_groups[0]["params"][0].is_cuda
    with nullcontext() if on_cuda else track_memory(model) as tracker:
        optimizer.zero_grad()
        optimizer.backward(default_loss(model, inputs))
        optimizer.step()
    return tracker.peak_bytes if tracker else 0
