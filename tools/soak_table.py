"""docs/results/soak.md, made of what long-running tests really did and never by hand.

    python -m tools.soak_table build/soak.jsonl   # take in a record of `pytest --soak --soak-record build/soak.jsonl`
    python -m tools.soak_table --add more.jsonl   # add the trials of a record to those of earlier runs
    python -m tools.soak_table                    # write the page again
    python -m tools.soak_table --check            # fail if the page is not what the results say

docs/results/soak.json holds the runs of each kind of trial, and the table their sums. A record replaces the runs of the
kinds that it has; with --add it is one more run of them, for which a test that an earlier run is known to have counted
may not be counted again: seeds and cases that were tried twice are one trial.
docs/results/soak-peers.json is what `python -m benchmarks.peer_checkpoints` found.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parents[1] / "docs/results"
Row = dict[str, Any]


class Kind(NamedTuple):
    """One kind of trial."""

    done: str
    held: str  # what a trial checks
    wanted: int  # trials in a whole soak, at least
    tests: str  # for pytest


KINDS = {
    "kills": Kind(
        "A rank of a training run killed (`SIGKILL`) at a random step, and the run resumed",
        "losses, norms and learning rates are those of an undisturbed run, to the bit",
        100,
        "tests/train/test_interrupted.py -k killed_at_random",
    ),
    "signals": Kind(
        "A training run told to stop (`SIGTERM`, `SIGINT`, launcher or rank) at a random step, and resumed",
        "the step in hand is saved; losses, norms and learning rates are those of an undisturbed run, to the bit",
        100,
        "tests/train/test_interrupted.py -k interrupted_at_random",
    ),
    "kills while saving": Kind(
        "One or both ranks killed (`SIGKILL`) at a random instant while they save, and started again",
        "no committed checkpoint is lost, every checkpoint that is seen is whole, the newest one loads",
        1000,
        "tests/checkpoint/test_killed_ranks.py",
    ),
    "crash states": Kind(
        "Different contents of a disk after a crash or power loss in a save",
        "no committed checkpoint is lost, every checkpoint that is seen is whole, the next save works",
        10_000,
        "tests/checkpoint/test_power_loss.py",
    ),
    "bit flips": Kind(
        "One bit of a committed checkpoint flipped",
        "`load` and `verify-checkpoint` refuse it and name the file and the tensor",
        2000,
        "tests/checkpoint/test_damage.py",
    ),
    "fuzzed headers and manifests": Kind(
        "A safetensors header or a signed manifest changed at random",
        "refused by `CheckpointDamaged`, or what it says is in the file",
        100_000,
        "tests/security/test_headers.py tests/checkpoint/test_hostile.py",
    ),
    "disagreements": Kind(
        "Ranks that bring different models, settings or values (27 kinds, on 2 and 3 ranks)",
        "every rank raises, and the message names the rank and the difference",
        12,
        "tests/faults/test_disagreement.py",
    ),
    "faults of a run": Kind(
        "A kill, stop, signal or exception at one of 22 points of `onefold train`, in a rank or the launcher",
        "the first cause is named, all processes end in time, nothing is left behind",
        320,
        "tests/faults/test_every_point.py",
    ),
    "faults over NCCL": Kind(
        "A rank killed, stopped or ended at one of 24 points of a step over NCCL",
        "every survivor names the rank and ends in time; no process is left on the GPU",
        24,
        "tests/nccl/test_faults.py",
    ),
    "budgets": Kind(
        'A random model, batch and `device_bytes` under `Offload(optimizer="auto")`, on 1 and 2 ranks of a CPU',
        "no step takes more bytes than the budget (where a formula leaves parameters on the device for which a budget "
        'has no room, the trial sets `parameters="host"`), and parameters are those of a run without offload, to the '
        "bit",
        200,
        "tests/offload/test_auto.py -k any_budget",
    ),
}


# What a restart or a load found, as benchmarks/peer_checkpoints.py says it -> as the table says it.
AFTER_A_KILL = {
    "right": "resumed",
    "nothing to lose": "nothing was committed yet",
    "raised": "**load raises**",
    "died": "**load crashes**",
    "hangs": "**load hangs**",
    "lost": "**an older step or none, silently**",
    "mixed": "**a mix of steps, silently**",
    "wrong": "**wrong values, silently**",
    "differs": "**ranks differ, silently**",
}
OF_DAMAGE = {**AFTER_A_KILL, "raised": "refused", "right": "right values", "nothing": "found no checkpoint"}
PEER_TRIALS = {
    "kills, a new folder each time": ("Killed while saving, each step in a folder of its own", AFTER_A_KILL),
    "kills, over the last one": ("Killed while saving over the last checkpoint", AFTER_A_KILL),
    "bit flips": ("One bit flipped, anywhere", OF_DAMAGE),
    "files missing or cut": ("One file missing, empty, cut in half or by its last byte", OF_DAMAGE),
}
PEERS = {"onefold": "Onefold", "dcp": "torch DCP", "deepspeed": "DeepSpeed"}


def take_in(record: Path, old: dict[str, list[Row]], *, add: bool = False) -> dict[str, list[Row]]:
    """The runs of each kind with those of a record: beside the ones that were there, or in their place."""
    found: dict[str, dict[str, Row]] = {}
    for line in record.read_text().splitlines():
        row = json.loads(line)
        fresh = {"trials": 0, "lost": 0, "seconds": 0.0, "date": row["date"], "machine": row["machine"], "tests": []}
        run = found.setdefault(row["kind"], {}).setdefault(where(row), fresh)
        known = [name for other in old.get(row["kind"], ()) for name in other.get("tests", ())]
        if add and row["test"] in [*known, *run["tests"]]:
            raise SystemExit(f"{row['test']} was counted already; leave it out of {record}")
        run["trials"] += row["trials"]
        run["lost"] += row["outcome"] != "passed"
        run["seconds"] = round(run["seconds"] + row["seconds"], 1)
        run["tests"].append(row["test"])
    runs = {kind: [*(old.get(kind, ()) if add else ()), *found[kind].values()] for kind in found}
    return {name: (old | runs)[name] for name in KINDS if name in old | runs}


def total(runs: Sequence[Row], figure: str) -> float:
    return sum(run[figure] for run in runs)


def soak_table(rows: dict[str, list[Row]]) -> list[str]:
    """Where trials were run on different days or machines, each row is marked with letters, which the line below the
    table explains; of a row that is a sum, they say how many trials each run had."""
    marks = marks_of(all_runs(rows))
    lines = ["| Trials | What was done | What held each time | Lost | Time | `pytest --soak …` |", "|---" * 6 + "|"]
    for name, kind in KINDS.items():
        number, lost, time = "not run", "–", "–"
        if runs := rows.get(name, []):
            number, lost = f"{total(runs, 'trials'):,}", str(total(runs, "lost"))
            time = told(total(runs, "seconds")) + counted(runs, marks)
        if runs and total(runs, "trials") < kind.wanted:
            number += f" of {kind.wanted:,}"
        lines.append(f"| {number} | {kind.done} | {kind.held} | {lost} | {time} | `{kind.tests}` |")
    return lines


def all_runs(rows: dict[str, list[Row]]) -> list[Row]:
    return [run for runs in rows.values() for run in runs]


def counted(runs: Sequence[Row], marks: dict[str, str]) -> str:
    """Where the runs of one kind were: (a), or the trials of each, as in (40 a, 60 b)."""
    if not any(marks.values()):
        return ""
    if len(runs) == 1:
        return f" ({marks[where(runs[0])]})"
    return " (" + ", ".join(f"{run['trials']:,} {marks[where(run)]}" for run in runs) + ")"


def told(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def peer_table(systems: dict[str, Row]) -> list[str]:
    there = [name for name in PEERS if name in systems]
    titles = [f"{PEERS[name]} {systems[name]['version'].partition('+')[0]}" for name in there]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(there) + 1) + "|"]
    for kind, (done, words) in PEER_TRIALS.items():
        cells = [systems[name]["trials"].get(kind, {"ends": {}}) for name in there]
        told = [", ".join(f"{n:,} {words[end]}" for end, n in by_number(cell["ends"])) or "not run" for cell in cells]
        lines.append(f"| {done} | {' | '.join(told)} |")
    return lines


def by_number(ends: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(ends.items(), key=lambda end: -end[1])


def where(row: Row) -> str:
    return f"{row['date']}, {row['machine']}"


def marks_of(rows: Iterable[Row]) -> dict[str, str]:
    """A letter for each date and machine; none if there is only one."""
    places = list(dict.fromkeys(map(where, rows)))
    return {place: chr(ord("a") + number) if len(places) > 1 else "" for number, place in enumerate(places)}


def when_and_where(rows: Iterable[Row]) -> str:
    """Each date and machine once."""
    return "; ".join(dict.fromkeys(map(where, rows)))


def marked(rows: Iterable[Row]) -> str:
    """Each date and machine once, with its letter."""
    return "; ".join(f"({mark}) {place}" if mark else place for place, mark in marks_of(rows).items())


def page(text: str, rows: dict[str, list[Row]], systems: dict[str, Row]) -> str:
    """The page with its two tables as the results say."""
    parts = {
        "soak": [*soak_table(rows), "", f"Run on {marked(all_runs(rows))}."],
        "peers": [*peer_table(systems), "", f"Run on {when_and_where(systems.values())}."],
    }
    for name, lines in parts.items():
        before, begin, rest = text.partition(f"<!-- measured: {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        text = before + begin + "\n".join(lines) + "\n" + end + after
    return text


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="write docs/results/soak.md")
    parser.add_argument("record", type=Path, nargs="?", help="a file that pytest --soak-record has written")
    parser.add_argument("--add", action="store_true", help="add the record's trials to those of earlier runs")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is not current")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args(words)
    known, shown = asked.results / "soak.json", asked.results / "soak.md"
    rows = json.loads(known.read_text())
    if asked.record:
        rows = take_in(asked.record, rows, add=asked.add)
        known.write_text(json.dumps(rows, indent=1) + "\n")
    old = shown.read_text()
    new = page(old, rows, json.loads((asked.results / "soak-peers.json").read_text()))
    if asked.check:
        return int(old != new)
    shown.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
