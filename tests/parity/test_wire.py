"""What the meter says it sent is what the kernel saw on the wire, and no more than DistributedDataParallel sends.

The ranks train inside a network namespace of their own, so the bytes of its loopback device are theirs alone:
payload, TCP/IP headers and acknowledgements. The counter is read between steps, behind barriers.
"""

from __future__ import annotations

import json
import os
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold.comm.communicator import Comm
from onefold.comm.mesh import axes_of
from onefold.comm.meter import Label, Meter
from onefold.comm.strategy import max_rounds
from tests.harness import run_ranks
from tests.harness.netns import can_make_namespace, loopback_bytes
from tests.harness.python import run_python
from tests.models import Layers

WIDTH, LAYERS = 512, 4  # 1M parameters, 4 MB: headers and frames stay within what is allowed
WIDE = 2048  # 17M parameters, for the table of docs/performance.md
WARM_UP, STEPS = 2, 2
PARAMETER_BYTES = LAYERS * (WIDTH * WIDTH + WIDTH) * 4
MEASURE = """
from tests.harness.netns import enter_namespace
enter_namespace()
from tests.parity.test_wire import measure
measure({width})
"""
CASES = {  # name -> ranks, stage (None: DistributedDataParallel)
    "stage 0": (2, 0),
    "stage 1": (2, 1),
    "stage 2": (2, 2),
    "stage 2, 3 ranks": (3, 2),
    "stage 2, 4 ranks": (4, 2),
    "stage 3": (2, 3),
    "DDP": (2, None),
}
FLAGS, FLAG_RANKS = Label("used-flags", "step"), 3


class Counts(NamedTuple):
    """Bytes of a few steps: on `lo`, by all ranks, and in this rank's meter."""

    kernel: int
    metered: int


def train_and_count(stage: int | None, width: int) -> Counts:
    """On every rank: train, and read the counter behind barriers."""
    torch.manual_seed(0)
    model: nn.Module = Layers(width, LAYERS)
    if stage is None:
        model = nn.parallel.DistributedDataParallel(model)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        model = onefold.shard(model, stage=stage, units=nn.Linear)
        optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=1e-3)
    batch = torch.randn(1, width)
    metered = 0

    def step() -> None:
        nonlocal metered
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        metered += onefold.traffic(model).total if stage is not None else 0

    for _ in range(WARM_UP):
        step()
    dist.barrier()
    metered, before = 0, loopback_bytes()
    dist.barrier()  # nobody sends before all have read
    for _ in range(STEPS):
        step()
    dist.barrier()
    return Counts(loopback_bytes() - before, metered)


def send_flags() -> Counts:
    """On every rank: all-reduce flags, as many as two million parameters have, and read the counter behind barriers."""
    comm = Comm(axes_of(None).world, torch.device("cpu"), 60.0, Meter())
    comm.all_reduce_max(bytes(1), FLAGS)  # connects
    dist.barrier()
    before, comm.meter = loopback_bytes(), Meter()
    dist.barrier()
    for _ in range(STEPS):
        comm.all_reduce_max(bytes(2_000_000), FLAGS)
    dist.barrier()
    return Counts(loopback_bytes() - before, comm.meter.running["used-flags", "all-reduce"].sent_bytes)


def measure(width: int) -> None:
    """Inside the namespace: print, for each case, [bytes of the kernel, bytes of all meters], per step."""
    found = {}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # before the first rank starts, which inherits it
    runs = {name: run_ranks(ranks, train_and_count, stage, width) for name, (ranks, stage) in CASES.items()}
    for name, counts in {**runs, "flags": run_ranks(FLAG_RANKS, send_flags)}.items():
        found[name] = [counts[0].kernel / STEPS, sum(count.metered for count in counts) / STEPS]
    print(json.dumps(found))


def measured(width: int) -> dict[str, list[float]]:
    """What `measure` prints, in a namespace of its own."""
    ran = run_python("-c", MEASURE.format(width=width))
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found() -> dict[str, list[float]]:
    if not can_make_namespace():
        pytest.skip("needs a network namespace of its own: run as root, or allow unprivileged user namespaces")
    return measured(WIDTH)


@pytest.mark.parametrize("case", [name for name, (_, stage) in CASES.items() if stage is not None])
def test_the_kernel_saw_the_bytes_that_the_meter_counted(found: dict[str, list[float]], case: str) -> None:
    kernel, metered = found[case]
    assert metered <= kernel <= metered * 1.03, f"{case}: the kernel saw {kernel:,.0f}, the meters {metered:,.0f}"


@pytest.mark.parametrize("case", [name for name, (_, stage) in CASES.items() if stage is not None])
def test_the_kernel_saw_two_or_three_parameter_sizes_times_ranks_less_one(
    found: dict[str, list[float]], case: str
) -> None:
    """All ranks together send N × 2Ψ(N-1)/N = 2Ψ(N-1); at stage 3 Ψ more, less the layer that is kept for backward."""
    ranks, stage = CASES[case]
    wanted = (3 - 1 / LAYERS if stage == 3 else 2) * PARAMETER_BYTES * (ranks - 1)
    kernel = found[case][0]
    assert wanted <= kernel <= wanted * 1.03, f"{case}: the kernel saw {kernel:,.0f}, the formula says {wanted:,}"


def test_the_kernel_saw_the_flags_that_the_meter_counted(found: dict[str, list[float]]) -> None:
    """A byte of every parameter in each of ceil(log2 N) rounds, from every rank."""
    kernel, metered = found["flags"]
    assert metered == FLAG_RANKS * max_rounds(FLAG_RANKS) * 2_000_000
    assert metered <= kernel <= metered * 1.03, f"the kernel saw {kernel:,.0f}, the meters {metered:,.0f}"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_no_stage_sends_more_than_ddp(found: dict[str, list[float]], stage: int) -> None:
    assert found[f"stage {stage}"][0] <= found["DDP"][0] * 1.02


if __name__ == "__main__":  # the table of docs/performance.md
    rows = measured(WIDE)
    for name, (kernel, metered) in rows.items():
        to_meter = f"{kernel / metered:.4f} of the meter's, " if metered else ""
        print(f"{name}: {kernel:,.0f} bytes per step, {to_meter}{kernel / rows['DDP'][0]:.4f} of DDP's")
