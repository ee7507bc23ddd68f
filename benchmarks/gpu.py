"""One GPU: systems against each other, each in a process of its own, one after the other.

    python -m benchmarks.gpu --work 1.64b
    python -m benchmarks.gpu --work rank8-5.25b                          # one rank of eight that are not there
    python -m benchmarks.gpu --work offload-6.86b --systems onefold+inside onefold+clip fsdp2 --rounds 2
    python -m benchmarks.gpu --work offload-6.86b --systems onefold+inside --layers 48 --dim 5120 --optimizer auto
    python -m benchmarks.gpu --work 1.64b --quick                        # tiny, on any machine, to see that it runs

Every step is written to a file as it ends, and the results after every system: a run that is cut off keeps them.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from benchmarks.measure import Plan, at_least, folder, measure, present
from benchmarks.results import shown_command
from benchmarks.systems.table import SYSTEMS
from benchmarks.turns import one_by_one
from benchmarks.work import Work, one_gpu

DEVICE = ("floor", "amp", "fsdp2", "deepspeed2", "deepspeed3", "onefold", "onefold+inside")
RANK = ("fsdp2", "onefold", "onefold+inside")
UNNAMED = ("path", "device_bytes", "host_bytes")  # not in the names of results
AWAY = ("fsdp2", "deepspeed2", "deepspeed3", "onefold+inside", "onefold+clip")


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", choices=list(one_gpu()), default="1.64b")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="by default those that fit the work")
    parser.add_argument(
        "--base", choices=list(SYSTEMS), help="ratios are to it, losses are its own; fsdp2, if it is there"
    )
    parser.add_argument("--warm-up", type=at_least(0), default=3, help="steps that do not count")
    parser.add_argument("--steps", type=at_least(1), default=5, help="steps that do")
    parser.add_argument("--rounds", type=at_least(1), default=1, help="how often each system starts afresh")
    parser.add_argument("--layers", type=at_least(1))
    parser.add_argument("--dim", type=at_least(1))
    parser.add_argument("--batch", type=at_least(1))
    parser.add_argument("--seq", type=at_least(1))
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--optimizer", choices=("host", "disk", "auto"), help="offload, ours: where it lies")
    parser.add_argument("--parameters", choices=("host", "disk"), help="offload, ours: where they lie")
    parser.add_argument("--path", help="offload, ours: the folder of what lies on disk")
    parser.add_argument("--device-bytes", type=int, help="offload, ours: what --optimizer auto may fill")
    parser.add_argument("--host-bytes", type=int, help="the same of host memory, with --path")
    parser.add_argument("--timeout-s", type=float, default=300, help="how long one answer may take")
    parser.add_argument("--out", type=Path, help="benchmarks/results for the usual systems and sizes, else runs/bench")
    parser.add_argument("--quick", action="store_true", help="a tiny model; without a GPU on the CPU")
    return parser.parse_args(words)


def chosen(asked: argparse.Namespace) -> Work:
    work = one_gpu()[asked.work]
    if asked.quick:
        work = dataclasses.replace(work.quick(), device="cuda" if torch.cuda.is_available() else "cpu")
    elif not torch.cuda.is_available():
        sys.exit("no CUDA device found; run this on a machine with one, or try it out with --quick")
    given = {key: getattr(asked, key) for key in ("layers", "dim", "batch", "seq", "recompute")}
    lies = {key: getattr(asked, key) for key in ("optimizer", "parameters", *UNNAMED)}
    changed = {key: value for key, value in given.items() if value is not None}
    moved = {key: value for key, value in lies.items() if value is not None}
    if moved and not work.away:
        sys.exit(f"{', '.join(f'--{key}' for key in moved)}: for offload; --work {asked.work} has none")
    named = {key: value for key, value in (changed | moved).items() if key not in UNNAMED}
    name = "-".join([work.name, *(f"{key}-{value}" for key, value in named.items())])
    away = dataclasses.replace(work.away, **moved) if work.away else None
    return dataclasses.replace(work, name=name, away=away, **changed)


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    asked = arguments(words)
    work = chosen(asked)
    here = present(asked.systems, AWAY if work.away else RANK if work.rank_of > 1 else DEVICE, base=asked.base)
    out = folder(asked.out, usual=not (asked.quick or asked.systems) and work.name == asked.work)
    plan = Plan(
        what=f"{'quick' if asked.quick else 'gpu'}-{work.name}", work=work, present=here,
        base=asked.base or "fsdp2", command=shown_command("benchmarks.gpu", words), warm_up=asked.warm_up, out=out,
        timeout_s=asked.timeout_s,
    )  # fmt: skip
    steps = asked.warm_up + asked.steps
    return measure(plan, lambda systems: one_by_one(systems, steps=steps, rounds=asked.rounds))


if __name__ == "__main__":
    sys.exit(main())
