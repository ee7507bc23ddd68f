"""Saves in the background: training goes on, one at a time, and nothing that goes wrong is lost."""

from __future__ import annotations

import errno
import logging
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onefold
from onefold.checkpoint.format.folder import committed
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.protocol.background import WORKER
from onefold.checkpoint.protocol.save import save_on
from onefold.offload import host_memory as memory
from tests.checkpoint.test_ranks_agree import said, small, step, weights
from tests.harness import fresh_ranks, run_ranks
from tests.harness.patience import PATIENCE_S
from tests.harness.python import start_python

TIMEOUT_S = 2.5


class Stuck(Storage):
    """A disk that does not answer until it is let go."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.log: list[tuple[str, str]] = []

    def at(self, operation: str, path: Path) -> None:
        self.log.append((operation, path.name))
        if operation == "create":  # nothing has been read of the state yet
            self.reached.set()
            assert self.go_on.wait(60)


class Broken(Storage):
    def at(self, operation: str, path: Path) -> None:
        if operation == "finish":
            raise OSError(errno.EIO, "the cable is out")


def train_beside_a_stuck_disk(folder: str) -> tuple[int, float, list[int], bool]:
    """Only rank 1's disk is stuck, for longer than training waits for anything."""
    onefold.init()
    model, optimizer = small(timeout_s=TIMEOUT_S)
    step(model, optimizer)
    saved = weights(model)
    storage = Stuck() if dist.get_rank() == 1 else Storage()
    started = time.monotonic()
    save_on(storage, folder, model, optimizer, extra="then", wait=False)
    stall_s = time.monotonic() - started
    steps = 0
    more = torch.ones(())
    while more.item() or steps < 20:
        for _ in range(10):
            step(model, optimizer)
        steps += 10
        more.fill_(time.monotonic() - started < 1.5 * TIMEOUT_S)
        dist.broadcast(more, 0)  # rank 0's clock decides, so that all ranks make as many steps
    before = committed(Storage(), Path(folder)) if Path(folder).exists() else []
    if dist.get_rank() == 1:
        storage.reached.wait(30)
        storage.go_on.set()
    onefold.finish_saves()
    onefold.load(folder, model, optimizer)
    return steps, stall_s, before, weights(model) == saved


def test_a_stuck_disk_neither_stalls_training_nor_trips_its_timeouts(tmp_path):
    for steps, stall_s, before, right in run_ranks(2, train_beside_a_stuck_disk, str(tmp_path / "run")):
        assert steps >= 20
        assert stall_s < TIMEOUT_S
        assert before == []
        assert right, "what is saved is the moment of the call, not of the writing"


def fail_in_the_background(folder: str) -> list[Any]:
    onefold.init()
    model, optimizer = small()
    storage = Broken() if dist.get_rank() == 1 else Storage()
    found = []
    for later in (
        lambda: onefold.save(folder, model, optimizer),
        lambda: onefold.load(folder, model, optimizer),
        onefold.finish_saves,
    ):
        found.append(said(save_on, storage, folder, model, optimizer, wait=False))
        step(model, optimizer)
        found.append(said(later))
        found.append(said(onefold.finish_saves))
    path = onefold.save(folder, model, optimizer)
    return [*found, path.name]


def test_an_error_in_the_background_is_raised_once_by_the_next_call_on_every_rank(tmp_path):
    first, second = run_ranks(2, fail_in_the_background, str(tmp_path))
    assert first == second
    *errors, name = first
    for started, later, after in zip(errors[0::3], errors[1::3], errors[2::3], strict=True):
        assert started is None and after is None
        assert later.startswith("CheckpointError: rank 1: could not flush to disk") and "the cable is out" in later
    assert name == "step-00000003"


