"""A save of several ranks in one process: the protocol as it is, in the order in which ranks may come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from onefold.checkpoint.format.manifest import (
    Entry,
    Manifest,
    ParamRecord,
    block_of,
    merge_rank_parts,
    rank_part_to_json,
)
from onefold.checkpoint.format.reading import Checkpoint
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import write_tensors
from onefold.checkpoint.protocol.commit import begin, commit, retain
from onefold.checkpoint.protocol.draft import Draft
from onefold.cost.layout import Span

NUMEL = 120  # of each state; any number of ranks up to five divides it


def record(name: str = "w") -> ParamRecord:
    return ParamRecord(name, "trained", (NUMEL // 2, 2), (2, 1), {"value": "F32", "exp_avg": "F32"}, {"step": 3})


def expected(step: int, state: str) -> torch.Tensor:
    return torch.arange(NUMEL, dtype=torch.float32) + 1000.0 * step + (0.5 if state == "exp_avg" else 0.0)


def write_rank(storage: Storage, draft: Draft, rank: int, ranks: int, name: str = "w") -> str:
    """What one rank does between begin and commit."""
    size = NUMEL // ranks
    entries = [Entry(name, state, rank * size, (rank + 1) * size, "") for state in ("value", "exp_avg")]

    def chunks() -> Iterator[torch.Tensor]:
        for entry in entries:
            yield from expected(draft.step, entry.state)[entry.start : entry.stop].split(-(-size // 2))

    blocks = [block_of(entry, record(name)) for entry in entries]
    written = write_tensors(storage, draft.file(rank), blocks, chunks())
    return rank_part_to_json(written, entries, [record(name)])


def finish(storage: Storage, draft: Draft, parts: list[str], keep: int | None = None) -> Path:
    """What rank 0 does in the end."""
    bare = Manifest(draft.step, len(parts), (), (), (), extra={"step": draft.step})
    folder = commit(storage, draft, merge_rank_parts(parts, bare))
    retain(storage, draft.run, keep)
    return folder


def save(storage: Storage, run: Path, step: int, ranks: int = 3, keep: int | None = None, name: str = "w") -> Path:
    draft = begin(storage, run, step)
    return finish(storage, draft, [write_rank(storage, draft, rank, ranks, name) for rank in range(ranks)], keep)


def load(storage: Storage, folder: Path) -> int:
    """The step of a checkpoint all of which was read and is right."""
    checkpoint = Checkpoint(storage, folder)
    step = checkpoint.manifest.step
    for state in ("value", "exp_avg"):
        out = torch.empty(NUMEL)
        checkpoint.read("w", Span(0, NUMEL), out, state)
        assert torch.equal(out, expected(step, state))
    assert checkpoint.manifest.extra == {"step": step}
    return step
