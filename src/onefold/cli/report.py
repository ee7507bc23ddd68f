"""`onefold report`: a run as one HTML page, or its headline figures as JSON."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from onefold.errors import ConfigError, visible
from onefold.train.report.figures import agreement, headline, read_run
from onefold.train.report.report import is_comparison, write_any, write_runs
from onefold.train.run.records import run_folders


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Write report.html, one page that needs nothing else, and its charts as PNG files into a run's folder. Of several
    runs: one page that compares them."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """The --out of `onefold train`; with --compare, the folder that holds stage-0, stage-1, …; or several runs."""

    out: Path | None = None
    """Write into this folder instead, for run folders that are read-only; it is made if it does not exist. Of several
    runs: ./comparison by default."""

    sample: str | None = None
    """Let the model of the last checkpoint continue this text, and show what it wrote: --sample "def "."""

    json: bool = False
    """Print the headline figures as JSON."""

    def run(self) -> int:
        if not self.folders:
            raise ConfigError("which run? give the --out of onefold train, or several to compare")
        if self.out is not None and self.out.suffix == ".html":
            raise ConfigError(f"--out {self.out} is no folder: report.html and its charts are written into one")
        if self.sample is not None:
            from onefold.train.run.sample import add_sample  # which takes torch seconds to load

            for folder in self.folders:
                add_sample(folder, self.sample)
        first, *others = self.folders
        if others:
            page = write_runs(self.folders, self.out or Path("comparison"))
            said = compared({str(folder): folder for folder in self.folders}) if self.json else {}
        else:
            page = write_any(first, self.out)
            said = _figures(first) if self.json else {}
        if self.json:
            sys.stdout.write(json.dumps(_strict(said | {"page": str(page)}), indent=1) + "\n")
        else:
            sys.stdout.write(f"{visible(page)}\n")
        return 0


def _figures(folder: Path) -> dict[str, Any]:
    if is_comparison(folder):
        return compared({path.name: path for path in run_folders(folder)})
    return headline(read_run(folder))._asdict()


def compared(folders: dict[str, Path]) -> dict[str, Any]:
    """The figures of each run by its name, and how far apart they are."""
    runs = {name: read_run(path) for name, path in folders.items()}
    together = agreement(list(runs.values()))
    return {
        "runs": {name: headline(run)._asdict() for name, run in runs.items()},
        "agreement": together._asdict() | {"bitwise": together.bitwise},
    }


def _strict(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
