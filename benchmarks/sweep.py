"""`bucket_bytes` and `prefetch` against time, bandwidth and memory: where the knee is, and is the default there?

    python benchmarks/sweep.py            # two gloo ranks, one thread each; under six minutes on two idle cores
    python benchmarks/sweep.py --steps 2  # a quick look, into runs/bench
    python benchmarks/sweep.py --gpu      # copies on one GPU, seconds
    python benchmarks/sweep.py --draw     # docs/img/sweep.png from what the two found

1 Alone: one unit of each size is gathered and reduced, again and again: bytes sent over time.
2 In a step: a model of 128 MiB whose every layer has 256 KiB and which has no blocks, so that `bucket_bytes` alone
  decides what a unit is. A model with the setting and one with the default take turns step by step.
3 Results go to benchmarks/results/sweep-*.json, those of fewer steps to runs/bench; what a rank waited for is
  the time inside waits for messages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import onefold
from onefold.comm.communicator import Comm
from onefold.comm.mesh import axes_of
from onefold.comm.meter import Label, Meter
from onefold.train.run.environment import environment

HERE = Path(__file__).parent
RESULTS, PICTURE = HERE / "results", HERE.parent / "docs" / "img" / "sweep.png"
KIB, MIB = 1 << 10, 1 << 20
DEFAULT = onefold.Zero().bucket_bytes
BUCKETS = (256 * KIB, MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB)
AHEAD = (0, 1, 2, 3)
PIECES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB, 256 * MIB)
MOVED = 256 * MIB  # at least, for each size that is measured alone
WIDTH, LAYERS, ROWS = 256, 512, 16
SEED, WARM_UP, STEPS, PATIENCE_S = 0, 1, 5, 300.0
ADAMW = {"lr": 1e-3, "fused": True}


class Stack(nn.Module):
    """Equal layers and no blocks: units are as large as they may be."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x)) / LAYERS
        return x.square().mean()


class Trained:
    """A model with one setting; `step` gives the seconds of a step and those of them spent waiting for messages."""

    def __init__(self, waits: Waits, **fields: Any) -> None:
        torch.manual_seed(SEED)
        self.model = onefold.shard(Stack(), **fields)
        self.optimizer = onefold.Optimizer(self.model, torch.optim.AdamW, **ADAMW)
        self.rows, self.waits = torch.randn(ROWS, WIDTH), waits

    def step(self) -> tuple[float, float]:
        dist.barrier()
        start, self.waits.seconds = time.perf_counter(), 0.0
        self._train()
        waited = self.waits.seconds
        dist.barrier()
        return time.perf_counter() - start, waited

    def _train(self) -> None:
        self.model(self.rows).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def memory(self) -> dict[str, int]:
        """Buffers between steps, and all beyond states at the fullest instant of a step."""
        held = onefold.memory(self.model)
        with onefold.track_memory(self.model) as tracker:
            self._train()
        return {"buffers_bytes": held.communication.measured, "beyond_states_bytes": tracker.peak_bytes - held.states}


