"""Starts a command again as local ranks, through torch's own launcher, unless it is one of them already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULT = "ONEFOLD_RESULT"  # the file in which rank 0 leaves what it found


def is_rank() -> bool:
    return "RANK" in os.environ


def run_ranks(ranks: int, arguments: Sequence[str]) -> Any:
    """Run `onefold ARGUMENTS` on `ranks` local processes; what rank 0 left, or None if it did not come to that."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        environment = {"OMP_NUM_THREADS": "1", **os.environ, RESULT: str(result)}
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
            "-m", "onefold.cli.main", *arguments,
        ]  # fmt: skip
        subprocess.run(command, env=environment, check=False)
        return json.loads(result.read_text()) if result.exists() else None


def leave(result: Any) -> None:
    """Of rank 0, for the process that started the ranks."""
    if os.environ.get("RANK") == "0" and RESULT in os.environ:
        Path(os.environ[RESULT]).write_text(json.dumps(result))
