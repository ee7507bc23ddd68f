"""How long a sequence trains: shapes of Qwen2.5, with a tiled loss, tiled MLPs, and block inputs on the host.

python -m benchmarks.long_context --model 1.5b --tokens 65536 131072   # one GPU: each length, until one does not fit
python -m benchmarks.long_context --model 7b --tokens 131072 --offload host --state 8bit   # optimizer state on the host
torchrun --nproc-per-node 2 -m benchmarks.long_context --sequence 2   # cut over ranks, against the same without
torchrun --nproc-per-node 4 -m benchmarks.long_context --sequence 4 --ring --tokens 8192   # the ring alone
python -m benchmarks.long_context --model tiny --tokens 512   # a small size, to see that it runs

For each length: three steps, seconds and losses of each, tokens per second of the last, peak of device memory, host
memory of block inputs, and bytes sent for attention. With --ring: of causal attention alone, by the ring, forward and
backward, the seconds that each rank computes on one thread, of the slowest and of the mean. JSON into $OUT if set, else
on the screen.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import onefold
from benchmarks.decoder import SHAPES, Decoder

STEPS, TILE = 3, 4096
RING_HEADS, RING_WIDTH = 3, 64  # of attention that is timed alone


def train(
    name: str, tokens: int, sequence: int, offload: str | None, state: Literal["fp32", "bf16", "8bit"]
) -> dict[str, Any]:
    """Three steps of one sequence, on a mesh that cuts it over `sequence` ranks."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
    onefold.shard(model, stage=3, mesh=mesh, precision=precision, activations="checkpoint+host", offload=offload)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-5, state=state)
    ids = torch.randint(sizes.vocab, (1, tokens), generator=torch.Generator().manual_seed(1))
    seconds, losses = list[float](), list[float]()
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
        seconds.append(time.perf_counter() - began)
        losses.append(loss.item())
    streams = dist.get_world_size() // sequence
    found = {
        "model": name, "tokens": tokens, "sequence": sequence, "ranks": dist.get_world_size(),
        "offload": offload, "state": state, "steps_s": seconds, "tokens_per_s": tokens * streams / seconds[-1],
        "losses": losses, "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "host_bytes": onefold.memory(model).checkpoints_host.measured,
        "sequence_sent_bytes": onefold.traffic(model).by_purpose.get("sequence", 0),
    }  # fmt: skip
    del model, optimizer, loss, mine
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return found


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each length; where ranks cut sequences, without the axis and with it."""
    found = list[dict[str, Any]]()
    for tokens in options.tokens:
        for sequence in sorted({1, options.sequence}):
            try:
                found.append(train(options.model, tokens, sequence, options.offload, options.state))
            except torch.cuda.OutOfMemoryError as error:
                if dist.get_world_size() > 1:
                    raise  # the other ranks wait for this one
                found.append({"model": options.model, "tokens": tokens, "ended": str(error).splitlines()[0]})
                return found
            write(found, options.model, options.sequence)  # finished rows stay if the run is killed
    return found


def write(found: list[dict[str, Any]], name: str, sequence: int) -> None:
    """Into $OUT, from rank 0."""
    if dist.get_rank() == 0 and (out := os.environ.get("OUT")):
        text = json.dumps(found, indent=1)
        (Path(out) / f"long_context-{name}-{sequence}.json").write_text(text + "\n")


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
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768], help="lengths, the shortest first")
    parser.add_argument(
        "--offload", choices=("host", "auto"), help="optimizer state on the host: all, or what does not fit"
    )
    parser.add_argument("--state", choices=("fp32", "bf16", "8bit"), default="fp32", help="form of the optimizer state")
    parser.add_argument("--sequence", type=int, default=1, help="ranks over which each sequence is cut")
    parser.add_argument("--ring", action="store_true", help="time attention by the ring alone")
    options = parser.parse_args()
    onefold.init()
    if options.ring:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        found, name = ring(options.tokens[0], options.sequence, device), "ring"
    else:
        found, name = rows(options), options.model
    write(found, name, options.sequence)
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=1))
    onefold.shutdown()


if __name__ == "__main__":
    main()
