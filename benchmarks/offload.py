"""Training with the optimizer on the host, on one GPU, against FSDP2's CPUOffload on the same work.

python benchmarks/offload.py                          # 2.78B: ours, ours with clipping, FSDP2; each in its own process
python benchmarks/offload.py --layers 32 --hidden 4096
python benchmarks/offload.py --only onefold --layers 48 --hidden 5120 --optimizer auto   # how large a model trains
python benchmarks/offload.py --quick                  # tiny, on any machine, to see that it runs

Systems run one after the other, `--rounds` times around, so that what the machine does meanwhile hits all alike; each
says its median step of those after the first three. Blocks are computed again in backward. JSON into $OUT if set.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpt import GPT, Block

SYSTEMS = ("onefold", "onefold+clip", "fsdp2")
ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
WARM_UP = 3
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=50304)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--optimizer", default="host", help="host, disk or auto")
    parser.add_argument("--parameters", default=None, help="host or disk")
    parser.add_argument("--path", default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--system", default=None, help=argparse.SUPPRESS)
    found = parser.parse_args()
    if found.quick:
        found.layers, found.hidden, found.batch, found.seq, found.vocab, found.steps = 2, 64, 1, 16, 64, 5
    return found


def built(wanted: argparse.Namespace) -> nn.Module:
    with torch.device("meta"):
        heads = max(1, wanted.hidden // 64)
        return GPT(vocab=wanted.vocab, dim=wanted.hidden, layers=wanted.layers, heads=heads, context=wanted.seq)


def onefold_step(wanted: argparse.Namespace, clip: bool) -> tuple[Any, Any]:
    import onefold

    onefold.init()
    offload = onefold.Offload(optimizer=wanted.optimizer, parameters=wanted.parameters, path=wanted.path)
    model = onefold.shard(
        built(wanted), stage=3, precision="bf16", offload=offload, activations="checkpoint", units=Block,
        device=str(DEVICE), init=fill,
    )  # fmt: skip
    adam = onefold.Optimizer(model, torch.optim.AdamW, step_in_backward=not clip, **ADAM)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        if clip:
            adam.clip_grad_norm(1.0)
        adam.step()
        adam.zero_grad()
        return loss

    return step, lambda: str(onefold.memory(model))


def fsdp2_step(wanted: argparse.Namespace) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.utils.checkpoint import checkpoint

    backend = "cpu:gloo,cuda:nccl" if CUDA else "gloo"
    dist.init_process_group(backend, init_method="tcp://127.0.0.1:29571", rank=0, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fields = {"mesh": init_device_mesh(DEVICE.type, (1,)), "mp_policy": policy}
    if CUDA:
        fields["offload_policy"] = CPUOffloadPolicy()
    model = built(wanted)
    for block in model.layers:
        plain = block.forward
        block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
        fully_shard(block, **fields)
    fully_shard(model, **fields)
    model.to_empty(device="cpu")
    for module in model.modules():
        fill(module)
    adam = torch.optim.AdamW(model.parameters(), fused=True, **ADAM)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        adam.step()
        adam.zero_grad()
        return loss

    return step, lambda: ""


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Values of its own parameters: the same kind for every system."""
    for name, param in module.named_parameters(recurse=False):
        local = param.to_local() if hasattr(param, "to_local") else param
        if param.ndim > 1:
            local.normal_(std=0.02)
        else:
            local.fill_(1.0 if isinstance(module, nn.LayerNorm) and name == "weight" else 0.0)


def run_one(wanted: argparse.Namespace) -> None:
    began_s = time.perf_counter()
    torch.manual_seed(0)
    make = {
        "onefold": lambda: onefold_step(wanted, clip=False),
        "onefold+clip": lambda: onefold_step(wanted, clip=True),
        "fsdp2": lambda: fsdp2_step(wanted),
    }[wanted.system]
    step, memory = make()
    built_s = time.perf_counter() - began_s
    tokens = torch.randint(0, wanted.vocab, (wanted.batch, wanted.seq + 1), device=DEVICE)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for _ in range(wanted.steps):
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step(tokens).item())
        if CUDA:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    count = 12 * wanted.layers * wanted.hidden**2 + wanted.hidden * (2 * wanted.vocab + wanted.seq)
    found = {
        "system": wanted.system,
        "parameters": count,
        "batch": wanted.batch,
        "step_ms": round(1e3 * statistics.median(times[WARM_UP:]), 1),
        "steps_ms": [round(1e3 * s, 1) for s in times],
        "build_s": round(built_s, 1),
        "device_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if CUDA else None,
        "host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "losses": [round(losses[0], 4), round(losses[-1], 4)],
        "memory": memory(),
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # without the minutes that freeing such memory may take


def main() -> None:
    wanted = arguments()
    if wanted.system:
        run_one(wanted)
    rows: dict[str, list[dict[str, Any]]] = {system: [] for system in wanted.only}
    for _ in range(wanted.rounds):
        for system in wanted.only:
            command = [sys.executable, "-m", "benchmarks.offload", "--system", system, *sys.argv[1:]]
            done = subprocess.run(command, capture_output=True, text=True)
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if not lines:
                print(f"{system}: ended with {done.returncode}\n{done.stderr[-3000:]}", flush=True)
                continue
            rows[system].append(json.loads(lines[-1]))
            print({k: v for k, v in rows[system][-1].items() if k != "memory"}, flush=True)
    medians = {name: statistics.median(row["step_ms"] for row in found) for name, found in rows.items() if found}
    for name, median in medians.items():
        beside = f", {median / medians['fsdp2']:.2f} of FSDP2" if "fsdp2" in medians else ""
        print(f"{name}: {median:.0f} ms{beside}", flush=True)
    if out := os.environ.get("OUT"):
        Path(out, f"offload-{wanted.layers}x{wanted.hidden}.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
