"""DDP, FSDP2 and DeepSpeed 3 against our stages on two local gloo ranks, one thread each: medians of interleaved steps.

Every system trains its own copy of the same model on the same batches in the same two processes. Systems take turns
step by step (A B C D, A B C D, …), so drift of the machine hits all alike; the order rotates every round.

    python benchmarks/cpu_ddp.py --batch 2 --seq 128          # compute-heavy
    python benchmarks/cpu_ddp.py --batch 1 --seq 32           # communication-heavy
    python benchmarks/cpu_ddp.py                              # both
    python benchmarks/cpu_ddp.py --systems fsdp2 stage3 deepspeed3      # needs the extra onefold[peers]
    python benchmarks/cpu_ddp.py --systems stage3 --batch 2   # one alone: its peak resident memory means something
"""

import argparse
import json
import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from gpt import GPT

import onefold

VOCAB = 8192
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
Step = Callable[[torch.Tensor], float]
Update = Callable[[torch.Tensor], None]
Build = Callable[[nn.Module], tuple[nn.Module, Update]]


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Update]:
    """The loop every PyTorch user writes."""

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, update


def ddp(model: nn.Module) -> tuple[nn.Module, Update]:
    wrapped = nn.parallel.DistributedDataParallel(model)
    return plain(wrapped, torch.optim.AdamW(wrapped.parameters(), **ADAMW))


def ours(stage: int, **fields: Any) -> Build:
    def build(model: nn.Module) -> tuple[nn.Module, Update]:
        sharded = onefold.shard(model, stage=stage, **fields)
        return plain(sharded, onefold.Optimizer(sharded, torch.optim.AdamW, **ADAMW))

    return build


def fsdp2(model: nn.Module) -> tuple[nn.Module, Update]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return plain(model, torch.optim.AdamW(model.parameters(), **ADAMW))


def deepspeed3(model: nn.Module) -> tuple[nn.Module, Update]:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": 3, "overlap_comm": True},
    }
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def update(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return engine, update


STAGES = {f"stage{stage}": ours(stage) for stage in range(4)}
AHEAD = {f"stage3-prefetch-{ahead}": ours(3, prefetch=ahead) for ahead in (0, 2, "auto")}
SYSTEMS = {"ddp": ddp, "fsdp2": fsdp2, **STAGES, **AHEAD, "deepspeed3": deepspeed3}


def stepper(build: Build, args: argparse.Namespace) -> Step:
    torch.manual_seed(0)
    model, update = build(GPT(vocab=VOCAB, dim=args.dim, layers=args.layers, heads=8, context=args.seq))

    def step(batch: torch.Tensor) -> float:
        loss = model(batch[:, :-1], batch[:, 1:])
        update(loss)
        return loss.item()

    return step


def work(rank: int, args: argparse.Namespace, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(args.ranks))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_SIZE=str(args.ranks), DS_ACCELERATOR="cpu")  # for DeepSpeed
    torch.set_num_threads(1)
    onefold.init()
    steppers = {name: stepper(SYSTEMS[name], args) for name in args.systems}
    times: dict[str, list[float]] = {name: [] for name in steppers}
    losses: dict[str, list[float]] = {name: [] for name in steppers}
    generator = torch.Generator().manual_seed(100 + rank)
    for round_number in range(args.warmup + args.steps):
        batch = torch.randint(0, VOCAB, (args.batch, args.seq + 1), generator=generator)
        turn = round_number % len(steppers)
        names = list(steppers)
        for name in names[turn:] + names[:turn]:
            dist.barrier()
            start = time.perf_counter()
            losses[name].append(steppers[name](batch))
            dist.barrier()
            if round_number >= args.warmup:
                times[name].append(time.perf_counter() - start)
    for name in losses:
        near = 0.1 if name == "deepspeed3" else 1e-4  # after equal first losses, DeepSpeed drifts
        assert all(abs(a - b) < near for a, b in zip(losses[name], losses[args.systems[0]], strict=True)), name
    if rank == 0:
        report(times, args)
    dist.barrier()
    os._exit(0)  # DDP's teardown is not what is measured


def report(times: dict[str, list[float]], args: argparse.Namespace) -> None:
    base = times[args.systems[0]]
    shape = f"{args.layers}x{args.dim}, batch {args.batch}x{args.seq} per rank"
    print(f"{args.ranks} gloo ranks, one thread each, {shape}, {len(base)} steps")
    for name, seconds in times.items():
        ratio = statistics.median(seconds) / statistics.median(base)
        paired = statistics.median(mine / theirs for mine, theirs in zip(seconds, base, strict=True))
        low, high = statistics.quantiles(seconds, n=4)[::2]
        row = {"median_ms": 1e3 * statistics.median(seconds), "ratio": ratio, "paired_ratio": paired}
        print(
            f"  {name:<22}{row['median_ms']:8.1f} ms  [{1e3 * low:.1f}, {1e3 * high:.1f}]"
            f"  {ratio:.3f} x {args.systems[0]}  (median of paired ratios {paired:.3f})"
        )
        if args.json:
            print(json.dumps({"system": name, "batch": args.batch, "seq": args.seq, **row}))
    print(f"  peak resident memory of rank 0: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:,.0f} MiB")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=["ddp", "fsdp2", *STAGES], choices=list(SYSTEMS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shapes = [(args.batch or 2, args.seq or 128)] if args.batch or args.seq else [(2, 128), (1, 32)]
    for args.batch, args.seq in shapes:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(work, (args, port), args.ranks)


if __name__ == "__main__":
    main()
