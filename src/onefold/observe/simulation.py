"""Simulates one rank of N without peers, with real memory and compute: measures on one device what a rank would need.

The model is built on the meta device and sharded as rank 0 of N, so only this rank's shards are allocated. All-gathers
fill their buffers with copies of this rank's shard or with zeros, reductions return its own part: values are
meaningless, but sizes, kernels and the order of events are those of a real run. Network time is not included.

A step's time is compute, the copies that stand for messages, and launch overhead: the host's time that compute does not
hide (Python, hooks, launches; on a CPU everything that is not an operator).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from onefold.comm.mesh import Mesh, simulated_axes
from onefold.comm.simulated_world import simulated_mesh
from onefold.cost.states import StateBytes
from onefold.errors import ConfigError
from onefold.observe.inventory import DISK
from onefold.observe.passes import ONE_BATCH, WHOLE, Cut, Passes
from onefold.observe.rehearsal import Rehearsal, rehearse
from onefold.observe.reports import MemoryReport, memory, track_memory, traffic
from onefold.observe.utilization import Busy, busy
from onefold.optim.named import Chosen, choose
from onefold.optim.optimizer import Optimizer
from onefold.settings.zero import Zero
from onefold.sharding import shard_over

NOTHING = StateBytes()
NOISE = 0.05  # the part of a step's time by which two steps may differ


@dataclass(frozen=True)
class Simulation:
    """What one rank of N needs, planned and measured."""

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
    busy: Busy | None  # of a step: operators on a CPU, kernels on CUDA; None if the profiler cannot record the device
    plan_s: float  # seconds of the rehearsal
    build_s: float  # seconds of sharding and initialising the model
    host: StateBytes = NOTHING  # states in host memory; between steps no gradient waits there
    disk: StateBytes = NOTHING
    cut: Cut = WHOLE

    @property
    def states_off(self) -> float:
        """Measured bytes of states over planned ones, less one."""
        return self.states.total / self.planned.states.total - 1

    @property
    def compute_s(self) -> float | None:
        return self.busy.compute_s if self.busy else None

    @property
    def launch_s(self) -> float | None:
        """Seconds of the last step in which nothing computed: the host's time that the device did not hide.

        None if unknown: many small operators may take longer under the profiler than the whole step without it.
        """
        if self.busy is None:
            return None
        rest = self.steps_s[-1] - sum(self.busy)
        return max(0.0, rest) if rest >= -NOISE * self.steps_s[-1] else None

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
    optimizer_state: Literal["fp32", "bf16", "8bit"] = "fp32",
    backend: str | None = None,
    micro_batches: int = 1,
    cut: Cut = WHOLE,
    split: Callable[[nn.Module, Mesh], Any] | None = None,
) -> Simulation:
    """Takes `steps` steps as rank 0 of `ranks`. `build` makes the model; it is called under the meta device. `backend`
    is what would move messages: by default nccl between GPUs and gloo between CPUs, whose host calls each peer.

    `cut` says how the model is cut beside: over `cut.tp` ranks by `split`, which is given the model and a mesh, or into
    `cut.pp` stages of a pipeline, of which `build` makes stage `cut.stage`."""
    cut.check(micro_batches)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: torch finds no CUDA device on this machine; use cpu")
    with ExitStack() as world:
        if cut.tp > 1:
            assert split is not None
            mesh = world.enter_context(simulated_mesh(ranks, cut.tp, target.type))
            cut = cut._replace(split=partial(_split, split, mesh))
        return _simulate(
            build, sample, zero, ranks, steps, target, init, choose(optimizer, state=optimizer_state),
            backend or ("nccl" if target.type == "cuda" else "gloo"), micro_batches, cut,
        )  # fmt: skip


def _split(split: Callable[[nn.Module, Mesh], Any], mesh: Mesh, model: nn.Module) -> None:
    split(model, mesh)


def _simulate(
    build: Callable[[], nn.Module],
    sample: Any,
    zero: Zero,
    ranks: int,
    steps: int,
    target: torch.device,
    init: Callable[[nn.Module], None] | None,
    chosen: Chosen,
    plays: str,
    micro_batches: int,
    cut: Cut,
) -> Simulation:
    with torch.device("meta"):
        blank, model = build(), build()
    clock = time.perf_counter
    began = clock()
    planned = rehearse(
        blank, sample, zero, chosen.cost, ranks=ranks, plays=plays, micro_batches=micro_batches, cut=cut,
        optimizer=chosen.make_whole,
    )  # fmt: skip
    plan_s, began = clock() - began, clock()
    del blank
    if cut.split is not None:
        cut.split(model)
    axes = simulated_axes(ranks, plays=plays, tp=cut.tp, pp=cut.pp, stage=cut.stage)
    shard_over(axes, model, zero, {"device": str(target), "init": init})
    cut.tie(model, plays, values=True)
    opt, passes = chosen.make(model), cut.passes(None, micro_batches)
    inputs = tree_map_only(Tensor, lambda tensor: tensor.to(target), sample)
    cuda, build_s = target.type == "cuda", clock() - began
    if cuda:
        torch.cuda.reset_peak_memory_stats(target)
    step = partial(plain_step, model, opt, inputs, passes)
    times = [_seconds(step, target) for _ in range(steps)]
    peak, reserved = _peak(model, opt, inputs, target, passes)
    seen = busy(step, target)
    now = memory(model)
    states = StateBytes(now.parameters.measured, now.gradients.measured, now.optimizer.measured)
    return Simulation(
        ranks=ranks * cut.tp * cut.pp,
        stage=zero.stage if isinstance(zero.stage, int) else -1,
        device=torch.cuda.get_device_name(target) if cuda else "cpu",
        parameters=sum(p.numel() for p in model.parameters()),
        planned=planned,
        states=states,
        peak_bytes=peak,
        reserved_bytes=reserved,
        sent_bytes=traffic(model).total,
        steps_s=tuple(times),
        busy=seen,
        plan_s=plan_s,
        build_s=build_s,
        host=states_elsewhere(now, disk=False),
        disk=states_elsewhere(now, disk=True),
        cut=cut,
    )


def states_elsewhere(now: MemoryReport, *, disk: bool) -> StateBytes:
    """Bytes of states that are kept on disk, or in host memory."""
    rows = [row for row in now.elsewhere if (row.place == DISK) == disk]
    return StateBytes(*(sum(row.measured for row in rows if row.state == state) for state in StateBytes._fields))


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def _peak(model: nn.Module, optimizer: Optimizer, inputs: Any, device: torch.device, passes: Passes) -> tuple[int, int]:
    """Bytes used and reserved at the peak so far; on a CPU, whose allocator does not count, those of one more step."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    return train_step(model, optimizer, inputs, passes), 0


def plain_step(model: nn.Module, optimizer: Optimizer, inputs: Any, passes: Passes = ONE_BATCH) -> None:
    """One training step, after which gradients stay, to be counted."""
    optimizer.zero_grad()
    passes(model, inputs, optimizer.backward)
    optimizer.step()


def train_step(model: nn.Module, optimizer: Optimizer, inputs: Any, passes: Passes = ONE_BATCH) -> int:
    """One training step; its peak bytes on a CPU, whose allocator does not count; 0 on CUDA."""
    on_cuda = optimizer.param_groups[0]["params"][0].is_cuda
    with nullcontext() if on_cuda else track_memory(model) as tracker:
        plain_step(model, optimizer, inputs, passes)
    return tracker.peak_bytes if tracker else 0
