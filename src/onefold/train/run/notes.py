"""Warnings of all ranks, each said once, by rank 0."""

from __future__ import annotations

import json
from pathlib import Path

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.train.run.diagnose import Finding
from onefold.train.run.folder import append_lines
from onefold.train.run.metrics import Listener

LABEL = Label("train", "warnings")


class Notes:
    """What this rank has noticed and not told yet."""

    def __init__(self, comm: Comm, path: Path) -> None:
        self._comm, self._path = comm, path
        self._waiting: list[Finding] = []
        self._kinds: set[str] = set()  # of findings, of which one each is enough
        self._said: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def note(self, kind: str, message: str) -> None:
        self._waiting.append(Finding(kind, message))

    def found(self, finding: Finding | None) -> None:
        """By a diagnosis, if it found anything."""
        if finding is not None and finding.kind not in self._kinds:
            self._kinds.add(finding.kind)
            self._waiting.append(finding)

    def tell(self, step: int, listener: Listener) -> None:
        """Bring them to rank 0. Collective."""
        everyone = [json.loads(row) for row in self._comm.exchange(json.dumps(self._waiting).encode(), LABEL)]
        self._waiting = []
        ranks_of: dict[tuple[str, str], list[int]] = {}
        for rank, notes in enumerate(everyone):
            for kind, message in notes:
                ranks_of.setdefault((kind, message), []).append(rank)
        for (kind, message), ranks in ranks_of.items():
            if self._comm.rank == 0 and (kind, message) not in self._said:
                self._said.add((kind, message))
                rows = [{"step": step, "rank": rank, "kind": kind, "message": message} for rank in dict.fromkeys(ranks)]
                append_lines(self._path, rows)
                listener.warned(list(dict.fromkeys(ranks)), kind, message)
