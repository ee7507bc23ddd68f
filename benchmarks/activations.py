"""Block inputs on the host against block inputs on the device, on one GPU, where they dominate: memory and step time.

python benchmarks/activations.py                 # both parts, two to three minutes on an H200; JSON into $OUT if set
python benchmarks/activations.py --quick         # a small size, to see that it runs

1 One process: "checkpoint" against "checkpoint+host". 2 Two processes that share the GPU and run the same batch, as the
ranks of a tensor-parallel group do: "checkpoint", "partition" and "partition+host". Gathers of the second part go
through gloo and host memory, so its times say nothing about NVLink; its bytes are those of any two ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold.cost.shapes import Shape
from onefold.train.run.model import GPT

ALONE = (Shape(layers=48, hidden=2048, heads=16, seq=1024, vocab=8192), 128)  # 2.4B parameters, 131072 tokens
SHARED = (Shape(layers=32, hidden=1024, heads=8, seq=1024, vocab=4096), 64)
QUICK = (Shape(layers=4, hidden=128, heads=4, seq=64, vocab=256), 4)
GB = 1e9


def measure(shape: Shape, batch: int, policy: str, steps: int, mesh: Any = None) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = GPT(shape)
        tokens = torch.randint(0, shape.vocab, (batch, shape.seq))
    onefold.shard(model, stage=2, precision="bf16" if device.type == "cuda" else "fp32", activations=policy, mesh=mesh)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-4)
    times, loss = [], torch.zeros(())
    for step in range(steps + 2):  # the first ones size the arena and warm up
        if step == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        wait(device)
        began = time.perf_counter()
        loss = model(tokens, tokens.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait(device)
        times.append(time.perf_counter() - began)
    now, cuda = onefold.memory(model), device.type == "cuda"
    found = {
        "policy": policy,
        "step_s": statistics.median(times[2:]),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
        "checkpoints_bytes": now.checkpoints.measured,
        "checkpoints_host_bytes": now.checkpoints_host.measured,
        "activation_sent_bytes": onefold.traffic(model).by_purpose.get("activation", 0),
        "loss": loss.item(),
    }
    del model, optimizer, loss, tokens
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return found


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def alone(quick: bool) -> list[dict[str, Any]]:
    onefold.init()
    shape, batch = QUICK if quick else ALONE
    return [measure(shape, batch, policy, 3) for policy in ("checkpoint", "checkpoint+host")]


def two_ranks(quick: bool) -> None:
    """In a rank of two that share the GPU; the first one writes what it found."""
    dist.init_process_group("gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tp"))
    shape, batch = QUICK if quick else SHARED
    rows = [measure(shape, batch, policy, 3, mesh) for policy in ("checkpoint", "partition", "partition+host")]
    if dist.get_rank() == 0:
        Path(os.environ["FOUND"]).write_text(json.dumps(rows))
    dist.barrier()


def shared(quick: bool) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command = [*torchrun, __file__, "--rank", *(["--quick"] if quick else [])]
        subprocess.run(command, check=True, env={**os.environ, "FOUND": str(file), "OMP_NUM_THREADS": "4"})
        rows: list[dict[str, Any]] = json.loads(file.read_text())
        return rows


def show(title: str, rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    print(f"{title:<44}{'step':>9}{'cost':>8}{'peak':>10}{'saved':>10}{'inputs':>10}{'on host':>10}{'loss':>11}")
    for row in rows:
        cost = f"{row['step_s'] / first['step_s'] - 1:+.1%}"
        sizes = [row["peak_bytes"], first["peak_bytes"] - row["peak_bytes"], row["checkpoints_bytes"]]
        cells = "".join(f"{size / GB:>7.2f} GB" for size in [*sizes, row["checkpoints_host_bytes"]])
        print(f"  {row['policy']:<42}{row['step_s']:>7.3f} s{cost:>8}{cells}{row['loss']:>11.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        two_ranks(asked.quick)
        return
    found: dict[str, Any] = {"torch": torch.__version__, "device": "cpu", "quick": asked.quick}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    parts = (("one", "one process", alone, ALONE), ("two", "two processes on one GPU, rank 0", shared, SHARED))
    for name, _, run, (shape, batch) in parts:
        found[name] = {"shape": str(shape), "batch": batch}
        try:
            found[name]["rows"] = run(asked.quick)
        except Exception as error:  # the other part is worth having all the same
            found[name]["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    if out := os.environ.get("OUT"):
        (Path(out) / "activations.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, title, *_ in parts:
        if "rows" in found[name]:
            show(title, found[name]["rows"])
        else:
            print(f"{title}: {found[name]['error']}")


if __name__ == "__main__":
    main()
