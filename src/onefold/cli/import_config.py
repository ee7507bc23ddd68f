"""`onefold import-config`: every key of a DeepSpeed configuration, and what becomes of it under Onefold."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from onefold.cli.tables import console
from onefold.errors import visible
from onefold.integrations.deepspeed_config import read_config
from onefold.integrations.deepspeed_reading import Key, Outcome

MOST = 24  # characters of a value


@dataclass(frozen=True)
class ImportConfig:
    """Say what becomes of every key of a DeepSpeed configuration. Exit code 1 if one is refused."""

    config: tyro.conf.Positional[Path]
    """A ds_config.json."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        keys = read_config(self.config).keys
        if self.json:
            rows = [key._asdict() | {"outcome": key.outcome.value} for key in keys]
            sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        else:
            _show(keys)
        return int(any(key.outcome is Outcome.REFUSED for key in keys))


def _show(keys: list[Key]) -> None:
    """One group for each outcome: those that change a run first."""
    screen = console()
    for outcome in (Outcome.REFUSED, Outcome.OPEN, Outcome.BECAME, Outcome.YOURS, Outcome.NOT_NEEDED):
        found = [key for key in keys if key.outcome is outcome]
        if found:
            screen.print(f"{outcome.value}:", markup=False, style="bold")
        for key in found:
            value = visible(json.dumps(key.value))
            shown = value if len(value) <= MOST else value[: MOST - 1] + "…"
            screen.print(f"  {visible(key.path)}: {shown}", markup=False, soft_wrap=True)
            screen.print(f"      {visible(key.text)}", markup=False, soft_wrap=True)
