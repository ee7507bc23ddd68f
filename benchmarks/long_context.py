"""How long a sequence trains: shapes of Qwen2.5, with a tiled loss, tiled MLPs, and block inputs on the host.

python -m benchmarks.long_context --model 1.5b                # one GPU: doubles the sequence until it does not fit
torchrun --nproc-per-node 2 -m benchmarks.long_context --sequence 2   # cut over ranks, against the same without
torchrun --nproc-per-node 4 -m benchmarks.long_context --sequence 4 --ring --tokens 8192   # the ring alone
python -m benchmarks.long_context --model tiny --tokens 512   # a small size, to see that it runs

For each length: three steps, seconds and tokens per second of the last, peak of device memory, host memory of block
inputs, bytes sent for attention, and the loss. With --ring: of causal attention alone, by the ring, forward and
backward, the seconds that each rank computes on one thread, of the slowest and of the mean. JSON into $OUT if set, else
on the screen.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onefold
from benchmarks.decoder import SHAPES, Decoder

STEPS, TILE = 3, 4096
RING_HEADS, RING_WIDTH = 3, 64  # of attention that is timed alone


def train(name: str, tokens: int, sequence: int, device: torch.device) -> dict[str, Any]:
    """Three steps of one sequence, on a mesh that cuts it over `sequence` ranks."""
    mesh, cuda, sizes = onefold.mesh(shard=-1, sequence=sequence), device.type == "cuda", SHAPES[name]
    balanced = sizes.heads % sequence != 0  # by the ring
    torch.manual_seed(0)
    with device:
        model = Decoder(sizes, mesh, TILE, balanced=balanced)
    for param in model.parameters():
        if param.ndim > 1:
            torch.nn.init.normal_(param, std=0.02)
    for block in model.layers:
        onefold.tiled(block.mlp, tokens=TILE)
    precision = "bf16" if cuda else "fp32"
    onefold.shard(model, stage=3, mesh=mesh, precision=precision, activations="checkpoint+host")
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-5)
    ids = torch.randint(sizes.vocab, (1, tokens), generator=torch.Generator().manual_seed(1))
    seconds, loss = 0.0, torch.zeros(())
    for _ in range(STEPS):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
        began = time.perf_counter()
        cut = onefold.cut_sequence({"input_ids": ids, "labels": ids}, mesh, balanced=balanced)
        mine = {key: value.to(device) for key, value in cut.items()}
        loss = onefold.token_mean(model(**mine), (mine["shift_labels"] != -100).sum(), mesh)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    streams = dist.get_world_size() // sequence
    found = {
        "model": name, "tokens": tokens, "sequence": sequence, "ranks": dist.get_world_size(), "step_s": seconds,
        "tokens_per_s": tokens * streams / seconds, "loss": loss.item(),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "host_bytes": onefold.memory(model).checkpoints_host.measured,
        "sequence_sent_bytes": onefold.traffic(model).by_purpose.get("sequence", 0),
    }  # fmt: skip
    del model, optimizer, loss
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return found


def rows(name: str, tokens: int, longest: int, sequence: int, device: torch.device) -> list[dict[str, Any]]:
    if sequence > 1:  # the same length without the axis, and with it
        return [train(name, tokens, size, device) for size in (1, sequence)]
    found = list[dict[str, Any]]()
    while tokens <= longest:
        try:
            found.append(train(name, tokens, 1, device))
        except torch.cuda.OutOfMemoryError as error:
            found.append({"model": name, "tokens": tokens, "ended": str(error).splitlines()[0]})
            break
        finally:
            print(json.dumps(found[-1:]), file=sys.stderr, flush=True)  # of a run that is cut off these are left
        tokens *= 2
    return found


def ring(tokens: int, sequence: int, device: torch.device) -> list[dict[str, Any]]:
    """Causal attention by the ring over neighbouring and over balanced stretches: seconds that ranks compute. On a CPU
    they are the main thread's own, so ranks may share cores."""
    mesh, found = onefold.mesh(shard=-1, sequence=sequence), list[dict[str, Any]]()
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, 1, RING_HEADS, tokens // sequence, RING_WIDTH, device=device).unbind()
    for balanced in (False, True):
        best = float("inf")
        for _ in range(STEPS):
            dist.barrier()
            if device.type == "cuda":
                torch.cuda.synchronize()
            began, clock = time.thread_time(), time.perf_counter()
            mine = [one.detach().requires_grad_() for one in (q, k, v)]
            onefold.sequence_attention(*mine, mesh, method="ring", balanced=balanced).sum().backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            took = time.perf_counter() - clock if device.type == "cuda" else time.thread_time() - began
            best = min(best, took)
        seconds: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(seconds, best)
        found.append(
            {
                "tokens": tokens, "sequence": sequence, "balanced": balanced, "slowest_s": max(seconds),
                "mean_s": sum(seconds) / len(seconds), "imbalance": max(seconds) * len(seconds) / sum(seconds),
                "by_rank_s": seconds,
            }
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, default=32768, help="the first length")
    parser.add_argument("--longest", type=int, help="the last length; the first doubled until memory is full")
    parser.add_argument("--sequence", type=int, default=1, help="ranks over which each sequence is cut")
    parser.add_argument("--ring", action="store_true", help="time attention by the ring alone")
    options = parser.parse_args()
    onefold.init()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    longest = options.longest or (options.tokens if options.model == "tiny" else 1 << 22)
    if options.ring:
        found, name = ring(options.tokens, options.sequence, device), "ring"
    else:
        found, name = rows(options.model, options.tokens, longest, options.sequence, device), options.model
    if dist.get_rank() == 0:
        text = json.dumps(found, indent=1)
        out = os.environ.get("OUT")
        if out:
            (Path(out) / f"long_context-{name}-{options.sequence}.json").write_text(text + "\n")
        print(text)
    onefold.shutdown()


if __name__ == "__main__":
    main()
