"""A run from the plan to the file: who takes part, all turns, do the losses agree, what is written and shown."""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.systems.table import SYSTEMS, missing
from benchmarks.turns import Record, Turn, run
from benchmarks.work import Work

INTERRUPTED = 130  # exit status, as shells have it


class Present(NamedTuple):
    """Who takes part, and who would but is not installed."""

    systems: list[str]
    left_out: list[str]


def present(asked: Sequence[str] | None, usual: Sequence[str], *, base: str | None) -> Present:
    """Those asked for by name must be there; of the usual ones those that are there. The others get a line each."""
    names = list(dict.fromkeys(asked or usual))
    lines = {name: line for name in names if (line := missing(name))}
    for line in lines.values():
        print(line, file=sys.stderr)
    if lines and asked:
        sys.exit(2)
    found = [name for name in names if name not in lines]
    if base and base not in found:
        print(f"--base {base} takes no part; found {', '.join(found)}; name it in --systems too", file=sys.stderr)
        sys.exit(2)
    return Present(found, list(lines))


def folder(out: Path | None, *, usual: bool) -> Path:
    """Only runs of the usual systems and sizes belong among the results that tables are made from."""
    found = out or (results.RESULTS if usual else Path("runs", "bench"))
    try:
        found.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=found).close()
    except OSError as error:
        print(f"{found} cannot be written: {error.strerror}; give another folder with --out", file=sys.stderr)
        sys.exit(2)
    return found


def at_least(least: int) -> Callable[[str], int]:
    """A whole number from the command line."""

    def number(word: str) -> int:
        if int(word) < least:
            raise ArgumentTypeError(f"{word} is less than {least}")
        return int(word)

    return number


@dataclass(frozen=True, kw_only=True)
class Plan:
    what: str  # the first part of the file's name
    work: Work
    command: str
    present: Present
    base: str  # ratios are to it, losses are to be its own; else to the first that agrees
    warm_up: int
    out: Path
    timeout_s: float
    wire: results.Counted | None = None
    environ: Mapping[str, str] = field(default_factory=dict)  # of the processes, beside their usual one
    at_once: bool = False  # all systems start together
    side_by_side: bool | None = None  # where ranks share a GPU: whether CUDA MPS runs them at the same time


def measure(plan: Plan, schedule: Callable[[Sequence[str]], Iterator[Turn]]) -> int:
    """Run, write and show. The exit status is 1 if a system failed or its losses are not those of the base."""
    systems, left_out = plan.present
    agreeing = [name for name in systems if SYSTEMS[name].agrees == "every step"]
    base = plan.base if plan.base in systems else (agreeing or systems)[0]
    found = results.facts(plan.work, plan.command, base, plan.warm_up) | {"left_out": left_out}
    if plan.side_by_side is not None:
        found["mps"] = plan.side_by_side
    file = results.file_of(plan.out, plan.what, found)
    records: dict[str, Record] = {}
    with file.with_suffix(".lines").open("w") as log:

        def hear(system: str, what: str, heard: Any) -> None:
            print(json.dumps({"system": system, what: heard}), file=log, flush=True)
            if what == "failed":
                print(f"{system}: {heard}", file=sys.stderr)
            if what in ("finished", "failed"):
                conclude(plan, found, records, base, file)
            if what == "finished":
                print(line_of(system, found["systems"][system]), flush=True)

        try:
            run(
                plan.work, schedule(systems), records, timeout_s=plan.timeout_s, hear=hear, environ=plan.environ,
                at_once=systems if plan.at_once else (),
            )  # fmt: skip
        except KeyboardInterrupt:
            print(f"interrupted; all steps so far are in {log.name}", file=sys.stderr)
            sys.exit(INTERRUPTED)
    file.with_suffix(".lines").unlink()  # all of it is in the results now
    print(f"all steps, beside {base}:")
    for system in systems:
        print(line_of(system, found["systems"][system], base), flush=True)
    for line in found["disagreements"]:
        print(f"losses differ: {line}", file=sys.stderr)
    print(f"written: {file.name}")
    failed = [name for name, record in records.items() if record.error]
    return 1 if failed or found["disagreements"] else 0


def conclude(plan: Plan, found: dict[str, Any], records: dict[str, Record], base: str, file: Path) -> None:
    found["disagreements"] = results.disagreements(plan.work, records, base=base)
    found["systems"] = results.summary(plan.work, records, base=base, warm_up=plan.warm_up)
    if plan.wire:
        results.add_wire(plan.work, found, plan.wire)
    results.write(file, found)


def line_of(name: str, row: dict[str, Any], base: str | None = None) -> str:
    """One system in a line; a failure with what is known of it."""
    if row["error"] or "median_s" not in row:
        return f"{name}: {row['error'] or 'no measured step'}"
    low, high = row["quartiles_s"]
    cells = [f"{name:<24}{1e3 * row['median_s']:9.1f} ms  [{1e3 * low:.1f}, {1e3 * high:.1f}]"]
    if base and "ratio" in row:
        paired = f" (pairs {row['paired_ratio']:.3f})" if "paired_ratio" in row else ""
        cells.append(f"{row['ratio']:.3f} x {base}{paired}")
    for key, what in (("peak_device_bytes", "device"), ("peak_rss_bytes", "host")):
        if key in row:
            cells.append(f"{what} {row[key] / 2**30:.2f} GiB")
    if "sent_bytes" in row:
        over = f", {row['sent_over_theory']:.3f} x theory" if "sent_over_theory" in row else ""
        cells.append(f"sends {row['sent_bytes'] / 1e6:.1f} MB{over}")
    if losses := row.get("losses"):
        cells.append("loss " + " .. ".join(f"{float(step[0]):.4f}" for step in (losses[0], losses[-1])))
    if "tokens_per_s" in row:
        cells.append(f"{row['tokens_per_s']:,.0f} tokens/s")
    cells.append(f"built in {row['build_s'][-1]:.0f} s")
    return "  ".join(cells)
