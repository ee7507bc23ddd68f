"""Many small blocks beside DDP: what a unit costs that is not arithmetic. Two gloo ranks, one thread each, fp32.

    onefold run --ranks 2 --module benchmarks.small_blocks
    onefold run --ranks 2 --module benchmarks.small_blocks --blocks 50 --rounds 3   # short, to see that it runs

Each rank holds the model of every system, and the systems take turns step by step, A B C, B C A, …: drift of the
machine hits all alike, and steps of one round are compared in pairs. Their losses must be equal in every step. Where
other processes share the cores, seconds of the processor say more than those of the clock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from benchmarks.turns import rotated

BASE, LR = "ddp", 1e-5  # so small that rounding does not grow into other losses
SYSTEMS = (BASE, "stage2", "stage3", "stage3+checkpoint", "stage2+unit-per-block", "stage3+unit-per-block")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return found


def build(blocks: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


Step = Callable[[Tensor], float]


def started(system: str, blocks: int, width: int, *, fused: bool) -> Step:
    """A function that trains one step on a batch; its loss."""
    model, settings = build(blocks, width), {"lr": LR, "fused": fused}
    optimizer: torch.optim.Optimizer
    if system == BASE:
        model = nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    else:
        stage, _, variant = system.partition("+")
        recompute = "checkpoint" if variant == "checkpoint" else "keep"
        units = Block if variant == "unit-per-block" else None
        model = onefold.shard(model, stage=int(stage[-1]), units=units, activations=recompute)
        optimizer = onefold.Optimizer(model, torch.optim.AdamW, **settings)

    def step(batch: Tensor) -> float:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


class Took(NamedTuple):
    """Seconds of one step, of the slower rank."""

    clock: float
    processor: float


def measure(steps: dict[str, Step], width: int, *, warm_up: int, rounds: int) -> dict[str, list[Took]]:
    """The measured steps of each system."""
    found: dict[str, list[Took]] = {system: [] for system in steps}
    systems = list(steps)
    for number in range(warm_up + rounds):
        batch = torch.randn(32, width, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        losses = dict[str, float]()
        for system in rotated(systems, number):
            dist.barrier()
            clock, processor = time.perf_counter(), time.process_time()
            losses[system] = steps[system](batch)
            took = torch.tensor([time.perf_counter() - clock, time.process_time() - processor])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number >= warm_up:
                found[system].append(Took(*took.tolist()))
        first = losses[systems[0]]
        for system, loss in losses.items():
            if abs(loss - first) > 1e-4 * abs(first):
                sys.exit(f"{system}: the loss of step {number} is {loss}, that of {systems[0]} is {first}")
    return found


def line_of(system: str, own: list[Took], base: list[Took]) -> str:
    cells = [f"{system:<24}"]
    for what in Took._fields:
        pairs = [(getattr(one, what), getattr(other, what)) for one, other in zip(own, base, strict=True)]
        median = statistics.median(one for one, _ in pairs)
        ratio = statistics.median(one / other for one, other in pairs)
        cells.append(f"{what} {1e3 * median:7.1f} ms, {ratio:.3f} x")
    return "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="ratios are to the first")
    parser.add_argument("--fused", action="store_true", help="AdamW(fused=True) for all; it is the loop that DDP saves")
    parser.add_argument("--warm-up", type=int, default=3, help="rounds that do not count")
    parser.add_argument("--rounds", type=int, default=20, help="rounds that do: a step of every system")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    onefold.init()
    steps = {system: started(system, asked.blocks, asked.width, fused=asked.fused) for system in asked.systems}
    found = measure(steps, asked.width, warm_up=asked.warm_up, rounds=asked.rounds)
    if dist.get_rank() == 0:
        for system, took in found.items():
            print(line_of(system, took, found[asked.systems[0]]), flush=True)
    onefold.shutdown()


if __name__ == "__main__":
    main()
