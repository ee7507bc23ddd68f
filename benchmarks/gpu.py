"""One GPU: systems against each other, each in a process of its own, one after the other.

    python -m benchmarks.gpu --work 1.64b
    python -m benchmarks.gpu --work rank8-5.25b                          # one rank of eight that are not there
    python -m benchmarks.gpu --work rank64-129b --systems onefold --rounds 1   # one rank of 64, on 8 nodes
    python -m benchmarks.gpu --work offload-6.86b --systems onefold+inside onefold+clip fsdp2 --rounds 2
    python -m benchmarks.gpu --work offload-6.86b --systems onefold+inside --layers 48 --dim 5120 --optimizer auto
    python -m benchmarks.gpu --work qwen2.5-7b --systems fsdp2+compile onefold+lean   # full fine-tuning, 524,288 tokens
    python -m benchmarks.gpu --nccl 2                                    # two ranks share the GPU over real NCCL
    python -m benchmarks.gpu --nccl 2 --work nccl-0.74b --rounds 3
    python -m benchmarks.gpu --work rank8-1.64b --systems onefold onefold+muon --base onefold   # Muon's step to AdamW's
    python -m benchmarks.gpu --work 1.64b --quick                        # tiny, on any machine, to see that it runs

Ranks that share the GPU talk over loopback sockets, a slow network: what a system sends, and how much of that it hides,
shows. All systems stay alive and take turns where memory allows, else each starts afresh in its turn.
Every step is written to a file as it ends, and the results after every system: a run that is cut off keeps them.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import Plan, at_least, folder, measure, present
from benchmarks.results import shown_command
from benchmarks.systems.loop import numel
from benchmarks.systems.table import SYSTEMS
from benchmarks.turns import Turn, one_by_one, resting
from benchmarks.work import Work, one_gpu, shared_gpu
from tests.harness.mps import mps_daemon

DEVICE = ("floor", "amp", "fsdp2", "deepspeed2", "deepspeed3", "onefold", "onefold+inside")
RANK = ("fsdp2", "onefold", "onefold+inside")
UNNAMED = ("path", "device_bytes", "host_bytes", "spare_bytes")  # not in the names of results
NCCL = ("ddp", "fsdp2", "deepspeed2", "deepspeed3", "stage2", "onefold", "onefold+keep")
AWAY = ("fsdp2", "deepspeed2", "deepspeed3", "onefold", "onefold+inside", "onefold+clip-never", "onefold+clip-always")


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", choices=list(works()), help="1.64b, or nccl-0.37b with --nccl")
    parser.add_argument(
        "--nccl", type=at_least(2), metavar="RANKS", help="so many ranks share the GPU; 2 for works that are named nccl"
    )
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="by default those that fit the work")
    parser.add_argument(
        "--base", choices=list(SYSTEMS), help="ratios are to it, losses are its own; fsdp2, if it is there"
    )
    parser.add_argument("--warm-up", type=at_least(0), default=3, help="steps that do not count")
    parser.add_argument("--steps", type=at_least(1), default=5, help="steps that do")
    parser.add_argument(
        "--rounds", type=at_least(1), help="how often each system has its turn; 1, or 2 with several ranks"
    )
    parser.add_argument("--layers", type=at_least(1))
    parser.add_argument("--dim", type=at_least(1))
    parser.add_argument("--batch", type=at_least(1))
    parser.add_argument("--seq", type=at_least(1))
    parser.add_argument("--micro-batches", type=at_least(1))
    parser.add_argument("--recompute", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--optimizer", choices=("host", "disk", "auto"), help="offload, ours: where it lies")
    parser.add_argument("--parameters", choices=("host", "disk"), help="offload, ours: where they lie")
    parser.add_argument("--path", help="offload, ours: the folder of what lies on disk")
    parser.add_argument("--device-bytes", type=int, help="offload, ours: what --optimizer auto may fill")
    parser.add_argument("--host-bytes", type=int, help="the same of host memory, with --path")
    parser.add_argument("--spare-bytes", type=int, help="host memory, ours: for updates before gradients are clipped")
    parser.add_argument("--timeout-s", type=float, default=300, help="how long one answer may take")
    parser.add_argument("--out", type=Path, help="benchmarks/results for the usual systems and sizes, else runs/bench")
    parser.add_argument("--quick", action="store_true", help="a tiny model; without a GPU on the CPU")
    return parser.parse_args(words)


def works() -> dict[str, Work]:
    return one_gpu() | shared_gpu()


def chosen(asked: argparse.Namespace) -> Work:
    work = works()[asked.work]
    if asked.nccl and asked.work not in shared_gpu():
        sys.exit(f"--nccl: --work {asked.work} is for one rank; use one of {', '.join(shared_gpu())}")
    if asked.quick:
        work = dataclasses.replace(work.quick(), device="cuda" if torch.cuda.is_available() else "cpu")
    elif not torch.cuda.is_available():
        sys.exit("no CUDA device found; run this on a machine with one, or try it out with --quick")
    given = {key: getattr(asked, key) for key in ("layers", "dim", "batch", "seq", "micro_batches", "recompute")}
    lies = {key: getattr(asked, key) for key in ("optimizer", "parameters", *UNNAMED)}
    changed = {key: value for key, value in given.items() if value is not None}
    if asked.nccl not in (None, work.ranks):
        changed["ranks"] = asked.nccl
    moved = {key: value for key, value in lies.items() if value is not None}
    if moved and not work.away:
        sys.exit(f"{', '.join(f'--{key}' for key in moved)}: for offload; --work {asked.work} has none")
    named = {key: value for key, value in (changed | moved).items() if key not in UNNAMED}
    name = "-".join([work.name, *(f"{key}-{value}" for key, value in named.items())])
    away = dataclasses.replace(work.away, **moved) if work.away else None
    return dataclasses.replace(work, name=name, away=away, **changed)


def wanted_bytes(work: Work, systems: int) -> int:
    """On the device, if the states of all systems stay and one computes: about, and rather more than less."""
    states = systems * 12 * numel(work.blank())  # most shard theirs, DDP does not
    tokens = work.batch * work.seq
    activations = tokens * (34 * work.dim * work.layers + 14 * work.vocab)
    return work.ranks * (states + activations)


def fit_together(work: Work, systems: int) -> bool:
    if work.device == "cpu":
        return True
    return wanted_bytes(work, systems) < 0.9 * torch.cuda.get_device_properties(0).total_memory


def usual(work: Work) -> tuple[str, ...]:
    if work.ranks > 1:
        return NCCL
    return AWAY if work.away else RANK if work.rank_of > 1 else DEVICE


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    asked = arguments(words)
    asked.work = asked.work or ("nccl-0.37b" if asked.nccl else "1.64b")
    work = chosen(asked)
    here = present(asked.systems, usual(work), base=asked.base)
    out = folder(asked.out, usual=not (asked.quick or asked.systems) and work.name == asked.work)
    # A GPU has hardware queues for few processes of 32 each, so ranks of several systems do not share one.
    together = work.ranks > 1 and work.device == "cpu" and fit_together(work, len(here.systems))
    rounds = asked.rounds or (2 if work.ranks > 1 else 1)
    shares = work.ranks > 1 and work.device == "cuda"
    with mps_daemon() if shares else nullcontext() as mps:
        if work.ranks > 1:
            print(told(work, together, mps is not None), flush=True)
        plan = Plan(
            what=f"{'quick' if asked.quick else 'gpu'}-{work.name}", work=work, present=here,
            base=asked.base or "fsdp2", command=shown_command("benchmarks.gpu", words), warm_up=asked.warm_up, out=out,
            timeout_s=asked.timeout_s, environ=mps.environ if mps else {}, at_once=together,
            side_by_side=mps is not None if shares else None,
        )  # fmt: skip
        return measure(plan, schedule(together, warm_up=asked.warm_up, steps=asked.steps, rounds=rounds))


def schedule(together: bool, *, warm_up: int, steps: int, rounds: int) -> Callable[[Sequence[str]], Iterator[Turn]]:
    if together:
        return partial(resting, warm_up=warm_up, steps=steps, rounds=rounds)
    return partial(one_by_one, steps=warm_up + steps, rounds=rounds)


def told(work: Work, together: bool, mps: bool) -> str:
    """How ranks share the device, in a line."""
    over = "gloo, on the CPU"
    if work.device == "cuda":
        over = f"NCCL, on one GPU, {'side by side (CUDA MPS)' if mps else 'taking turns: no CUDA MPS here'}"
    order = "all systems alive, in turns" if together else "one system after the other"
    return f"{work.ranks} ranks over {over}; {order}"


if __name__ == "__main__":
    sys.exit(main())