class Waits:
    """Seconds inside waits for messages, of all models of this process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        plain = Comm._finish

        def timed(*arguments: Any) -> None:
            start = time.perf_counter()
            plain(*arguments)
            self.seconds += time.perf_counter() - start

        Comm._finish = timed  # type: ignore[method-assign]


# -- two ranks --------------------------------------------------------------------------------------------------------


def alone(rounds: int) -> list[dict[str, Any]]:
    """Units of each size, gathered and reduced with nothing beside it."""
    comm = Comm(axes_of(None).shard, torch.device("cpu"), PATIENCE_S, Meter())
    found = []
    for nbytes in BUCKETS:
        flat = torch.ones(nbytes // 4)
        scratch, out = (
            torch.empty(comm.scratch_numel(flat.numel() // comm.size)),
            torch.empty(flat.numel() // comm.size),
        )
        sent, row = nbytes * (comm.size - 1) // comm.size, {"unit_bytes": nbytes}
        works: dict[str, Callable[[], Any]] = {
            "gather": lambda flat=flat: comm.all_gather(flat, Label("sweep", "gather")).wait(),
            "reduce": lambda flat=flat, scratch=scratch, out=out: comm.reduce_scatter(
                flat, scratch, Label("sweep", "reduce")
            ).finish(out, None),
        }
        for name, work in works.items():
            times = [_of_many(work, max(1, MOVED // nbytes // 4)) for _ in range(rounds + 1)][1:]
            row[f"{name}_bytes_per_s"] = sent / statistics.median(times)
        found.append(row)
    return found


def _of_many(work: Callable[[], Any], count: int) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        work()
    return (time.perf_counter() - start) / count


def beside(waits: Waits, base: Trained, steps: int, **fields: Any) -> dict[str, Any]:
    """One setting beside the default, which is alive all the time; they take turns."""
    tried = Trained(waits, **fields)
    times: dict[int, list[tuple[float, float]]] = {0: [], 1: []}
    for number in range(WARM_UP + steps):
        for who in (0, 1) if number % 2 else (1, 0):
            times[who].append((base, tried)[who].step())
    (ours, _), (theirs, waited) = (zip(*times[who][WARM_UP:], strict=True) for who in (0, 1))
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    sent = onefold.traffic(tried.model).total
    low, high = statistics.quantiles(ratios, n=4, method="inclusive")[::2] if len(ratios) > 1 else ratios * 2
    return {
        "step_s": statistics.median(theirs), "to_default": statistics.median(ratios), "quartiles": [low, high],
        "best_to_default": min(theirs) / min(ours), "steps_s": theirs, "default_steps_s": ours,
        "sent_bytes": sent, "waited_s": statistics.median(waited),
        "sent_per_waited_s": sent / max(statistics.median(waited), 1e-9), **tried.memory(),
    }  # fmt: skip


def work(rank: int, port: int, options: argparse.Namespace) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    onefold.init(timeout_s=PATIENCE_S)
    waits = Waits()
    found: dict[str, Any] = {"alone": alone(min(options.steps, 5)), "buckets": [], "prefetch": []}
    for stage in (2, 3):
        base = Trained(waits, stage=stage)
        for nbytes in BUCKETS:
            row = {"stage": stage, "bucket_bytes": nbytes}
            row |= beside(waits, base, options.steps, stage=stage, bucket_bytes=nbytes)
            found["buckets"].append(row)
            _say(rank, row)
    small = 4 * MIB  # 32 units: something to look ahead to
    base = Trained(waits, stage=3, bucket_bytes=small)
    for units in AHEAD:
        row = {"prefetch": units, "bucket_bytes": small}
        row |= beside(waits, base, options.steps, stage=3, bucket_bytes=small, prefetch=units)
        found["prefetch"].append(row)
        _say(rank, row)
    if rank == 0:
        found["knee_bytes"] = {str(stage): _knee_of(found, stage) for stage in (2, 3)}
        for stage, nbytes in found["knee_bytes"].items():
            print(f"stage {stage}: the knee is at {nbytes / MIB:g} MiB, the default at {DEFAULT / MIB:g} MiB")
        _write("cpu", found, options)
    dist.barrier()


def _say(rank: int, row: dict[str, Any]) -> None:
    if rank == 0:
        what = f"stage {row['stage']}" if "stage" in row else f"prefetch {row['prefetch']}"
        print(
            f"{what:<12}{row['bucket_bytes'] / MIB:>8g} MiB{row['step_s'] * 1e3:>8.0f} ms{row['to_default']:>8.3f}x  "
            f"sent/waited {row['sent_per_waited_s'] / 1e9:>6.2f} GB/s  buffers {row['buffers_bytes'] / 1e6:>6.1f} MB  "
            f"beyond states {row['beyond_states_bytes'] / 1e6:>6.1f} MB",
            flush=True,
        )


# -- one GPU ----------------------------------------------------------------------------------------------------------


def on_gpu(options: argparse.Namespace) -> None:
    """256 MiB in pieces, one copy behind the other on one stream."""
    host = torch.ones(MOVED, dtype=torch.uint8, pin_memory=True)
    here, there = (torch.ones(MOVED, dtype=torch.uint8, device="cuda") for _ in range(2))
    pairs = {"up": (host, here), "down": (here, host), "across": (here, there)}
    rows = []
    for nbytes in PIECES:
        row: dict[str, Any] = {"piece_bytes": nbytes}
        for name, (source, target) in pairs.items():
            pieces = list(zip(target.split(nbytes), source.split(nbytes), strict=True))
            row[f"{name}_bytes_per_s"] = MOVED / min(_copied(pieces) for _ in range(options.steps))
        rows.append(row)
        print(
            "  ".join(f"{key} {value / 1e9:.3g}" for key, value in row.items() if key != "piece_bytes"), nbytes // KIB
        )
    _write("gpu", {"copies": rows}, options)


def _copied(pieces: list[tuple[Tensor, Tensor]]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for target, source in pieces:
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


# -- what was found ---------------------------------------------------------------------------------------------------


def knee(sizes: list[int], costs: list[float], near: float = 0.02) -> int:
    """The smallest size that costs no more than a little above the least."""
    return next(size for size, cost in zip(sizes, costs, strict=True) if cost <= (1 + near) * min(costs))


def _knee_of(found: dict[str, Any], stage: int) -> int:
    rows = [row for row in found["buckets"] if row["stage"] == stage]
    return knee([row["bucket_bytes"] for row in rows], [row["to_default"] for row in rows])


def _write(kind: str, found: dict[str, Any], options: argparse.Namespace) -> None:
    device = torch.device("cuda" if kind == "gpu" else "cpu")
    command = "python benchmarks/sweep.py" + (" --gpu" if kind == "gpu" else "") + f" --steps {options.steps}"
    facts = {"command": command, "cpu": _cpu(), **environment(device), "default_bucket_bytes": DEFAULT}
    usual = RESULTS if options.steps >= STEPS else HERE.parent / "runs" / "bench"  # documents speak of those
    path = (options.out or usual) / f"sweep-{kind}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, **found}, indent=1) + "\n")


def _cpu() -> str:
    said = subprocess.run(["lscpu"], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout
    names = [line.partition(":")[2].strip() for line in said.splitlines() if line.startswith("Model name:")]
    return names[0] if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--out", type=Path, help="a folder for the JSON")
    options = parser.parse_args()
    if options.draw:
        chart = import_module("benchmarks.sweep_chart" if __package__ else "sweep_chart")
        chart.draw(options.out or RESULTS, PICTURE)
    elif options.gpu:
        on_gpu(options)
    else:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(work, (port, options), 2)


if __name__ == "__main__":
    main()
