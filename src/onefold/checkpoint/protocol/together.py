"""Steps that all ranks take or none: where one fails, every rank raises the same error with the same words."""

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
    """What `work` gives on each rank, as JSON carries it. If it raises anywhere, all raise what the first rank did."""
    cause: Exception | None = None
    said: dict[str, Any] = {}
    try:
        said = {"value": work()}
        blob = json.dumps(said).encode()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        cause, blob = error, json.dumps({"error": [type(error).__name__, str(error)]}).encode()
    rows = [json.loads(row) for row in comm.exchange(blob, CHECKPOINT)]
    failed = next((rank for rank, row in enumerate(rows) if "error" in row), None)
    if failed is not None:
        name, message = rows[failed]["error"]
        raise _same(name, message, comm.world_rank(failed)) from cause
    return [row["value"] for row in rows]


def _same(name: str, message: str, rank: int) -> Exception:
    """The error under its own name if it is one of ours."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, OnefoldError):
        return kind(f"rank {rank}: {message}")
    return CheckpointError(f"rank {rank}: {name}: {message}")


def check_same(comm: Comm, asked: list[Any], verb: str, settings: str) -> None:
    """Every rank asks for the same, or all raise who does not."""
    for rank, row in enumerate(asked):
        if row != asked[0]:
            raise CheckpointError(
                f"rank {comm.world_rank(rank)} {verb} {row} and rank {comm.world_rank(0)} {asked[0]} ({settings}); "
                f"give the same on every rank"
            )
