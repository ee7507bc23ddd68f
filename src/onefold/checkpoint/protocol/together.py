"""Steps of a save or load that succeed on all ranks or on none: if one fails, every rank raises the same error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import onefold.errors as errors
from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.errors import CheckpointError, OnefoldError

CHECKPOINT = Label("checkpoint", "the state")


def attempt(comm: Comm, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` on each rank, and returns the results of all, through JSON. If it raises on some rank, all ranks
    raise the error of the first of them. Collective."""
    cause: Exception | None = None
    said: dict[str, Any] = {}
    try:
        said = {"value": work()}
        blob = json.dumps(said).encode()
    except Exception as error:  # all ranks raise it
        ours = (kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
        cause, blob = error, json.dumps({"error": [next(ours, type(error)).__name__, str(error)]}).encode()
    rows = [json.loads(row) for row in comm.exchange(blob, CHECKPOINT)]
    failed = next((rank for rank, row in enumerate(rows) if "error" in row), None)
    if failed is not None:
        name, message = rows[failed]["error"]
        raise _same(name, message, comm.world_rank(failed)) from cause
    return [row["value"] for row in rows]


def _same(name: str, message: str, rank: int) -> Exception:
    """The error of another rank: of the same class if that is Onefold's, else a CheckpointError."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, OnefoldError):
        return kind(f"rank {rank}: {message}")
    return CheckpointError(f"rank {rank}: {name}: {message}")


def check_same(comm: Comm, asked: list[Any], verb: str, settings: str) -> None:
    """Raises on every rank, naming the first rank whose arguments differ from rank 0's."""
    for rank, row in enumerate(asked):
        if row != asked[0]:
            raise CheckpointError(
                f"rank {comm.world_rank(rank)} {verb} {row} and rank {comm.world_rank(0)} {asked[0]} ({settings}); "
                f"give the same on every rank"
            )
