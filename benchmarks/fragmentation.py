"""Fragmentation with block inputs among short-lived tensors, and with them in an arena (M_D). One GPU, half a minute.

python benchmarks/fragmentation.py               # prints a short table; JSON into $OUT if set

A model of blocks whose inputs live from forward to backward, while sequences change their length from step to step. The
allocator cuts its memory for one length and then cannot use the pieces for the next. Both runs compute the same; one
keeps inputs where the allocator put them (torch's checkpoint), the other in an arena.
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


def run(policy: str) -> dict[str, Any]:
    torch.manual_seed(0)
    device = torch.device("cuda")
    with device:
        model = GPT(SHAPE)
    if policy == "torch":
        by_torch(model)
    onefold.shard(model, stage=2, precision="bf16", activations="keep" if policy == "torch" else policy)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-4)
    worst = 0
    for length in LENGTHS:
        tokens = torch.randint(0, SHAPE.vocab, (BATCH, length), device=device)
        loss = model(tokens, tokens)
        worst = max(worst, onefold.memory(model).fragmented or 0)  # the moment when all inputs are there
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = torch.cuda.memory_stats()
    found = {
        "policy": policy,
        "peak_bytes": stats["allocated_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"],
        "fragmented_bytes": worst,
        "inactive_split_bytes": stats["inactive_split_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "loss": loss.item(),
    }
    del model, optimizer, loss, tokens
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return found


def main() -> None:
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return
    onefold.init()
    rows = [run(policy) for policy in ("torch", "checkpoint")]
    if out := os.environ.get("OUT"):
        (Path(out) / "fragmentation.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{'block inputs':<28}{'used':>10}{'reserved':>10}{'unused':>10}{'of it':>8}{'split':>10}{'loss':>11}")
    for row in rows:
        name = "where the allocator put them" if row["policy"] == "torch" else "in an arena"
        sizes = [row[key] for key in ("peak_bytes", "reserved_bytes", "fragmented_bytes")]
        cells = "".join(f"{size / 1e9:>7.2f} GB" for size in sizes)
        share = f"{row['fragmented_bytes'] / row['reserved_bytes']:>8.1%}"
        print(f"{name:<28}{cells}{share}{row['inactive_split_bytes'] / 1e9:>7.2f} GB{row['loss']:>11.6f}")


if __name__ == "__main__":
    main()
