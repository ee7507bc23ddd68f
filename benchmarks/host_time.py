"""What the host takes for a step: Python, hooks and calls of torch, on a model so small that it hardly computes.

A GPU that is fed too slowly waits for that. A deep and narrow GPT trains as one rank of many whose peers are not there
and whose messages cost nothing. All systems are in one process and take turns, so that drift of the machine hits all
alike; CPU time counts, which means something on a busy machine too. Medians, and what a system takes beyond computing
alone (the floor).

    python -m benchmarks.host_time                          # floor, FSDP2, Onefold at stage 3; rank 0 of 8, fp32
    python -m benchmarks.host_time --precision bf16 --dim 16
    python -m benchmarks.host_time --ranks 1                # nothing to share: no gathers, no messages
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measure import at_least, present
from benchmarks.systems.table import SYSTEMS
from benchmarks.work import Work

WARM_UP = 4  # steps: orders are learnt, buffers are made


def join(ranks: int) -> None:
    """A group of one, or of many that are not there."""
    if ranks == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def measure(work: Work, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every step of each system."""
    steps = {name: SYSTEMS[name].build(work).step for name in names}
    tokens = work.tokens(0, 0)
    for step in steps.values():
        for _ in range(WARM_UP):
            step(tokens)
    gc.collect()
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        at = turn % len(names)
        for name in [*names[at:], *names[:at]]:
            began = time.process_time()
            steps[name](tokens)
            times[name].append(time.process_time() - began)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--systems", nargs="+", default=["floor", "fsdp2", "onefold"], choices=sorted(SYSTEMS))
    parser.add_argument("--ranks", type=at_least(1), default=8)
    parser.add_argument("--layers", type=at_least(1), default=48)
    parser.add_argument("--dim", type=at_least(1), default=64)
    parser.add_argument("--seq", type=at_least(1), default=4)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--rounds", type=at_least(1), default=21)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = present(args.systems, (), base=None).systems
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False  # it prepares each product for longer than this model computes
    join(args.ranks)
    work = Work(
        name="host", layers=args.layers, dim=args.dim, batch=1, seq=args.seq, vocab=64, precision=args.precision,
        device="cpu", rank_of=args.ranks,
    )  # fmt: skip
    times = measure(work, list(dict.fromkeys(["floor", *names])), args.rounds)
    rows = {}
    for name, seconds in times.items():
        beyond = statistics.median(one - floor for one, floor in zip(seconds, times["floor"], strict=True))
        rows[name] = {"median_s": statistics.median(seconds), "best_s": min(seconds), "beyond_floor_s": beyond}
    if args.json:
        print(json.dumps({"torch": torch.__version__, "work": vars(args), "rows": rows}, indent=1))
        return
    print(f"{args.layers} layers x {args.dim}, {args.precision}, rank 0 of {args.ranks}: CPU time of a step")
    for name, row in rows.items():
        columns = f"{1e3 * row['median_s']:9.1f} ms   best {1e3 * row['best_s']:7.1f} ms"
        print(f"{name:<24}{columns}   beyond the floor {1e3 * row['beyond_floor_s']:7.1f} ms")


if __name__ == "__main__":
    main()
