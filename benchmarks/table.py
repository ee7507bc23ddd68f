"""The tables of README.md and docs/performance.md, made from benchmarks/results/*.json and never by hand.

    python -m benchmarks.table            # write them
    python -m benchmarks.table --check    # fail if they are not what the results say

A table stands between `<!-- measured: NAME -->` and `<!-- end -->`. What stands there is left alone until there are
results of its kind. The README gets a few systems on the machine measured last; docs/performance.md gets everything.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.results import RESULTS
from benchmarks.systems.table import SYSTEMS
from benchmarks.work import one_gpu, shared_gpu, two_ranks

ROOT = Path(__file__).parent.parent
PLACE = re.compile(r"(<!-- measured: ([a-z]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
KINDS = {"cpu": two_ranks(), "gpu": one_gpu() | shared_gpu()}
Result = dict[str, Any]
Group = list[Result]  # of one machine, in the order of their works


class Selection(NamedTuple):
    """What of a kind of measurement the README shows."""

    works: tuple[str, ...]
    systems: tuple[str, ...]
    memory: str  # the field of a result that is its peak memory
    memory_name: str


IN_README = {
    "cpu": Selection(
        tuple(two_ranks()),
        ("ddp", "fsdp2", "deepspeed3", "stage2", "stage3"),
        "peak_rss_bytes",
        "resident memory of a rank",
    ),
    "gpu": Selection(
        ("1.64b", "5.25b", "nccl-0.37b"),
        ("floor", "ddp", "fsdp2", "deepspeed3", "stage2", "onefold"),
        "peak_device_bytes",
        "device memory",
    ),
}


def read(folder: Path) -> dict[str, list[Group]]:
    """Results by kind and machine. Files of quick runs, and of works that were changed, are nobody's table."""
    found: dict[str, list[Group]] = {}
    for kind, works in KINDS.items():
        machines: dict[str, Group] = {}
        for name in works:
            for path in sorted(folder.glob(f"{kind}-{name}-*.json")):
                result = json.loads(path.read_text())
                if result["work"]["name"] == name:
                    machines.setdefault(path.stem.removeprefix(f"{kind}-{name}-"), []).append(result)
        if machines:
            found[kind] = [machines[machine] for machine in sorted(machines)]
    return found


def where(result: Result) -> str:
    """The machine, the versions, the day."""
    machine, versions = result["machine"], result["versions"]
    place = machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"
    told = [place, f"torch {versions['torch']}", f"Onefold {versions['onefold']}"]
    if versions["deepspeed"] and any(name.startswith("deepspeed") for name in result["systems"]):
        told.append(f"DeepSpeed {versions['deepspeed']}")
    return ", ".join([*told, result["date"].partition(" ")[0]])


def how(result: Result) -> str:
    steps = max(len(row.get("steps_s", ())) for row in result["systems"].values())
    told = f"{result['work']['precision']}, AdamW; medians of up to {steps} steps, and the most memory of any rank"
    if "mps" in result:
        ranks = "side by side (CUDA MPS)" if result["mps"] else "taking turns (without CUDA MPS)"
        told += f"; NCCL over loopback sockets, ranks {ranks}"
    return f"{told} (`{result['command']}`)"


def label(name: str) -> str:
    return SYSTEMS[name].label


def time_of(row: Result, base: bool, paired: bool) -> str:
    """The base in milliseconds, the others beside it: by steps that were taken side by side, if they were."""
    if "median_s" not in row:
        return "failed"
    ms, key = f"{1e3 * row['median_s']:.0f} ms", "paired_ratio" if paired else "ratio"
    return ms if base or key not in row else f"{row[key]:.3f}×"


def gib(row: Result, key: str) -> str:
    return f"{row[key] / 2**30:.2f} GiB" if key in row else ""


def summary(groups: list[Group], chosen: Selection) -> str:
    """One row per chosen system, one column per chosen work, of the machine that was measured last."""
    newest = max(groups, key=lambda group: max(result["date"] for result in group))
    shown = [result for result in newest if result["work"]["name"] in chosen.works]
    if not shown:
        return f"{where(newest[-1])}: none of {', '.join(chosen.works)} was measured.\n"
    bases = " or ".join(dict.fromkeys(label(result["base"]) for result in shown))
    precisions = " and ".join(dict.fromkeys(result["work"]["precision"] for result in shown))
    told = f"{precisions}, AdamW; median step time, {bases} in ms and the others as multiples of it"
    found = [name for name in chosen.systems if any(name in result["systems"] for result in shown)]
    rows = [[label(name), *(cell(result, name, chosen.memory) for result in shown)] for name in found]
    return f"{where(shown[-1])}; {told}; peak {chosen.memory_name}.\n\n{table(['', *map(column, shown)], rows)}"


