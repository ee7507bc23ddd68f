"""A rank that is killed, stopped or exits in a step over real NCCL: every survivor names it and ends in time.

Three ranks share one GPU, each as if on a host of its own, so that NCCL lets them. Points rotate over kinds of fault,
ranks and stages.

    pytest -n 0 --soak tests/nccl/test_faults.py                    # alone on the GPU: also compares its free memory
    pytest -n 3 --dist load --soak tests/nccl/test_faults.py        # ranks take turns on the GPU: limits may be missed
    ONEFOLD_TEST_NCCL_ON=cpu pytest -n 0 tests/nccl/test_faults.py  # the same faults among gloo ranks
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

import onefold
from onefold import CommError
from tests.faults.test_harness_faults import is_gone
from tests.faults.test_watcher import end_as_a_script
from tests.harness import RankFailure, device, start_ranks, tell
from tests.harness.patience import queued
from tests.harness.soak import Soak
from tests.nccl.ranks import FRESH, MARKS, ON_CPU, be_a_host

pytestmark = MARKS

RANKS, BLOCKS = 3, 4
TIMEOUT_S = 4.0
SLACK_S = 2.0
AT_STEP = 2  # by then schedules are learnt and buffers are reused
ALONE = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"  # else ranks of other workers are on the GPU, too
FREED_WITHIN_S, SLACK_BYTES = 20.0, 64 << 20  # of the driver, for the memory of a process that was killed

FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exits": lambda: end_as_a_script(SystemExit(3), 3),
}
POINTS = [
    "forward", "loss", "backward", "clip", "step", "stepped",
    *(f"{when} {block}" for block in range(BLOCKS) for when in ("into", "out of", "back into", "back out of")),
    "updated", "evaluation",
]  # fmt: skip


class Case(NamedTuple):
    point: str
    fault: str
    lost: int
    stage: int


CASES = [
    Case(point, list(FAULTS)[at % 3], (at // 3 + at) % RANKS, 2 + (at // 2) % 2) for at, point in enumerate(POINTS)
]


def train(case: Case, folder: str) -> None:
    rank = int(os.environ["RANK"])
    be_a_host()
    os.dup2(os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY), 2)
    onefold.init(timeout_s=60)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(BLOCKS)), nn.Linear(256, 8)).to(device())
    model = onefold.shard(model, stage=case.stage, timeout_s=TIMEOUT_S, units=(nn.Linear,))
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    step = 0

    def at(point: str) -> None:
        if rank == case.lost and (point, step) == (case.point, AT_STEP):
            Path(folder, "began").write_text(repr(time.monotonic()))
            FAULTS[case.fault]()

    for index, block in enumerate(model[:BLOCKS]):
        block.register_forward_pre_hook(lambda *_, index=index: at(f"into {index}"))
        block.register_forward_hook(lambda *_, index=index: at(f"out of {index}"))
        block.register_full_backward_pre_hook(lambda *_, index=index: at(f"back into {index}"))
        block.register_full_backward_hook(lambda *_, index=index: at(f"back out of {index}"))
    try:
        for step in range(1_000_000):
            at("forward")
            output = model(torch.randn(4, 256, device=device(), requires_grad=True))
            at("loss")
            loss = output.square().mean()
            at("backward")
            loss.backward()
            at("clip")
            optimizer.clip_grad_norm(1.0)
            at("step")
            optimizer.step()
            at("updated")
            optimizer.zero_grad()
            at("stepped")
            if case.point == "evaluation":
                with torch.no_grad():
                    output = model(torch.randn(4, 256, device=device()))
                at("evaluation")
            if step % 8 == 7 and device() == "cuda":
                torch.cuda.synchronize()  # as a script that prints its loss
    except CommError as error:
        tell(str(error))
        end_as_a_script(error, 1)


@pytest.mark.trials_of("faults over NCCL")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)).replace(" ", "_"))
def test_survivors_of_a_fault_in_a_step_over_nccl_name_the_rank_and_end_in_time(
    case: Case, tmp_path: Path, soak: Soak
) -> None:
    free_before = free_bytes()
    survivors = [rank for rank in range(RANKS) if rank != case.lost]
    messages: dict[int, str] = {}
    how: dict[int, str] = {}
    with start_ranks(RANKS, train, case, str(tmp_path), timeout_s=90, env=FRESH, init=False) as group:
        for rank in survivors:
            with suppress(RankFailure):  # a rank whose main thread was stuck ends without a word to the test
                messages[rank] = group.message(rank)
            with pytest.raises(RankFailure) as ended:
                group.message(rank)
            how[rank] = str(ended.value)
        ended_s = time.monotonic()
        group.kill(case.lost)
        outcomes = group.join()
    took_s = ended_s - float((tmp_path / "began").read_text())
    named = {rank: messages.get(rank) or (tmp_path / str(rank)).read_text() for rank in survivors}
    right = [f"rank {case.lost} " in words.partition(f"rank {rank}: ")[2] for rank, words in named.items()]
    # Over gloo there is no watcher, and a survivor may name the other one, which waited for the lost rank.
    assert any(right) if ON_CPU else all(right), f"{named}\n{how}"
    assert [outcomes[rank].exitcode for rank in survivors] == [1, 1]
    assert took_s < TIMEOUT_S + queued(SLACK_S)
    assert all(is_gone(pid) for pid in group.pids)
    deadline_s = time.monotonic() + FREED_WITHIN_S
    while (free := free_bytes()) < free_before - SLACK_BYTES and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert free >= free_before - SLACK_BYTES, "a process is left on the GPU"
    if not ON_CPU:
        soak.tried()


def free_bytes() -> int:
    """Of the GPU's memory, where nobody else uses the GPU; else 0."""
    return torch.cuda.mem_get_info()[0] if ALONE and not ON_CPU else 0
