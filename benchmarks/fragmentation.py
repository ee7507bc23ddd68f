"""Fragmentation with block inputs among short-lived tensors, and with them in an arena (M_D). One GPU, under a minute.

python benchmarks/fragmentation.py               # prints a short table; JSON into $OUT if set

Blocks are computed again in backward, so their inputs live from forward to backward. Sequences change their length from
step to step. When forward ends, everything the allocator can return is returned (empty_cache); what it still holds and
nobody uses is lost: pieces between tensors that are in use. What is lost between states, measured after the first step,
is left out. Then one tensor as large as 90% of what is free under a limit is asked for, as a head or a loss would.
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
from onefold.cost.shapes import Shape
from onefold.train.run.model import GPT

SHAPE = Shape(layers=48, hidden=1024, heads=8, seq=4096, vocab=512)
LENGTHS = [4096, 1536, 3072, 2304, 3840, 1024, 2816, 3328, 1792, 3584, 2560, 4096]
BATCH = 8
ROOM = 4 << 30  # beside what is in use when forward ends
WANTED = 0.9  # of it


def by_torch(model: nn.Module) -> None:
    """Inputs stay where the allocator puts them."""
    for block in model.blocks:

        def again(x: Tensor, forward: Any = block.forward) -> Tensor:
            return checkpoint(forward, x, use_reentrant=False)

        block.forward = again


def run(policy: str) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT(SHAPE)
    if policy == "torch":
        by_torch(model)
    onefold.shard(model, stage=2, precision="bf16", activations="keep" if policy == "torch" else policy)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-4)
    rows, before = [], None
    for length in LENGTHS:
        tokens = torch.randint(0, SHAPE.vocab, (BATCH, length), device="cuda")
        loss = model(tokens, tokens.roll(1, 1))
        if before is not None:
            rows.append(look(length, before))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        before = lost() if before is None else before
    del model, optimizer, loss
    return {"policy": policy, "steps": rows}


def lost() -> int:
    """Bytes that are neither in use nor to be had back."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def look(length: int, before: int) -> dict[str, Any]:
    """Between forward and backward, when most inputs are held."""
    more, used = lost() - before, torch.cuda.memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((used + before + ROOM) / total)
    try:
        torch.empty(int(WANTED * ROOM), dtype=torch.uint8, device="cuda")
        given = True
    except torch.OutOfMemoryError:
        given = False
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()
    return {"length": length, "used_bytes": used, "lost_before_bytes": before, "lost_bytes": more, "given": given}


def main() -> None:
    if not torch.cuda.is_available():
        print("needs a CUDA device")
        return
    onefold.init()
    runs = [run(policy) for policy in ("torch", "checkpoint")]
    if out := os.environ.get("OUT"):
        found = {"torch": torch.__version__, "device": torch.cuda.get_device_name(), "runs": runs}
        (Path(out) / "fragmentation.json").write_text(json.dumps(found, indent=1) + "\n")
    asked = "3.6 of 4 GiB that are free: given"
    print(f"{'block inputs':<30}{'in use':>10}{'lost at most':>14}{'mean':>10}  {asked:>34}")
    for one in runs:
        steps = one["steps"]
        name = "where the allocator put them" if one["policy"] == "torch" else "in an arena"
        more = [step["lost_bytes"] / 1e9 for step in steps]
        given = f"{sum(step['given'] for step in steps)} of {len(steps)} times"
        used = max(step["used_bytes"] for step in steps) / 1e9
        print(f"{name:<30}{used:>7.2f} GB{max(more):>11.2f} GB{sum(more) / len(more):>7.2f} GB  {given:>34}")


if __name__ == "__main__":
    main()
