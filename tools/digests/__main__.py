"""Record digests of 200 runs, or compare those of two recordings.

    python -m tools.digests record before.json
    python -m tools.digests compare before.json              # runs anew
    python -m tools.digests compare before.json after.json
    python -m tools.digests record some.json --only stage3/n2 --workers 2

Equal digests on one machine mean equal bits: losses, norms, parameters, masters, buffers, optimizer state. Another
machine or version of torch gives other digests, so both recordings are made on the same.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import onefold
from tools.digests.crew import Outcome, outcomes, preload
from tools.digests.table import table

WIDTH, SHOWN = 80, 12  # columns; names under each heading
ABOUT = ("torch", "machine", "onefold")
Recording = dict[str, Any]


def record(only: str, workers: int) -> Recording:
    """Run the cases whose names hold `only`; sets of ranks side by side, if there are several workers."""
    chosen = [case for case in table() if only in case.name]
    if not chosen:
        raise SystemExit(f"no case has {only!r} in its name; an example is {table()[0].name}")
    sizes = sorted({case.ranks for case in chosen})
    began = time.monotonic()

    def run(ranks: int) -> list[Outcome]:
        done = []
        for outcome in outcomes(ranks, [case for case in chosen if case.ranks == ranks]):
            done.append(outcome)
            if outcome.failed:
                sys.stderr.write(f"failed: {outcome.name}: {outcome.digest}\n")
        return done

    with ThreadPoolExecutor(workers) as pool:
        found = {one.name: one for some in pool.map(run, sizes) for one in some}
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "onefold": onefold.__version__,
        "seconds": round(time.monotonic() - began, 1),
        "cases": {case.name: written(found[case.name]) for case in chosen},
    }


def written(outcome: Outcome) -> str:
    return f"failed: {outcome.digest}" if outcome.failed else outcome.digest


def compare(before: Recording, after: Recording) -> tuple[str, bool]:
    """A table of at most 80 columns, and whether all that is in both is equal and nothing is in one alone."""
    old, new = before["cases"], after["cases"]
    both = [name for name in old if name in new]
    rows = {
        "equal": [name for name in both if old[name] == new[name]],
        "different": [name for name in both if old[name] != new[name]],
        "only before": [name for name in old if name not in new],
        "only after": [name for name in new if name not in old],
        "failed in both": [name for name in both if old[name].startswith("failed") and new[name].startswith("failed")],
    }
    text = [f"{what:<16}{len(names):>5}" for what, names in rows.items()]
    for what in ABOUT:
        if before[what] != after[what]:
            text.append(f"{what}: {before[what]} before, {after[what]} after")
    for what in ("different", "only before", "only after", "failed in both"):
        for name in rows[what][:SHOWN]:
            text.append(f"{what}: {name}")
            if what == "different" and len(new[name]) != 64:  # no digest, but a reason
                text.append(f"  {new[name]}")
        if len(rows[what]) > SHOWN:
            text.append(f"{what}: and {len(rows[what]) - SHOWN} more")
    return "\n".join(line[:WIDTH] for line in text) + "\n", len(rows["equal"]) == len({*old, *new})


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.digests", description="Digests of 200 small runs.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="run the cases and write their digests")
    recording.add_argument("out", type=Path)
    comparing = verbs.add_parser("compare", help="hold a recording against another, or against a new run")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path, nargs="?")
    for verb in (recording, comparing):
        verb.add_argument("--only", default="", help="cases with this in their names")
        verb.add_argument("--workers", type=int, default=1, help="sets of ranks that run at once: 1, 2 or 3 (1)")
    args = parser.parse_args(words)
    if args.verb == "record":
        found = record(args.only, args.workers)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        failed = sum(digest.startswith("failed") for digest in found["cases"].values())
        sys.stdout.write(f"{len(found['cases'])} cases in {found['seconds']:.0f} s, {failed} failed: {args.out}\n")
        return 1 if failed else 0
    before = json.loads(args.before.read_text())
    before["cases"] = {name: digest for name, digest in before["cases"].items() if args.only in name}
    after = json.loads(args.after.read_text()) if args.after else record(args.only, args.workers)
    after["cases"] = {name: digest for name, digest in after["cases"].items() if args.only in name}
    text, same = compare(before, after)
    sys.stdout.write(text)
    return 0 if same else 1


if __name__ == "__main__":
    preload()
    sys.exit(main(sys.argv[1:]))
