"""A rank that dies, stalls or raises: its peers end with an error that names it and what they waited for, and soon."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import onefold
from onefold import CommError
from tests.faults.test_harness_faults import is_gone
from tests.harness import fresh_ranks, start_ranks, tell

RANKS = 3
LOST = 1  # the rank that something happens to
PROMPT_S = 10.0  # far below the library's default of 600 s, far above what a busy machine needs
STALL_TIMEOUT_S = 2.0


class Seen(NamedTuple):
    """What a survivor got."""

    message: str
    seconds: float  # since the peer was last there


class Loop:
    """A model in training; `before` is called with the name of each phase and the step."""

    def __init__(self, stage: int, before: Callable[[str, int], None], **fields: object) -> None:
        self.before = before
        before("shard", 0)
        model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 4))
        self.model = onefold.shard(model, stage=stage, bucket_bytes=4096, **fields)
        self.optimizer = onefold.Optimizer(self.model, torch.optim.AdamW, lr=1e-3)

    def run(self, steps: int) -> None:
        for step in range(steps):
            self.before("forward", step)
            loss = self.model(torch.randn(4, 8)).sum()
            self.before("backward", step)
            loss.backward()
            self.before("clip", step)
            self.optimizer.clip_grad_norm(1.0)
            self.before("step", step)
            self.optimizer.step()
            self.optimizer.zero_grad()


# -- killed ------------------------------------------------------------------------------------------------------------


def train_until_killed(stage: int) -> None:
    def before(phase: str, step: int) -> None:
        if (phase, step) == ("forward", 5):
            tell("training")

    Loop(stage, before).run(1_000_000)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_when_a_rank_is_killed_in_training_every_peer_ends_soon_and_names_it(stage: int) -> None:
    with start_ranks(RANKS, train_until_killed, stage) as group:
        for rank in range(RANKS):
            assert group.message(rank) == "training"
        group.kill(LOST)
        killed_s = time.monotonic()
        outcomes = group.join()
        assert time.monotonic() - killed_s < PROMPT_S
    assert all(is_gone(pid) for pid in group.pids)
    assert outcomes[LOST].exitcode == -signal.SIGKILL
    last_lines = [o.error.strip().splitlines()[-1] for o in outcomes if o.rank != LOST]
    for rank, line in zip([0, 2], last_lines, strict=True):
        assert line.startswith(f"onefold.errors.CommError: rank {rank}: "), line
        assert any(purpose in line for purpose in ("reduce of ", "gather-", "used-flags of ", "norm of ")), line
        # a survivor may hear of the other survivor's end first, and names that one
        assert any(f"rank {peer}" in line.split(": ", 2)[2] for peer in range(RANKS) if peer != rank), line
    assert any(f"rank {LOST}" in line for line in last_lines), last_lines


def survive(at: tuple[str, int]) -> None:
    """Rank LOST dies at a known point; the others stay alive after their error, as a script that catches it would."""

    def before(phase: str, step: int) -> None:
        if (phase, step) == at:
            if dist.get_rank() == LOST:
                os.kill(os.getpid(), signal.SIGKILL)
            if dist.get_rank() == 0:
                time.sleep(0.3)  # comes when the death is known already, after rank 2 has begun to wait

    started_s = time.monotonic()
    try:
        Loop(2, before).run(10)
    except CommError as error:
        tell(Seen(str(error), time.monotonic() - started_s))
    threading.Event().wait()


@pytest.mark.parametrize("at", [("shard", 0), ("backward", 2), ("step", 2)], ids=str)
def test_a_peer_hears_of_a_death_even_where_the_other_survivors_live_on(at: tuple[str, int]) -> None:
    with start_ranks(RANKS, survive, at, timeout_s=PROMPT_S) as group:
        for rank in (0, 2):
            seen = group.message(rank)
            assert seen.message.startswith(f"rank {rank}: ")
            assert f"rank {LOST}" in seen.message, seen


# -- stalled -----------------------------------------------------------------------------------------------------------


def stall(stage: int, at: tuple[str, int], who: int, buffers: str) -> None:
    waiting_since_s = time.monotonic()
    dist.barrier()  # what ranks take to start is not part of it

    def before(phase: str, step: int) -> None:
        nonlocal waiting_since_s
        waiting_since_s = time.monotonic()
        if dist.get_rank() == who and (phase, step) == at:
            threading.Event().wait()

    try:
        Loop(stage, before, timeout_s=STALL_TIMEOUT_S, buffers=buffers).run(10)
    except CommError as error:
        tell(Seen(str(error), time.monotonic() - waiting_since_s))
    threading.Event().wait()  # so that nobody is told by a closed connection


STALLS = [
    (2, ("shard", 0), LOST, "local", "agree of the model"),
    pytest.param(0, ("backward", 1), LOST, "local", "reduce of ", marks=pytest.mark.soak),
    (2, ("backward", 1), LOST, "local", "reduce of "),
    (2, ("step", 1), LOST, "local", "gather-updated of "),
    (2, ("forward", 1), 0, "rank0", "buffers of the model"),
]


@pytest.mark.parametrize("stage, at, who, buffers, waited_for", STALLS, ids=str)
def test_when_a_rank_stalls_its_peers_raise_after_timeout_s_and_name_it(
    stage: int, at: tuple[str, int], who: int, buffers: str, waited_for: str
) -> None:
    with start_ranks(RANKS, stall, stage, at, who, buffers, timeout_s=20) as group:
        for rank in range(RANKS):
            if rank != who:
                seen = group.message(rank)
                assert seen.seconds < STALL_TIMEOUT_S + 4, seen
                assert seen.message.startswith(f"rank {rank}: {waited_for}"), seen
                assert f"got no answer from rank {who} within {STALL_TIMEOUT_S:g} s" in seen.message, seen
    assert all(is_gone(pid) for pid in group.pids)


# -- raised ------------------------------------------------------------------------------------------------------------


def raise_in(at: tuple[str, int]) -> None:
    def before(phase: str, step: int) -> None:
        if dist.get_rank() == LOST and (phase, step) == at:
            raise ValueError("a bad batch")

    onefold.init()
    loop = Loop(2, before)
    if at[0] == "inside forward":
        loop.model[2].register_forward_hook(lambda *_: before(*at))
    if at[0] == "inside backward":
        loop.model[0].register_full_backward_hook(lambda *_: before(*at))
    try:
        loop.run(10)
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)  # as Python does at the end of a script
        raise


@pytest.mark.parametrize("at", [("inside forward", 0), ("inside backward", 0), ("step", 2)], ids=str)
def test_when_a_rank_raises_its_peers_end_too_and_their_errors_begin_with_its_own(at: tuple[str, int]) -> None:
    started_s = time.monotonic()
    outcomes = fresh_ranks(RANKS, raise_in, at)
    assert time.monotonic() - started_s < 2 * PROMPT_S
    assert [outcome.exitcode for outcome in outcomes] == [1] * RANKS
    assert "ValueError: a bad batch" in outcomes[LOST].error
    for rank in (0, 2):
        assert f"CommError: rank {rank}: rank {LOST} has ended by ValueError: a bad batch" in outcomes[rank].error
