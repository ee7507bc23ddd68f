"""`onefold doctor`: what the records that ranks wrote at a hang say together, in three lines."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from onefold.errors import visible
from onefold.observe.hang import explain, read_records


@dataclass(frozen=True)
class Doctor:
    """Say who kept a run from going on, from the records that its ranks wrote (ONEFOLD_RECORDS)."""

    folder: tyro.conf.Positional[Path]
    """The folder of the records, or the --out of `onefold train`."""
    json: bool = False
    """Print all records as JSON."""

    def run(self) -> int:
        records = read_records(self.folder)
        if self.json:
            sys.stdout.write(json.dumps([asdict(record) for record in records], indent=1) + "\n")
        else:
            sys.stdout.write("".join(f"{visible(line)}\n" for line in explain(records)))
        return 0
