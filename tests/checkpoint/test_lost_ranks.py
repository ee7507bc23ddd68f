"""Copies in memory: what is restored after ranks were lost is what a checkpoint on disk would give, bit for bit."""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

import onefold
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.memory.copying import SENT
from onefold.checkpoint.memory.late import late
from onefold.checkpoint.memory.neighbours import check_room, nodes_of
from onefold.checkpoint.memory.places import MEMORY, owned_folder, remove_stale
from onefold.comm.communicator import Comm
from onefold.comm.endpoint import Pending
from onefold.comm.meter import Label
from tests.checkpoint.runs import Case, Trainer, fingerprint
from tests.harness import run_ranks

CASES = (Case(3, "bf16"), Case(1, "fp32"))


class LostError(Exception):
    """Stands for the end of a rank."""


@contextmanager
def memory_in(folder: Path) -> Iterator[None]:
    """This rank is on a node whose memory is this folder."""
    before = os.environ.get(MEMORY)
    os.environ[MEMORY] = str(folder)
    try:
        yield
    finally:
        os.environ.pop(MEMORY)
        os.environ.update({} if before is None else {MEMORY: before})


def resumed(trainer: Trainer, extra: Any) -> Trainer:
    trainer.schedule.load_state_dict(extra["schedule"])
    (trainer.epoch, trainer.position), trainer.tried = extra["data"], extra["tried"]
    return trainer


def train_until_lost(
    case: Case, disk: Path, nodes: list[Path], every: int, saves: dict[int, str], **fields: Any
) -> None:
    """Trains to one step after the last that is saved; the ranks end before the next copy."""
    onefold.init()
    with memory_in(nodes[dist.get_rank()]), suppress(LostError):
        trainer = Trainer(case, **fields)
        with onefold.resilient(disk / "run", trainer.model, trainer.optimizer, every=every) as run:
            if run.restored:
                resumed(trainer, run.extra)
            while trainer.tried <= max(saves):
                trainer.train(1)
                run.step(trainer.extra, step=trainer.tried)
                if trainer.tried in saves:
                    trainer.save(disk / saves[trainer.tried])
            raise LostError


class Start(NamedTuple):
    """Ranks that start again on some nodes, and the checkpoint with which they must agree."""

    nodes: list[Path]
    reference: str


def go_on(case: Case, disk: Path, starts: list[Start], **fields: Any) -> list[tuple[str | None, int, bool]]:
    """For each start: restores, trains two steps, and does the same from a checkpoint on disk. Returns where the state
    came from, at which step, and whether both runs are equal."""
    onefold.init()
    answers = []
    for nodes, reference in starts:
        with memory_in(nodes[dist.get_rank()]), suppress(LostError):
            first = Trainer(case, seed=7, **fields)
            with onefold.resilient(disk / "run", first.model, first.optimizer, every=100) as run:
                found, step = run.restored, run.extra["tried"]
                after = fingerprint(resumed(first, run.extra).train(2))
                raise LostError
        second = Trainer(case, seed=8, **fields).load(disk / reference)
        answers.append((found, step, fingerprint(second.train(2)) == after))
    return answers


def damage(node: Path, name: str) -> None:
    """Flips a bit in a file of a node's copy."""
    (path,) = node.glob(f"*/step-*/{name}")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


class Nodes(NamedTuple):
    """The memory of three nodes, as it was when their ranks ended."""

    memory: Path

    def __truediv__(self, name: str) -> Path:
        return self.memory / name

    def copied(self, name: str, *lost: str) -> Nodes:
        """The same again, of which some nodes are lost."""
        other = self.memory.with_name(name)
        shutil.copytree(self.memory, other)
        for node in lost:
            shutil.rmtree(other / node)
        return Nodes(other)

    def start(self, names: str, reference: str) -> Start:
        return Start([self.memory / name for name in names], reference)


