"""Flags of all ranks: at every place the largest byte, in messages that do not grow with the number of ranks."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from onefold.comm.communicator import Comm
from onefold.comm.mesh import axes_of
from onefold.comm.meter import Flow, Label, Meter
from onefold.comm.strategy import max_rounds
from tests.harness import run_ranks

ONE, OTHER = Label("used-flags", "one"), Label("used-flags", "other")


class Heard(NamedTuple):
    largest: bytes
    late: bytes
    early: bytes
    nothing: bytes
    from_first: list[bytes]
    sent: Flow


def flags(rank: int, seed: int, size: int = 1000) -> bytes:
    return random.Random(f"{rank} {seed}").randbytes(size)


def largest(ranks: int, seed: int) -> bytes:
    return bytes(map(max, zip(*(flags(rank, seed) for rank in range(ranks)), strict=True)))


def hear() -> Heard:
    axis = axes_of(None).world
    comm = Comm(axis, torch.device("cpu"), 20.0, Meter())
    now = comm.all_reduce_max(flags(axis.rank, 0), ONE)
    first = comm.start_all_reduce_max(flags(axis.rank, 1), ONE)
    second = comm.start_all_reduce_max(flags(axis.rank, 2), OTHER)
    late = second()  # before the first
    early = first()
    sent = comm.meter.running["used-flags", "all-reduce"]
    told = [comm.broadcast_bytes(blob, ONE) for blob in (flags(axis.rank, 3, 7 + axis.rank), b"")]
    return Heard(now, late, early, comm.all_reduce_max(b"", ONE), told, sent)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_every_rank_hears_the_largest_byte_of_all_at_every_place(ranks: int) -> None:
    for heard in run_ranks(ranks, hear):
        assert heard.largest == largest(ranks, 0)
        assert (heard.early, heard.late) == (largest(ranks, 1), largest(ranks, 2))
        assert heard.nothing == b""
        assert heard.from_first == [flags(0, 3, 7), b""]
        assert heard.sent == Flow(3 * 1000 * max_rounds(ranks), 3)
