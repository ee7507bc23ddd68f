"""Two gloo ranks on this machine's CPU, one thread each, fp32: `make bench`.

    python -m benchmarks.cpu                                    # both works, all systems that are installed
    python -m benchmarks.cpu --work 1x32 --systems ddp stage2   # mostly communication; 2x128 is mostly compute
    python -m benchmarks.cpu --systems stage3 stage3+prefetch0 stage3+prefetch2 --base stage3
    python -m benchmarks.cpu --work 2x128 --systems onefold onefold+muon --base onefold     # Muon's step to AdamW's
    python -m benchmarks.cpu --beside ../before --systems ddp stage2 stage3      # two checkouts
    python -m benchmarks.cpu --quick                            # tiny, to see that it runs

The processes of all systems are alive together and take turns step by step. Bytes on the wire come from a short run
of their own, in a network of its own.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from benchmarks.measure import Plan, at_least, folder, measure, present
from benchmarks.results import shown_command
from benchmarks.systems.loop import numel
from benchmarks.systems.table import SYSTEMS, add_other
from benchmarks.turns import one_by_one, together
from benchmarks.wire import wire_bytes
from benchmarks.work import Work, two_ranks

STAGES = ("stage0", "stage1", "stage2", "stage3")
USUAL = ("floor", "ddp", "zero1", "fsdp2", "deepspeed1", "deepspeed2", "deepspeed3", *STAGES)
PROCESS_BYTES = 250 << 20  # of Python and torch, beside the states


def another_checkout(word: str) -> Path:
    if not Path(word, "benchmarks", "worker.py").is_file():
        raise argparse.ArgumentTypeError(f"{word} is no checkout of this project: it has no benchmarks/worker.py")
    return Path(word)


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    works = list(two_ranks())
    parser.add_argument("--work", nargs="+", choices=works, default=works, help="sequences × tokens of a rank")
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help="by default all but variants of ours")
    parser.add_argument(
        "--base", choices=list(SYSTEMS), help="ratios are to it, losses are its own; ddp, if it is there"
    )
    parser.add_argument("--warm-up", type=at_least(0), default=3, help="steps that do not count")
    parser.add_argument("--steps", type=at_least(1), default=20, help="steps that do")
    parser.add_argument(
        "--one-by-one", type=at_least(1), metavar="ROUNDS", help="where memory is short: one system at a time"
    )
    parser.add_argument(
        "--beside", type=another_checkout, metavar="CHECKOUT",
        help="also what another checkout of this project makes of our systems: other:stage0, …",
    )  # fmt: skip
    parser.add_argument("--wire", action=argparse.BooleanOptionalAction, default=True, help="count bytes on the wire")
    parser.add_argument("--timeout-s", type=float, default=300, help="how long one answer may take")
    parser.add_argument("--out", type=Path, help="benchmarks/results for the usual systems and sizes, else runs/bench")
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    return parser.parse_args(words)


def check_memory(work: Work, systems: int) -> None:
    """All processes are alive at once: say before they start that they will not fit."""
    wanted = systems * work.ranks * (PROCESS_BYTES + 16 * numel(work.blank()))
    lines = Path("/proc/meminfo").read_text().splitlines()
    found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    if wanted > found:
        sys.exit(
            f"{systems} systems of {work.ranks} ranks need about {wanted / 1e9:.0f} GB at once, {found / 1e9:.0f} GB "
            f"are available; choose fewer with --systems, or run them one by one with --one-by-one 3"
        )


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    asked = arguments(words)
    works = [two_ranks()[name] for name in asked.work]
    if asked.quick:
        works = [work.quick() for work in works]
    here = present(asked.systems, USUAL, base=asked.base)
    if asked.beside:
        here = here._replace(systems=[*here.systems, *add_other(asked.beside, here.systems)])
    if not asked.one_by_one:
        check_memory(works[0], len(here.systems))
    steps = asked.warm_up + asked.steps
    schedule = partial(together, steps=steps)
    if asked.one_by_one:
        schedule = partial(one_by_one, steps=steps, rounds=asked.one_by_one)
    out, worst = folder(asked.out, usual=not (asked.quick or asked.systems)), 0
    for work in works:
        print(f"{work.ranks} ranks, {work.layers}x{work.dim}, batch {work.batch}x{work.seq} per rank", flush=True)
        counted = None
        if asked.wire:
            print("counting bytes on the wire first, one system after the other", flush=True)
            counted = wire_bytes(work, here.systems, timeout_s=asked.timeout_s)
        plan = Plan(
            what=f"{'quick' if asked.quick else 'cpu'}-{work.name}", work=work, present=here, base=asked.base or "ddp",
            command=shown_command("benchmarks.cpu", words), warm_up=asked.warm_up, out=out,
            timeout_s=asked.timeout_s, wire=counted,
        )  # fmt: skip
        worst = max(worst, measure(plan, schedule))
    return worst


if __name__ == "__main__":
    sys.exit(main())