FIRST = "rank-00000.safetensors"  # on node a, and kept on node b


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"stage{case.stage}-{case.precision}")
def test_what_is_left_in_memory_is_restored_to_the_bit_at_any_number_of_ranks_else_the_disk(case, tmp_path):
    disk, late, early = tmp_path / "disk", Nodes(tmp_path / "late"), Nodes(tmp_path / "early")
    run_ranks(3, train_until_lost, case, disk, late.start("abc", "").nodes, 2, {2: "run", 4: "at4"})
    run_ranks(3, train_until_lost, case, disk, early.start("abc", "").nodes, 3, {3: "at3"})
    one, two = late.copied("one", "b"), late.copied("two", "b", "c")  # c has the copy of b
    damaged, both = late.copied("damaged", "c"), late.copied("both", "c")
    for node in (damaged / "a", both / "a", both / "b"):
        damage(node, FIRST)
    older = late.copied("older", "b", "c")
    shutil.copytree(early.memory, older.memory, dirs_exist_ok=True)
    starts = [
        one.start("ac", "at4"), two.start("ad", "run"), damaged.start("ab", "at4"), both.start("ab", "run"),
        older.start("ab", "at3"),
    ]  # fmt: skip
    wanted = [("memory", 4, True), ("disk", 2, True), ("memory", 4, True), ("disk", 2, True), ("memory", 3, True)]
    assert run_ranks(2, go_on, case, disk, starts) == [wanted] * 2
    grown = [late.start("abd", "at4"), one.start("acd", "at4")]  # d is new
    assert run_ranks(3, go_on, case, disk, grown) == [[("memory", 4, True)] * 2] * 3


def logged() -> list[str]:
    """What this rank logs from now on."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onefold").addHandler(handler)
    return found


@contextmanager
def no_room() -> Iterator[None]:
    """This rank can write no file of more than 1000 bytes."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


@contextmanager
def damaged_on_its_way(digests: bool, at: int) -> Iterator[None]:
    """Flips a bit of one byte in each message of a copy that this rank receives from another, of those that begin as
    digests (JSON) do, or of the others, which are files."""
    swap = Comm.swap

    def flipping(comm: Comm, sends: dict[int, Tensor], receives: dict[int, Tensor], label: Label) -> Pending:
        pending = swap(comm, sends, receives, label)
        pending.wait()
        for tensor in receives.values() if label == SENT else ():
            if (bytes(tensor[:1].tolist()) == b"[") == digests:
                tensor[at] ^= 1
        return pending

    with patch.object(Comm, "swap", flipping):
        yield


def lose_memory(case: Case, disk: Path, nodes: list[Path]) -> tuple[int, list[str]]:
    """What rank 1 receives of later steps is damaged on its way, or it can write no more. Then the ranks end, and start
    again: at which step they are, and what was logged."""
    onefold.init()
    with memory_in(nodes[dist.get_rank()]), suppress(LostError):
        trainer = Trainer(case)
        with onefold.resilient(disk, trainer.model, trainer.optimizer, every=2) as run:
            for _ in range(3):
                trainer.train(1)
                run.step(trainer.extra)
            trainer.train(1)
            while not list(nodes[dist.get_rank()].glob("*/step-00000002-*")):  # its copy is complete on this rank
                time.sleep(0.01)
            told = logged()
            troubles = [damaged_on_its_way(*where) for where in ((True, 70), (False, 20), (False, -1))]
            for trouble in (*troubles, no_room()):
                with trouble if dist.get_rank() == 1 else nullcontext():
                    for _ in range(2):  # the second call waits for the first copy, and logs why it failed
                        run.step(trainer.extra)
                    run.__exit__(LostError)  # waits for the second, as at the end of the block
            raise LostError
    with memory_in(nodes[dist.get_rank()]):
        again = Trainer(case, seed=9)
        with onefold.resilient(disk, again.model, again.optimizer) as run:
            return run.extra["tried"], told


def test_a_copy_that_fails_on_one_rank_leaves_the_one_before_it_and_the_end_of_a_run_leaves_none(tmp_path):
    nodes = [tmp_path / "a", tmp_path / "b"]
    for step, told in run_ranks(2, lose_memory, CASES[1], tmp_path / "run", nodes):
        assert step == 2 and len(told) == 4 and all("step 4 was not copied to memory" in line for line in told)
        assert all(f"{FIRST} came with a header" in line for line in told[:2])
        assert f"{FIRST}: tensor " in told[2] and "could not" in told[3]
    assert not any(path for node in nodes for path in node.iterdir())


