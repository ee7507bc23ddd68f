"""Warnings of all ranks: rank 0 collects them, and writes and prints each once."""

from __future__ import annotations

import json
from pathlib import Path

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.train.run.diagnose import Finding
from onefold.train.run.folder import append_lines
from onefold.train.run.metrics import Listener

LABEL = Label("train", "warnings")


class RankWarnings:
    """Warnings of this rank that rank 0 does not know yet."""

    def __init__(self, comm: Comm, path: Path) -> None:
        self._comm, self._path = comm, path
        self._waiting: list[Finding] = []
        self._kinds: set[str] = set()  # of findings that were added: one of each kind is enough
        self._said: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, kind: str, message: str) -> None:
        self._waiting.append(Finding(kind, message))

    def add_finding(self, finding: Finding | None) -> None:
        """Adds what a diagnosis found, once per kind; None adds nothing."""
        if finding is not None and finding.kind not in self._kinds:
            self._kinds.add(finding.kind)
            self._waiting.append(finding)

    def tell(self, step: int, listener: Listener) -> None:
        """Sends the warnings to rank 0, which writes and prints those that are new. Collective."""
        everyone = [json.loads(row) for row in self._comm.exchange(json.dumps(self._waiting).encode(), LABEL)]
        self._waiting = []
        ranks_of: dict[tuple[str, str], list[int]] = {}
        for rank, warnings in enumerate(everyone):
            for kind, message in warnings:
                ranks_of.setdefault((kind, message), []).append(rank)
        for (kind, message), ranks in ranks_of.items():
            if self._comm.rank == 0 and (kind, message) not in self._said:
                self._said.add((kind, message))
                rows = [{"step": step, "rank": rank, "kind": kind, "message": message} for rank in dict.fromkeys(ranks)]
                append_lines(self._path, rows)
                listener.warned(list(dict.fromkeys(ranks)), kind, message)
