"""A crash after any operation, a disk that forgets what was not flushed: no checkpoint is lost, none is half there."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import onefold
from onefold.checkpoint.format.folder import committed, read_manifest, step_name
from onefold.checkpoint.format.manifest import Manifest, merge_rank_parts
from onefold.checkpoint.format.verify import check
from onefold.checkpoint.protocol.commit import begin, commit, retain
from onefold.checkpoint.protocol.save import save_on
from onefold.errors import CheckpointError
from tests.checkpoint.disk import Disk, Folder, Op, Site, picture, without_power
from tests.checkpoint.drive import load, save, write_rank
from tests.harness import run_ranks

RUN = Path("/data/team/run")  # only /data is there at first
RANKS, SAVES, KEEP = 3, 4, 2
NEXT = 100

Phase = tuple[set[int], list[list[Op]]]  # steps that must survive while these are under way; one list for each rank


def empty_disk(skip: Site | None = None) -> Disk:
    root = Folder({"data": Folder()})
    root.kept = dict(root.now)
    return Disk(root, skip)


def record(skip: Site | None = None) -> list[Phase]:
    """Every operation of a few saves, the last of which remove older checkpoints."""
    disk = empty_disk(skip)
    phases: list[Phase] = []

    def cut(safe: set[int], *logs: list[Op]) -> None:
        phases.append((safe, list(logs) or [disk.log]))
        disk.log = []

    safe: set[int] = set()
    for step in range(1, SAVES + 1):
        draft = begin(disk, RUN, step)
        cut(safe)
        logs, parts = [], []
        for rank in range(RANKS):
            parts.append(write_rank(disk, draft, rank, RANKS))
            logs.append(disk.log)
            disk.log = []
        cut(safe, *logs)
        commit(disk, draft, merge_rank_parts(parts, Manifest(step, RANKS, (), (), (), extra={"step": step})))
        cut(safe)
        safe = set(sorted(safe | {step})[-KEEP:])
        retain(disk, RUN, KEEP)
        cut(safe)
    cut(safe)
    return phases


def orders(logs: list[list[Op]], rng: random.Random) -> list[Op]:
    """One way in which the ranks' operations may follow one another."""
    left = [list(log) for log in logs]
    merged = []
    while any(left):
        merged.append(rng.choice([log for log in left if log]).pop(0))
    return merged


def instants(phases: Sequence[Phase], rng: random.Random, skip: Site | None) -> Iterator[tuple[set[int], Disk]]:
    """The disk after each operation, and what must be on it whatever happens."""
    disk = empty_disk(skip)
    for safe, logs in phases:
        yield safe, disk
        for op in orders(logs, rng):
            disk.replay(op)
            yield safe, disk


class Judge:
    """Says whether a disk is as it must be at the next start. Reads each checkpoint once."""

    def __init__(self, load: Callable[[Disk, Path], int] = load) -> None:
        self._read = load
        self._good: set[object] = set()
        self._seen: set[object] = set()
        self.states = 0  # all that may be found; of these each that differs from the others is judged once

    def judge(self, found: Disk, safe: set[int], *, go_on: bool = True) -> None:
        self.states += 1
        state = hash((picture(found.root), frozenset(safe), go_on))
        if state in self._seen:
            return
        self._seen.add(state)
        steps = committed(found, RUN) if found.exists(RUN) else []
        assert safe <= set(steps), f"lost: {sorted(safe - set(steps))}"
        for step in steps:
            self._load(found, step)  # whatever looks committed can be loaded
        if go_on:
            save(found, RUN, NEXT, ranks=1)
            assert found.names(RUN) == [step_name(step) for step in [*steps, NEXT]]  # what was left over is gone
            self._load(found, NEXT)

    def _load(self, found: Disk, step: int) -> None:
        content = step, picture(found.folder_at(RUN / step_name(step)))
        if content not in self._good:
            assert self._read(found, RUN / step_name(step)) == step
            self._good.add(content)

    @property
    def different(self) -> int:
        return len(self._seen)


def judge_every_state(seeds: Sequence[int], samples: int, skip: Site | None = None) -> Judge:
    """Kills and loses power after each operation, for several orders of the ranks' operations."""
    return judge_log(Judge(), record(skip), seeds, samples, skip)


def judge_log(
    judge: Judge, phases: Sequence[Phase], seeds: Sequence[int], samples: int, skip: Site | None = None
) -> Judge:
    for rng in map(random.Random, seeds):
        for safe, disk in instants(phases, rng, skip):
            for found in without_power(disk, rng, samples):
                judge.judge(found, safe)
            killed = disk.copy()
            judge.judge(killed, safe)
            save_again(killed)
            for lost in without_power(killed, rng, 0):  # killed, saved again, and then the power went
                judge.judge(lost, safe | {NEXT}, go_on=False)
    return judge


def save_again(disk: Disk) -> None:
    if not disk.exists(RUN) or NEXT not in committed(disk, RUN):
        save(disk, RUN, NEXT, ranks=1)


@pytest.mark.trials_of("crash states")
def test_no_checkpoint_is_lost_and_none_is_half_there_after_a_crash_at_any_operation(soak):
    judge = judge_every_state(range(soak.number(1, 26)), samples=soak.number(14, 60))
    wanted = soak.number(800, 10_000)
    assert judge.states > 7 * wanted and judge.different > wanted, (judge.states, judge.different)
    soak.tried(judge.different)


def sites() -> list[Site]:
    """All lines of the code that flush or rename in an ordinary save."""
    kinds = ("finish", "sync_folder", "rename")
    ops = [op for _, logs in record() for log in logs for op in log]
    return sorted({op.site for op in ops if op.kind in kinds})


@pytest.mark.parametrize("site", sites(), ids=lambda site: f"{site.function}-{site.line}")
def test_without_any_one_flush_or_rename_the_promise_breaks(site):
    with pytest.raises((AssertionError, CheckpointError)):
        judge_every_state([0], samples=0, skip=site)


def test_the_model_sees_every_flush_and_rename_of_a_save():
    assert len(sites()) == 9


def save_for_real(wait: bool) -> tuple[int, int]:
    """On one rank: onefold.save itself, several times, on a disk that forgets; then every instant of it is judged."""
    onefold.init()
    model = onefold.shard(torch.nn.Linear(6, 4), stage=3)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.1)
    disk, phases, steps = empty_disk(), [], []
    for step in range(1, SAVES + 1):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        save_on(disk, RUN, model, optimizer, extra={"step": step}, keep=KEEP, wait=wait)
        onefold.finish_saves()
        phases.append((set(steps[-KEEP + 1 :]), [disk.log]))  # while it saves, older ones may be removed
        disk.log = []
        steps.append(step)
    phases.append((set(steps[-KEEP:]), [[]]))
    judge = judge_log(Judge(whole), phases, [0], samples=10)
    return judge.states, judge.different


def whole(disk: Disk, folder: Path) -> int:
    check(disk, folder)
    return read_manifest(disk, folder).step


@pytest.mark.parametrize("wait", [True, False], ids=["synchronous", "asynchronous"])
def test_a_real_save_of_a_real_model_keeps_the_promise(wait):
    ((states, different),) = run_ranks(1, save_for_real, wait)
    assert states > 3_000 and different > 100, (states, different)
