"""`onefold report`: a run as one HTML page, or its headline figures as JSON."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from onefold.errors import visible
from onefold.train.report.figures import agreement, headline, read_run
from onefold.train.report.report import is_comparison, write_any
from onefold.train.run.records import run_folders


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Write report.html, one page that needs nothing else, and its charts as PNG files into a run's folder."""

    folder: tyro.conf.Positional[Path]
    """The --out of `onefold train`; with --compare, the folder that holds stage-0, stage-1, …"""

    out: Path | None = None
    """Write into this folder instead, for run folders that are read-only; it is made if it does not exist."""

    json: bool = False
    """Print the headline figures as JSON."""

    def run(self) -> int:
        page = write_any(self.folder, self.out)
        if self.json:
            said = compared(self.folder) if is_comparison(self.folder) else headline(read_run(self.folder))._asdict()
            sys.stdout.write(json.dumps(_strict(said | {"page": str(page)}), indent=1) + "\n")
        else:
            sys.stdout.write(f"{visible(page)}\n")
        return 0


def compared(folder: Path) -> dict[str, Any]:
    """The figures of each run by its folder, and how far apart they are."""
    runs = [read_run(path) for path in run_folders(folder)]
    together = agreement(runs)
    return {
        "runs": {run.folder.name: headline(run)._asdict() for run in runs},
        "agreement": together._asdict() | {"bitwise": together.bitwise},
    }


def _strict(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by null."""
    if isinstance(value, dict):
        return {key: _strict(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
