"""Copies in memory stay as long as they may be needed: until a save in the background is committed, beside a damaged
checkpoint, and where a rank has no memory for the next snapshot."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

import onefold
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.protocol import background
from tests.checkpoint.runs import Case, Trainer, fingerprint
from tests.checkpoint.test_lost_ranks import LostError, logged, memory_in, resumed
from tests.harness import run_ranks, run_ranks_raises

CASE = Case(3, "bf16")


class NoRoom(Storage):
    """A disk that is found full a moment after a save has begun."""

    def create(self, *args: Any) -> Any:
        time.sleep(0.3)
        raise onefold.CheckpointError("the disk is full")


def end_while_saving(folder: Path) -> None:
    """The block ends while the last checkpoint is being written, which then fails."""
    onefold.init()
    with memory_in(folder / f"node{dist.get_rank()}"):
        trainer = Trainer(CASE)
        with onefold.resilient(folder / "run", trainer.model, trainer.optimizer, every=1) as run:
            trainer.train(1)
            run.step(trainer.extra)
            with patch("onefold.checkpoint.protocol.save.storage_of", lambda _: NoRoom()):
                onefold.save(folder / "run", trainer.model, trainer.optimizer, wait=False)


def test_copies_stay_until_the_last_checkpoint_is_committed(tmp_path):
    errors = run_ranks_raises(2, end_while_saving, tmp_path)
    assert all("the disk is full" in str(error) for error in errors), errors
    assert len(list(tmp_path.glob("node*/*/step-00000001-*"))) == 2


def between_two_checkpoints(folder: Path) -> tuple[str | None, int, bool, list[str]]:
    """Checkpoints of steps 1 and 3, of which the newer is damaged, and a copy of step 2."""
    onefold.init()
    with memory_in(folder / f"node{dist.get_rank()}"), suppress(LostError):
        trainer = Trainer(CASE)
        with onefold.resilient(folder / "run", trainer.model, trainer.optimizer, every=2) as run:
            for _ in range(3):
                trainer.train(1)
                run.step(trainer.extra)
                if trainer.tried != 2:
                    trainer.save(folder / "run")
                else:
                    trainer.save(folder / "at2")
            raise LostError
    dist.barrier()
    if dist.get_rank() == 0:
        (path,) = (folder / "run" / "step-00000003").glob("rank-00000*")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    dist.barrier()
    with memory_in(folder / f"node{dist.get_rank()}"), suppress(LostError):
        again = Trainer(CASE, seed=7)
        with onefold.resilient(folder / "run", again.model, again.optimizer, every=9) as run:
            found, step = run.restored, run.extra["tried"]
            after = fingerprint(resumed(again, run.extra).train(2))
            raise LostError
    same = fingerprint(Trainer(CASE, seed=8).load(folder / "at2").train(2)) == after
    return found, step, same, sorted(path.name[:16] for path in (folder / "run").iterdir())


def test_a_copy_newer_than_the_checkpoint_before_a_damaged_one_is_taken_and_the_damaged_one_set_aside(tmp_path):
    wanted = ("memory", 2, True, ["damaged-step-000", "step-00000001"])
    assert run_ranks(2, between_two_checkpoints, tmp_path) == [wanted] * 2


def no_memory_once(folder: Path) -> tuple[list[str], int]:
    """Rank 1 cannot allocate its second snapshot."""
    onefold.init()
    with memory_in(folder / f"node{dist.get_rank()}"), suppress(LostError):
        trainer, told = Trainer(CASE), logged()
        with onefold.resilient(folder / "run", trainer.model, trainer.optimizer, every=1) as run:
            for full in (False, True, False):
                trainer.train(1)
                with (
                    patch.object(background.Worker, "memory", no_memory) if full and dist.get_rank() else nullcontext()
                ):
                    run.step(trainer.extra)
            raise LostError
    with memory_in(folder / f"node{dist.get_rank()}"):
        again = Trainer(CASE, seed=7)
        with onefold.resilient(folder / "run", again.model, again.optimizer) as run:
            return told, run.extra["tried"]


def no_memory(*_: Any, **__: Any) -> Any:
    raise onefold.OffloadError("could not get 9 GiB of host memory")


def test_a_rank_without_memory_for_a_snapshot_costs_that_copy_alone(tmp_path):
    for told, step in run_ranks(2, no_memory_once, tmp_path):
        assert step == 3
        (line,) = told
        assert "step 2 was not copied to memory" in line and "rank 1: no snapshot of the state" in line
