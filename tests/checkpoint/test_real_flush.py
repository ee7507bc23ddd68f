"""Storage flushes and renames for real what the model disk of test_power_loss.py believes it does."""

import os
from pathlib import Path

from onefold.checkpoint.format import storage as module
from onefold.checkpoint.format.storage import Storage
from tests.checkpoint.drive import save


def test_every_flush_reaches_the_system(tmp_path, monkeypatch):
    asked: list[tuple[str, str]] = []
    done: list[tuple[str, str]] = []
    fsync = os.fsync

    class Asked(Storage):
        def at(self, operation: str, path: Path) -> None:
            if operation in ("finish", "sync_folder"):
                asked.append(("fsync", str(path)))

    def seen(file: int) -> None:
        done.append(("fsync", os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    monkeypatch.setattr(module.os, "fsync", seen)
    for step in range(1, 4):
        save(Asked(), tmp_path / "run", step, ranks=2, keep=1)
    assert asked and done == asked
