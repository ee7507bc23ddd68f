"""One AdamW update of 16-bit parameters on a CPU: our kernel against torch's classes with casts around them.

All have bf16 gradients and a bf16 copy, and an fp32 master or its split form; moments are fp32, or in the kernel's
smaller forms. They take turns, so that drift of the machine hits all alike; the order rotates. Medians, and ratios to
the kernel in the same round. With one thread its CPU time counts, which means something on a busy machine too; with
more, what a clock shows.

    python benchmarks/cpu_update.py
    python benchmarks/cpu_update.py --numel 268435456 --threads 16 --rounds 7
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from onefold.optim.kernels.cpu import fits, update, update_small
from onefold.optim.kernels.rule import next_step
from onefold.optim.kernels.small import next_small_step
from onefold.optim.kernels.threads import threads_here
from onefold.state.rounding import join, narrow, split

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8}
MOVED_BYTES = {  # per parameter
    "kernel, split master": 26,
    "kernel, fp32 master": 28,
    "kernel, split, bf16 state": 18,
    "kernel, split, 8-bit state": 14,
    "copy of fp32": 8,
}
Step = Callable[[], object]


def kernel(values: Tensor, grad: Tensor, copy: Tensor, master: Tensor, threads: int) -> Step:
    assert fits(torch.optim.AdamW, ADAMW, values.device), "the kernel could not be compiled; the log says why"
    state: dict[str, Any] = {}

    def step() -> None:
        update(next_step(torch.optim.AdamW, ADAMW, state, grad.numel(), grad.device), grad, copy, master, 1.0, threads)

    return step


def small_kernel(form: str, grad: Tensor, copy: Tensor, master: Tensor, threads: int) -> Step:
    state: dict[str, Any] = {}

    def step() -> None:
        small = next_small_step(torch.optim.AdamW, ADAMW, state, grad.numel(), grad.device, form)
        update_small(small, grad, copy, master, 1.0, threads, edits=False)

    return step


def by_torch(master: Tensor, grad: Tensor, after: Step, before: Step = lambda: None, **mode: bool) -> Step:
    """Widen the gradient, step, round the master."""
    wide, param = torch.empty_like(master), nn.Parameter(master)
    optimizer = torch.optim.AdamW([param], **ADAMW, **mode)
    param.grad = wide

    def step() -> None:
        before()
        wide.copy_(grad)
        optimizer.step()
        with torch.no_grad():
            after()

    return step


def contenders(numel: int, threads: int) -> dict[str, Step]:
    torch.manual_seed(0)
    values, grad = torch.randn(numel) * 0.02, (torch.randn(numel) * 1e-3).bfloat16()
    rest, copy, target = torch.empty(numel, dtype=torch.int16), values.bfloat16(), torch.empty_like(values)
    split(values, copy, rest)
    own = [values.clone() for _ in range(5)]
    copies = [torch.empty_like(copy) for _ in range(6)]
    rests = [rest.clone() for _ in range(2)]
    for one in copies[4:]:
        one.copy_(copy)
    return {
        "kernel, split master": kernel(values, grad, copy, rest, threads),
        "kernel, fp32 master": kernel(values, grad, copies[0], own[0], threads),
        "kernel, split, bf16 state": small_kernel("bf16", grad, copies[4], rests[0], threads),
        "kernel, split, 8-bit state": small_kernel("8bit", grad, copies[5], rests[1], threads),
        "torch fused, casts": by_torch(own[1], grad, lambda: copies[1].copy_(own[1]), fused=True),
        "torch foreach, casts": by_torch(own[2], grad, lambda: copies[2].copy_(own[2]), foreach=True),
        "torch fused, our rounding": by_torch(own[3], grad, lambda: narrow(own[3], copies[3]), fused=True),
        "torch fused, split master": by_torch(
            own[4], grad, lambda: split(own[4], copy, rest), lambda: join(copy, rest, own[4].detach()), fused=True
        ),
        "copy of fp32": lambda: target.copy_(values),
    }


def measure(numel: int, threads: int, rounds: int) -> dict[str, list[float]]:
    torch.set_num_threads(threads)
    clock = time.thread_time if threads == 1 else time.perf_counter
    systems = contenders(numel, threads)
    times: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(rounds + 1):  # the first warms up: state is made, pages are touched
        names = list(systems)[turn % len(systems) :] + list(systems)[: turn % len(systems)]
        for name in names:
            began = clock()
            systems[name]()
            if turn:
                times[name].append(clock() - began)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--numel", type=int, default=1 << 25)
    parser.add_argument("--threads", type=int, default=threads_here())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    times = measure(args.numel, args.threads, args.rounds)
    reference = times["kernel, split master"]
    rows = {}
    for name, seconds in times.items():
        speed = args.numel / statistics.median(seconds) / 1e9
        rows[name] = {
            "gparam_per_s": speed,
            "best_gparam_per_s": args.numel / min(seconds) / 1e9,
            "times_the_kernel": statistics.median(a / b for a, b in zip(seconds, reference, strict=True)),
            "gb_per_s": MOVED_BYTES[name] * speed if name in MOVED_BYTES else None,
        }
    if args.json:
        print(json.dumps({"numel": args.numel, "threads": args.threads, "rows": rows}, indent=1))
        return
    print(f"{args.numel:,} parameters, {args.threads} threads, medians of {args.rounds}")
    print(f"{'':<28}{'Gparam/s':>10}{'best':>10}{'time':>10}{'GB/s':>8}")
    for name, row in rows.items():
        speed = f"{row['gb_per_s']:8.1f}" if row["gb_per_s"] else ""
        columns = f"{row['gparam_per_s']:10.3f}{row['best_gparam_per_s']:10.3f}{row['times_the_kernel']:9.2f}×"
        print(f"{name:<28}{columns}{speed}")


if __name__ == "__main__":
    main()
