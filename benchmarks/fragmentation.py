"""Fragmentation with block inputs among short-lived tensors, and with them in an arena (M_D). One GPU, a minute.

python benchmarks/fragmentation.py               # prints a short table; JSON into $OUT if set

A model of blocks whose inputs live from forward to backward, while sequences change their length from step to step. The
allocator cuts its memory for one length and then cannot use the pieces for the next. Both runs compute the same; one
keeps inputs where the allocator put them (torch's checkpoint), the other in an arena. First each takes what it likes:
what was reserved beyond what was ever in use is lost to fragments. Then each gets little more than it uses.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onefold
from onefold.planner.shapes import Shape
from onefold.train.model import GPT

SHAPE = Shape(layers=48, hidden=1024, heads=8, seq=4096, vocab=512)
LENGTHS = [4096, 1536, 3072, 2304, 3840, 1024, 2816, 3328, 1792, 3584, 2560, 4096]
BATCH = 8


def by_torch(model: nn.Module) -> None:
    """Inputs stay where they are."""
    for block in model.blocks:

        def again(x: Tensor, forward: Any = block.forward) -> Tensor:
            return checkpoint(forward, x, use_reentrant=False)

        block.forward = again


def run(policy: str, limit_bytes: int | None = None) -> dict[str, Any]:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit_bytes is None else limit_bytes / total)
    torch.cuda.reset_peak_memory_stats()
    found: dict[str, Any] = {"policy": policy, "limit_bytes": limit_bytes}
    before = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    try:
        found["loss"] = train(policy)
    except torch.OutOfMemoryError:
        found["loss"] = None
    stats = torch.cuda.memory_stats()
    found["used_bytes"] = stats["allocated_bytes.all.peak"]
    found["reserved_bytes"] = stats["reserved_bytes.all.peak"]
    found["retries"] = stats["num_alloc_retries"] - before
    gc.collect()
    torch.cuda.empty_cache()
    return found


def train(policy: str) -> float:
    torch.manual_seed(0)
    device = torch.device("cuda")
    with device:
        model = GPT(SHAPE)
    if policy == "torch":
        by_torch(model)
    onefold.shard(model, stage=2, precision="bf16", activations="keep" if policy == "torch" else policy)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-4)
    for length in LENGTHS:
        tokens = torch.randint(0, SHAPE.vocab, (BATCH, length), device=device)
        loss = model(tokens, tokens.roll(1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def main() -> None:
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return
    onefold.init()
    policies = ("torch", "checkpoint")
    rows = [run(policy) for policy in policies]
    rows += [run(row["policy"], int(1.04 * row["used_bytes"])) for row in rows]
    if out := os.environ.get("OUT"):
        (Path(out) / "fragmentation.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{'block inputs':<30}{'limit':>10}{'used':>10}{'reserved':>10}{'lost':>8}{'retries':>9}{'loss':>15}")
    for row in rows:
        name = "where the allocator put them" if row["policy"] == "torch" else "in an arena"
        limit = f"{row['limit_bytes'] / 1e9:>7.2f} GB" if row["limit_bytes"] else f"{'none':>10}"
        sizes = "".join(f"{row[key] / 1e9:>7.2f} GB" for key in ("used_bytes", "reserved_bytes"))
        lost = f"{row['reserved_bytes'] / row['used_bytes'] - 1:>8.1%}"
        loss = "out of memory" if row["loss"] is None else f"{row['loss']:.6f}"
        print(f"{name:<30}{limit}{sizes}{lost}{row['retries']:>9}{loss:>15}")


if __name__ == "__main__":
    main()