def save_while_saving(folder: str) -> list[tuple[str, str]]:
    onefold.init()
    model, optimizer = small()
    storage = Stuck()
    save_on(storage, folder, model, optimizer, step=1, wait=False)
    assert storage.reached.wait(30)
    threading.Timer(0.1, storage.go_on.set).start()
    save_on(storage, folder, model, optimizer, step=2, wait=False)  # returns when the first is done
    assert committed(Storage(), Path(folder))[0] == 1
    onefold.finish_saves()
    return storage.log


def test_at_most_one_save_is_in_flight(tmp_path):
    for rank, log in enumerate(run_ranks(2, save_while_saving, str(tmp_path))):
        files = [name for operation, name in log if operation == "create"]
        own = f"rank-{rank:05}.safetensors"
        assert files == ([own, "manifest.json"] * 2 if rank == 0 else [own] * 2)
    assert committed(Storage(), tmp_path) == [1, 2]


def save_often(folder: str) -> list[int]:
    onefold.init()
    model, optimizer = small()
    places = []
    for _ in range(3):
        step(model, optimizer)
        onefold.save(folder, model, optimizer, wait=False, keep=1)
        onefold.finish_saves()
        places.append(WORKER.memory(1, pinned=False).data_ptr())
    return places


def test_host_memory_is_reused_between_saves(tmp_path):
    assert len(set(run_ranks(1, save_often, str(tmp_path))[0])) == 1


SCRIPT = """
import sys, threading, time, torch, onefold
from onefold.checkpoint.protocol.save import save_on
from onefold.checkpoint.format.storage import Storage
from onefold.offload import host_memory as memory

class Slow(Storage):
    def at(self, operation, path):
        while operation == "create" and not threading._SHUTTING_DOWN:  # the end of the script comes first
            time.sleep(0.01)
        time.sleep(0.05)
        if operation == sys.argv[2]:
            raise OSError(28, "No space left on device")

onefold.init()
model = onefold.shard(torch.nn.Linear(1024, 1024), stage=2)  # large enough for threads that hash
optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
save_on(Slow(), sys.argv[1], model, optimizer, wait=False)
torch.distributed.destroy_process_group()
"""


def test_a_process_that_ends_waits_for_its_save_and_says_if_it_failed(tmp_path):
    both = [
        start_python("-c", SCRIPT, str(tmp_path / fails), fails, stderr=subprocess.PIPE, text=True)
        for fails in ("nothing", "rename")
    ]
    well, failed = (process.communicate(timeout=PATIENCE_S)[1] for process in both)
    assert well == "" and committed(Storage(), tmp_path / "nothing") == [0]
    assert "is lost" in failed and "No space left" in failed
    assert committed(Storage(), tmp_path / "rename") == []


def save_and_leave(folder: str) -> None:
    onefold.init()
    model, optimizer = small()
    onefold.save(folder, model, optimizer, wait=False)


def test_ranks_that_end_wait_for_each_others_files(tmp_path):
    assert [outcome.exitcode for outcome in fresh_ranks(2, save_and_leave, str(tmp_path))] == [0, 0]
    assert committed(Storage(), tmp_path) == [0]


def save_without_room(folder: str) -> tuple[bool, bool, int, bool]:
    """Only rank 1 may take no memory of its host."""
    onefold.init()
    model, optimizer = small()
    step(model, optimizer)
    saved = weights(model)
    if dist.get_rank() == 1:
        memory.HOST_SHARE = 0.0
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    onefold.save(folder, model, optimizer, wait=False)
    there = committed(Storage(), Path(folder)) == [1]  # nobody has waited for it
    step(model, optimizer)
    onefold.load(folder, model, optimizer)
    return there, any("host memory" in one for one in warnings), WORKER.kept, weights(model) == saved


def test_a_copy_that_has_no_room_is_not_made_and_the_checkpoint_is_written_at_once(tmp_path):
    found = [one.value for one in fresh_ranks(2, save_without_room, str(tmp_path / "run"))]
    assert found == [(True, False, 0, True), (True, True, 0, True)]
