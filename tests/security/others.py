"""Another user of the machine: processes that run as nobody, for tests that play the attacker or the neighbour."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = 65534
ROOT = Path(__file__).parents[2]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start a process of another user")
NO_CORE_LIMITS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}


def as_user(uid: int, *command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a command to its end as this user, with that user's rights alone."""
    return subprocess.run(
        command, capture_output=True, timeout=120, user=uid, group=uid, extra_groups=[], cwd="/",
        env={**os.environ, **NO_CORE_LIMITS, "HOME": "/nonexistent", **environment},
    )  # fmt: skip


def onefold(*arguments: str, uid: int = os.geteuid(), **environment: str) -> subprocess.CompletedProcess[bytes]:
    return as_user(uid, sys.executable, "-m", "onefold.cli.main", *arguments, **environment)


def python(code: str, *arguments: str, uid: int = os.geteuid(), **env: str) -> subprocess.CompletedProcess[bytes]:
    return as_user(uid, sys.executable, "-c", code, *arguments, **env)