def test_training_that_waited_for_a_copy_is_told_how_many_steps_would_be_enough():
    assert "copy every 40 steps (" in late(20, 30, took_s=4.0, waited_s=3.0)
    assert "copy every 11 steps (" in late(20, 30, took_s=40.0, waited_s=1.1 + 2.0)
    assert late(20, 30, took_s=40.0, waited_s=0.5) == late(0, 10, took_s=1.0, waited_s=0.9) == ""
    assert late(20, 20, took_s=4.0, waited_s=4.0) == late(20, 0, took_s=9.0, waited_s=8.0) == ""  # no steps between


class Slow(Storage):
    """Files that take near a second longer each."""

    def create(self, *args: Any) -> Any:
        time.sleep(0.8)
        return super().create(*args)


def wait_for_copies(folder: Path) -> list[str]:
    """Trains while copies are slow; what was logged."""
    onefold.init()
    with memory_in(folder / "memory"):
        trainer, told = Trainer(CASES[0]), logged()
        with patch("onefold.checkpoint.memory.resilient.Storage", Slow):
            run = onefold.resilient(folder / "run", trainer.model, trainer.optimizer, every=1)
        for _ in range(3):
            trainer.train(1)
            run.step(trainer.extra)
        run.close()
    return told


def test_a_run_whose_copies_take_longer_than_its_steps_is_told_once(tmp_path):
    (told,) = run_ranks(1, wait_for_copies, tmp_path)
    assert len(told) == 1 and "waited" in told[0] and "for the copy of step 1" in told[0]


def refused(folder: Path) -> list[str]:
    """Bad arguments, and a folder that another user could have put there."""
    onefold.init()
    trainer, found = Trainer(CASES[0]), []
    with memory_in(folder / "memory"):
        key = hashlib.sha256(str(folder / "run").encode()).hexdigest()[:16]
        with suppress(FileExistsError):
            (folder / "memory").mkdir()
        for optimizer, every in ((trainer.optimizer, 0), (None, 10), (trainer.optimizer, 10 + dist.get_rank())):
            with pytest.raises(onefold.OnefoldError) as error:
                onefold.resilient(folder / "run", trainer.model, optimizer, every=every)
            found.append(str(error.value))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "memory" / key)
            (folder / "memory" / key).symlink_to(folder)
        dist.barrier()
        with pytest.raises(onefold.ConfigError) as error:
            onefold.resilient(folder / "run", trainer.model, trainer.optimizer)
        found.append(str(error.value))
    return found


def test_bad_input_is_one_line_on_all_ranks_before_the_run_starts(tmp_path):
    first, second = run_ranks(2, refused, tmp_path)
    assert first == second and not any("\n" in line for line in first)
    for line, said in zip(first, ("every=0", "needs the model's Optimizer", "copies every 11", "ONEFOLD_MEMORY=")):
        assert said in line


def test_a_node_without_room_for_its_neighbours_copy_is_named_with_what_it_needs_and_has():
    nodes = nodes_of(["x", "x", "y"])
    sizes, room = [100, 100, 300], {"x": 2 * 500 + 200, "y": 2 * 500 + 300}
    check_room(nodes, sizes, room, "/dev/shm")
    with pytest.raises(onefold.ConfigError, match=r"ranks 0, 1 has no room .* 1.2 KiB of memory, and /dev/shm has 1.2"):
        check_room(nodes, sizes, room | {"x": 1199}, "/dev/shm")
    with pytest.raises(onefold.ConfigError, match="the node of rank 2 has no room"):
        check_room(nodes, sizes, room | {"y": 0}, "/dev/shm")


def test_memory_of_runs_whose_agent_has_ended_is_removed_by_the_next_run():
    agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder = owned_folder(agent.pid)
    try:
        folder.mkdir(mode=0o700)
        remove_stale()
        assert folder.exists()
        agent.communicate()
        remove_stale()
        assert not folder.exists()
    finally:
        agent.kill()
        shutil.rmtree(folder, ignore_errors=True)
