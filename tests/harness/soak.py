"""What long-running tests did: each counts its trials, and `--soak-record FILE` gets a line for each such test.

    @pytest.mark.trials_of("bit flips")               # one of tools.soak_table.KINDS
    def test_every_flipped_bit_is_found(soak):
        for _ in range(soak.number(200, 2000)):       # without --soak, with it
            ...
            soak.tried()                              # one more trial, in which the promise held

`python -m tools.soak_table FILE` makes the table of docs/results/soak.md of such a file.
"""

from __future__ import annotations

import json
import os
import platform
from datetime import datetime, timezone
from pathlib import Path

import torch

from tools.soak_table import KINDS


class Soak:
    """Counts what one test has tried."""

    def __init__(self, kind: str, long: bool) -> None:
        assert kind in KINDS, f"{kind} is not one of {list(KINDS)}"
        self._kind, self._long, self._trials = kind, long, 0

    def number(self, plain: int, long: int) -> int:
        """How often to try: in every run, with --soak."""
        return long if self._long else plain

    def tried(self, count: int = 1) -> None:
        self._trials += count

    def write(self, path: Path, test: str, outcome: str, seconds: float) -> None:
        row = {
            "kind": self._kind, "trials": self._trials, "outcome": outcome, "seconds": round(seconds, 1), "test": test,
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"), "machine": machine(),
        }  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:  # one short line, appended at once: workers share the file
            file.write(json.dumps(row) + "\n")


def machine() -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}"
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{os.cpu_count()} cores ({platform.machine()}){gpu}, {platform.system()}, {versions}"
