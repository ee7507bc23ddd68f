"""A sharded model is freed when nobody holds it, and other threads may use it."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import onefold
from onefold.comm import inflight as leftovers
from onefold.comm.agreement import fingerprint
from tests.harness import fresh_ranks, run_ranks

STAGES = (0, 1, 2, 3)


def train_and_drop(stage: int) -> bool:
    model = onefold.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), stage=stage, bucket_bytes=256)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    alive = weakref.ref(model)
    del model, optimizer
    gc.collect()
    return alive() is None


@pytest.mark.parametrize("stage", STAGES)
def test_a_model_that_nobody_holds_is_freed(stage: int) -> None:
    assert run_ranks(2, train_and_drop, stage) == [True, True]


def evaluate_and_drop() -> int:
    """Messages that are left of six models whose last pass was a forward, after a seventh was made."""
    for _ in range(6):
        model = onefold.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), stage=3, bucket_bytes=256)
        with torch.no_grad():
            model(torch.ones(2, 8))
        del model
        gc.collect()
    onefold.shard(nn.Linear(8, 8), stage=3)
    return leftovers.count()


def test_shards_of_models_that_are_gone_do_not_pile_up() -> None:
    for outcome in fresh_ranks(2, evaluate_and_drop):
        assert outcome.value == 0, outcome.error


def evaluate_and_shut_down() -> tuple[int, int, float]:
    """Orphaned shards before shutdown() and after it, and the seconds that another wait for them takes."""
    model = onefold.shard(nn.Linear(8, 8), stage=3)
    with torch.no_grad():
        model(torch.ones(2, 8))
    del model
    gc.collect()
    before = leftovers.count()
    onefold.shutdown()
    began_s = time.monotonic()
    leftovers.serve_peers()  # as at the end of the process
    return before, leftovers.count(), time.monotonic() - began_s


def test_a_process_that_has_shut_down_ends_without_waiting_for_messages_again() -> None:
    for outcome in fresh_ranks(2, evaluate_and_shut_down):
        assert outcome.value is not None, outcome.error
        before, after, waited_s = outcome.value
        assert (before, after) == (1, 0) and waited_s < leftovers.PATIENCE_S / 2


def train_beside_a_reader(with_reader: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model = onefold.shard(nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))), stage=2, bucket_bytes=1, timeout_s=20)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=1e-2)
    stop = threading.Event()

    def read() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model(torch.ones(4, 32))

    reader = threading.Thread(target=read, daemon=True)
    if with_reader:
        reader.start()
    for step in range(30):
        model(torch.full((8, 32), float(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    stop.set()
    if with_reader:
        reader.join()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_forward_in_another_thread_does_not_disturb_training() -> None:
    alone, beside = run_ranks(2, train_beside_a_reader, False), run_ranks(2, train_beside_a_reader, True)
    assert torch.equal(alone[0], beside[0])


def test_comparing_values_reads_memory_at_memory_speed() -> None:
    """A loop over bytes would take minutes."""
    start = time.perf_counter()
    fingerprint(torch.zeros(16 << 20))
    assert time.perf_counter() - start < 10
