"""The same small GPT, trained at stages 0, 1, 2 and 3: same bits, less memory. Nothing to download.

    torchrun --standalone --nproc-per-node 2 examples/compare_stages.py

`Training` is what to copy into a project of your own. The rest compares and prints.
"""

import argparse
import math
import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import onefold

STAGES = {0: "nothing", 1: "optimizer", 2: "+ gradients", 3: "+ parameters"}  # what each one shards
CONTEXT, BATCH = 64, 4  # bytes per sample, samples per rank and step
VOCAB = 256  # one token per byte
NOTES = """\
Held: between steps. At stage 3 a few layers at a time are also whole while
they compute. Communication buffers do not grow with the number of layers.
Sent: used-flags and norm let ranks agree on what was used and on clipping.
Stage 3 is below 3: what is whole when forward ends is not gathered again.
"""


class GPT(nn.Module):
    """Plain PyTorch: no line of it knows that it will be sharded."""

    def __init__(self, layers: int, dim: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, dim), nn.Embedding(CONTEXT, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, dim // 32, 4 * dim, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Training:
    """One model at one stage. This is all that a training script of your own needs."""

    def __init__(self, stage: int, layers: int, dim: int) -> None:
        torch.manual_seed(0)
        self.model = onefold.shard(GPT(layers, dim), stage=stage)
        self.optimizer = onefold.Optimizer(self.model, torch.optim.AdamW, lr=1e-3, fused=True)

    def step(self, samples: Tensor) -> float:
        loss = self.model(samples[:, :-1], samples[:, 1:])
        loss.backward()
        self.optimizer.clip_grad_norm(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Result(NamedTuple):
    """What one stage showed."""

    losses: Tensor  # by rank and step
    parameters: dict[str, Tensor]  # whole, after the last step, on rank 0
    memory: onefold.MemoryReport
    traffic: onefold.TrafficReport
    step_s: float


def train(console: Console, text: Tensor, args: argparse.Namespace) -> dict[int, Result]:
    """All stages take turns step by step, so that a busy machine slows them all alike."""
    trainings = {stage: Training(stage, args.layers, args.dim) for stage in STAGES}
    losses: dict[int, list[float]] = {stage: [] for stage in STAGES}
    seconds: dict[int, list[float]] = {stage: [] for stage in STAGES}
    generator = torch.Generator().manual_seed(dist.get_rank())  # every rank reads other lines
    console.print("loss on rank 0" + "".join(f"{f'stage {stage}':>12}" for stage in STAGES))
    for number in range(1, args.steps + 1):
        where = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
        samples = torch.stack([text[at : at + CONTEXT + 1] for at in where.tolist()])
        for stage, training in trainings.items():
            dist.barrier()
            start = time.perf_counter()
            losses[stage].append(training.step(samples))
            seconds[stage].append(time.perf_counter() - start)
        if number in (1, args.steps) or number % 5 == 0:
            console.print(f"  step {number:<7}" + "".join(f"{losses[stage][-1]:>12.7f}" for stage in STAGES))
    return {
        stage: Result(
            losses=on_all_ranks(losses[stage]),
            parameters=onefold.full_state_dict(training.model),
            memory=onefold.memory(training.model),
            traffic=onefold.traffic(training.model),
            step_s=statistics.median(seconds[stage]),
        )
        for stage, training in trainings.items()
    }


def on_all_ranks(row: list[float]) -> Tensor:
    table = torch.zeros(dist.get_world_size(), len(row), dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor(row, dtype=torch.float64)
    dist.all_reduce(table)  # zeros everywhere else, so the sum is exact
    return table


def read_text() -> Tensor:
    """The sources of Python's standard library, which every machine has."""
    folder = Path(os.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:40])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


# -- what is checked ---------------------------------------------------------------------------------------------------


def differences(results: dict[int, Result]) -> list[str]:
    """Where a stage differs from stage 0 by as much as one bit."""
    first, found = results[0], []
    for stage, result in results.items():
        if not torch.equal(result.losses, first.losses):
            found.append(f"losses of stage {stage}")
        found += [
            f"{name} of stage {stage}"
            for name, value in result.parameters.items()
            if not torch.equal(value, first.parameters[name])
        ]
    return found


def formula_bytes(stage: int, psi: int, ranks: int) -> dict[str, float]:
    """fp32 Adam: 4Ψ of parameters, 4Ψ of gradients, 8Ψ of optimizer state, each over N where the stage shards it."""
    return {
        "parameters": 4 * psi / (ranks if stage >= 3 else 1),
        "gradients": 4 * psi / (ranks if stage >= 2 else 1),
        "optimizer": 8 * psi / (ranks if stage >= 1 else 1),
    }


# -- what is printed ---------------------------------------------------------------------------------------------------


def show(console: Console, results: dict[int, Result], psi: int) -> None:
    ranks = dist.get_world_size()
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("", style="bold")
    for stage, sharded in STAGES.items():
        table.add_column(f"stage {stage}\n[dim]{sharded}[/dim]", justify="right")

    def row(name: str, cells: list[str], *, dim: bool = False) -> None:
        table.add_row(name, *cells, style="dim" if dim else None)

    def title(text: str) -> None:
        table.add_row(f"[cyan]{text}[/cyan]")

    rows = results.values()
    title("held per rank, MB")
    formulas = {stage: formula_bytes(stage, psi, ranks) for stage in results}
    for name in ("parameters", "gradients", "optimizer"):
        row(f"  {name}", [mb(getattr(r.memory, name).measured) for r in rows])
        row("    by formula", [mb(formulas[stage][name]) for stage in results], dim=True)
    row("  all three", [mb(r.memory.states) for r in rows])
    row("    by formula", [mb(sum(formulas[stage].values())) for stage in results], dim=True)
    row("  communication buffers", [mb(r.memory.communication.measured) for r in rows])
    row("  with communication", [mb(r.memory.states + r.memory.communication.measured) for r in rows])

    table.add_section()
    title("sent per rank, MB a step")
    for purpose in dict.fromkeys(purpose for r in rows for purpose in r.traffic.by_purpose):
        row(f"  {purpose}", [mb(r.traffic.by_purpose.get(purpose, 0)) for r in rows])
    row("  total", [mb(r.traffic.total) for r in rows])
    once = 4 * psi * (ranks - 1) / ranks or math.inf  # (N-1)/N of all parameters
    row("    in Ψ(N-1)/N", [f"{r.traffic.total / once:.2f}" for r in rows])
    row("    by formula", ["2", "2", "2", "at most 3"], dim=True)

    table.add_section()
    row("median step, ms", [f"{1e3 * r.step_s:.0f}" for r in rows])
    console.print(table)
    console.print(NOTES, style="dim")


def mb(bytes_: float) -> str:
    return "·" if bytes_ == 0 else f"{bytes_ / 1e6:.2f}" if bytes_ >= 5e3 else "< 0.01"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT at every ZeRO stage and compare.")
    parser.add_argument("--steps", type=int, default=25, help="steps at each stage, 2 or more (25)")
    parser.add_argument("--layers", type=int, default=8, help="transformer layers (8)")
    parser.add_argument("--dim", type=int, default=128, help="width, a multiple of 32 (128)")
    args = parser.parse_args()
    if args.steps < 2 or args.layers < 1 or args.dim < 32 or args.dim % 32:
        parser.error("--steps is 2 or more, --layers 1 or more, --dim a multiple of 32")

    onefold.init()
    console = Console(quiet=dist.get_rank() > 0, highlight=False)
    ranks, text = dist.get_world_size(), read_text()
    psi = sum(param.numel() for param in GPT(args.layers, args.dim).parameters())
    console.print(
        f"A GPT of {args.layers} layers × {args.dim}, Ψ = {psi:,} parameters, fp32, AdamW, at each stage\n"
        f"on N = {ranks} processes, learning {len(text) / 1e6:.1f} MB of Python's own source code.\n"
    )
    results = train(console, text, args)
    show(console, results, psi)
    found = differences(results)
    dist.destroy_process_group()
    if found:
        raise SystemExit(f"the stages differ: {', '.join(found[:5])}")
    saved = 1 - results[3].memory.states / results[0].memory.states
    console.print(
        f"[bold green]All four stages agree to the last bit[/bold green]: every loss, every parameter.\n"
        f"Stage 3 held {saved:.0%} less training state per rank than stage 0."
    )


if __name__ == "__main__":
    main()
