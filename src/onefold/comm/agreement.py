"""Checks that all ranks have the same model, settings and parameters; if not, every rank raises the same error.

Each rank describes itself in lines of text. Digests of the lines are compared first, in one all-reduce whose size does
not depend on the number of ranks; only if they differ are the lines exchanged, to name the rank and the first line that
differs. A rank that has failed says so there and then sends its error, so that its peers raise too and do not wait.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from onefold.comm.communicator import Comm, Comms
from onefold.comm.inflight import adopt_orphans, has_orphans
from onefold.comm.meter import Label
from onefold.errors import MismatchError

AGREE = Label("agree", "the model")
DIGEST = hashlib.sha256().digest_size
T = TypeVar("T")


def digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


SAME_MODEL = "build the same model with the same settings on every rank"


def agree(
    comm: Comm,
    lines: Sequence[str],
    error: Exception | None = None,
    *,
    where: str = "shard()",
    remedy: str = SAME_MODEL,
) -> None:
    """Raises on every rank if one rank has an `error`, or if the lines differ between ranks. Collective."""
    mine = b"" if error else hashlib.sha256("\n".join(lines).encode()).digest()
    said = bytes([error is not None]) + (mine + bytes(255 - byte for byte in mine)).ljust(2 * DIGEST, b"\0")
    heard = comm.all_reduce_max(said, AGREE)
    if heard[0]:
        failed = f"{type(error).__name__}: {error}" if error else ""
        errors = [row.decode() for row in comm.exchange(failed.encode(), AGREE)]
        if error:
            raise error
        row = next(i for i, text in enumerate(errors) if text)
        raise MismatchError(f"rank {comm.world_rank(row)} failed in {where}, so no rank goes on: {errors[row]}")
    if any(high + low != 255 for high, low in zip(heard[1 : 1 + DIGEST], heard[1 + DIGEST :], strict=True)):
        everyone = [row.decode().split("\n") if row else [] for row in comm.exchange("\n".join(lines).encode(), AGREE)]
        raise MismatchError(first_difference(everyone, [comm.world_rank(row) for row in range(comm.size)], remedy))


def on_all(comm: Comm, work: Callable[[], T], where: str = "shard()") -> T:
    """What `work` returns, once it has gone well on every rank; where it raises for some, all raise. Collective."""
    error: Exception | None = None
    found: list[T] = []
    try:
        found.append(work())
    except Exception as mistake:  # whatever it is, the other ranks must hear of it
        error = mistake
    agree(comm, [], error, where=where)
    return found[0]


def together(comms: Comms, work: Callable[[], T], *, where: str = "shard()") -> T:
    """Do something that ranks of equal "tp" and "pp" coordinates agree on by themselves; where it raises for some, all
    ranks of the mesh raise. Collective."""
    return work() if comms.world is comms.everyone else on_all(comms.world, work, where=where)


def agree_on_salt(comm: Comm) -> int:
    """A random number that rank 0 has drawn for this model, to tell its messages from another model's. Collective."""
    return int.from_bytes(comm.broadcast_bytes(os.urandom(4), AGREE), "big")


def number_messages(comms: Comms) -> None:
    """Give this model's messages a number that no other model has, and forget what is left of models that are gone.
    Collective."""
    salt = agree_on_salt(comms.world)
    for comm in comms:
        comm.salt = salt
    comms.shard.posted.model = str(salt)
    left_over = Label("agree", "what is left over")
    if comms.world.all_reduce_max(bytes([has_orphans()]), left_over)[0]:
        adopt_orphans(lambda blob: comms.world.exchange(blob, left_over), comms.world.timeout)


def first_difference(everyone: Sequence[Sequence[str]], ranks: Sequence[int], remedy: str = SAME_MODEL) -> str:
    """An error message that names the first rank whose lines differ from the first rank's, and the line."""
    ours, first = everyone[0], ranks[0]
    for rank, theirs in zip(ranks, everyone, strict=True):
        for i in range(max(len(ours), len(theirs))):
            mine = ours[i] if i < len(ours) else "nothing more"
            other = theirs[i] if i < len(theirs) else "nothing more"
            if mine != other:
                return (
                    f"rank {rank} differs from rank {first}: rank {rank} has [{other}], rank {first} has [{mine}]; "
                    f"{remedy}"
                )
    raise AssertionError("digests differ but lines do not")


def compare_values(comm: Comm, named: Sequence[tuple[str, Tensor]]) -> None:
    """Raises on every rank, naming the tensor, unless all ranks have the same bits. Collective."""
    lines = [f"values of {name}: sha256 {fingerprint(tensor)}" for name, tensor in named]
    agree(comm, lines)


def fingerprint(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous()
    memory = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr()) if flat.nbytes else b""
    return hashlib.sha256(memory).hexdigest()[:16]