def column(result: Result) -> str:
    work = result["work"]
    if work["ranks"] > 1:
        place = " on one GPU" if work["device"] == "cuda" else ""
        shape = f"GPT {work['layers']}×{work['dim']}, {work['batch']}×{work['seq']} tokens each"
        return f"{work['ranks']} ranks{place}, {shape}"
    size = f"{max(row.get('parameters', 0) for row in result['systems'].values()) / 1e9:.2f}B"
    kind = "offload, " if work.get("away") else f"one rank of {work['rank_of']}, " if work["rank_of"] > 1 else ""
    return f"{kind}{size} ({work['layers']}×{work['dim']}), batch {work['batch']}"


def cell(result: Result, name: str, memory: str) -> str:
    row = result["systems"].get(name)
    if row is None:
        return ""
    time = time_of(row, name == result["base"], paired=result["work"]["ranks"] > 1)
    return ", ".join(part for part in (time, gib(row, memory)) if part)


def full(groups: list[Group]) -> str:
    """All that was measured of every work."""
    return "\n".join(f"{where(result)}; {how(result)}.\n\n{details(result)}" for group in groups for result in group)


def details(result: Result) -> str:
    columns: dict[str, Callable[[str, Result], str]] = {
        column(result): lambda name, row: label(name),
        "median": lambda name, row: f"{1e3 * row['median_s']:.1f} ms" if "median_s" in row else "failed",
        "middle half": lambda name, row: "–".join(f"{1e3 * one:.1f}" for one in row.get("quartiles_s", ())),
        f"to {label(result['base'])}": lambda name, row: ratio(row, "ratio"),
        "in pairs": lambda name, row: ratio(row, "paired_ratio"),
        "peak, device": lambda name, row: gib(row, "peak_device_bytes"),
        "peak, resident": lambda name, row: gib(row, "peak_rss_bytes"),
        "sent per rank": lambda name, row: f"{row['sent_bytes'] / 1e6:.1f} MB" if "sent_bytes" in row else "",
        "over theory": lambda name, row: ratio(row, "sent_over_theory"),
    }
    rows = [[show(name, row) for show in columns.values()] for name, row in result["systems"].items()]
    filled = [any(row[at] for row in rows) for at in range(len(columns))]  # what nobody has is no column
    rows = [[text for text, kept in zip(row, filled, strict=True) if kept] for row in rows]
    return table([head for head, kept in zip(columns, filled, strict=True) if kept], rows)


def ratio(row: Result, key: str) -> str:
    return f"{row[key]:.3f}×" if key in row else ""


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


MAKERS: dict[str, dict[str, Callable[[list[Group]], str]]] = {
    "README.md": {kind: partial(summary, chosen=chosen) for kind, chosen in IN_README.items()},
    "docs/performance.md": {"cpu": full, "gpu": full},
}


def made(root: Path, folder: Path) -> Iterator[tuple[Path, str, str]]:
    """Each document as it is and as it should be."""
    found = read(folder)
    for name, makers in MAKERS.items():
        path = root / name
        text = path.read_text()
        places = {match[2] for match in PLACE.finditer(text)}
        if places != set(makers):
            sys.exit(f"{name} has places for {sorted(places)}, wanted {sorted(makers)}; see benchmarks/table.py")

        def fill(match: re.Match[str], makers: dict[str, Callable[[list[Group]], str]] = makers) -> str:
            groups = found.get(match[2])
            return f"{match[1]}{makers[match[2]](groups)}{match[4]}" if groups else match[0]

        yield path, text, PLACE.sub(fill, text)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--root", type=Path, default=ROOT, help="where README.md is")
    asked = parser.parse_args(words)
    stale = [(path, wanted) for path, text, wanted in made(asked.root, asked.results) if text != wanted]
    for path, wanted in stale:
        if asked.check:
            print(
                f"{path.name}: a table is not what the results say; run `python -m benchmarks.table`", file=sys.stderr
            )
        else:
            path.write_text(wanted)
    return 1 if asked.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
