"""How fast checkpoints are written, beside `dd` on the same disk, and how long a background save stalls training.

    python benchmarks/checkpoint.py [--gigabytes 1.0] [--ranks 1] [--rounds 5] [--folder DIR] [--json]

Each round runs dd, a save that waits and one in the background, one after the other, so that all see the same disk. The
first round is not counted: it pays for fresh memory.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import onefold


def dd_s(folder: Path, size: int) -> float:
    """What the disk takes for as many bytes, flushed."""
    path = folder / "dd"
    started = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=16M", f"count={-(-size // (16 << 20))}", "conv=fsync"]
    subprocess.run(command, check=True, capture_output=True)
    taken = time.perf_counter() - started
    path.unlink()
    return taken


def build(gigabytes: float) -> tuple[nn.Module, onefold.Optimizer]:
    """AdamW keeps two fp32 numbers beside each parameter: 12 bytes."""
    width = 2048
    layers = max(1, round(gigabytes * 1e9 / 12 / width**2))
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    onefold.shard(model, stage=2)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    optimizer.backward(model(torch.randn(1, width)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def bench(gigabytes: float, rounds: int, folder: Path) -> dict[str, float]:
    onefold.init()
    model, optimizer = build(gigabytes)
    size = sum(12 * p.numel() for p in model.parameters())
    times: dict[str, list[float]] = {"dd_s": [], "save_s": [], "stall_s": [], "background_s": []}
    step = 0
    for _ in range(rounds + 1):
        if dist.get_rank() == 0:
            times["dd_s"].append(dd_s(folder, size))
        dist.barrier()
        for kind in ("save_s", "stall_s"):
            step += 1
            started = time.perf_counter()
            path = onefold.save(folder / "run", model, optimizer, step=step, wait=kind == "save_s")
            times[kind].append(time.perf_counter() - started)
            onefold.finish_saves()
            if kind == "stall_s":
                times["background_s"].append(time.perf_counter() - started)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path)
            os.sync()
    found = {name: statistics.median(values[1:]) for name, values in times.items() if values}
    return {"gigabytes": size / 1e9, "ranks": dist.get_world_size(), "rounds": rounds, **found}


def report(found: dict[str, float]) -> dict[str, float]:
    size = found["gigabytes"]
    found["save / dd"] = found["dd_s"] / found["save_s"]
    found["stall / save"] = found["stall_s"] / found["save_s"]
    print(f"{size:.2f} GB of state, {found['ranks']} ranks, median of {found['rounds']} rounds")
    for name, what in (("dd_s", "dd conv=fsync"), ("save_s", "save"), ("background_s", "save in the background")):
        print(f"  {what:<24}{found[name]:7.2f} s {size / found[name]:7.2f} GB/s")
    print(f"  {'stall of training':<24}{found['stall_s']:7.2f} s")
    for name, wanted, sign in (("save / dd", 0.70, "at least"), ("stall / save", 0.15, "at most")):
        print(f"  {name:<24}{found[name]:7.0%}   wanted: {sign} {wanted:.0%}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if asked.ranks > 1 and "RANK" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={asked.ranks}"]
        sys.exit(subprocess.run([*torchrun, *sys.argv]).returncode)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        shared: list[str] = [folder]
        onefold.init()
        dist.broadcast_object_list(shared, 0)
        found = bench(asked.gigabytes, asked.rounds, Path(shared[0]))
        if dist.get_rank() == 0:
            report(found)
            if asked.json:
                print(json.dumps(found))
        dist.barrier()


if __name__ == "__main__":
    main()
