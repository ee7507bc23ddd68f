"""A fault at each point of a run, in each process: the first cause is named, all end in time, nothing is left.

The suite takes a share of the cases, in which each fault and each process occurs; `--soak` takes all.
"""

import functools
import importlib
import json
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness.patience import queued
from tests.train.launched import Launch, launched

INJECT = Path(__file__).with_name("inject")
TIMEOUT_S = 3.0
SLACK_S = 2.0
GRACEFUL_S = 20.0  # for the step in hand, its checkpoint and the report on two busy cores
SMALL = (
    "--no-plan",  # a rehearsal on rank 0 reduces gradients too, before the first step
    "--layers", "2", "--hidden", "16", "--heads", "2", "--seq", "16", "--eval-windows", "2", "--log-every", "1",
    "--steps", "6", "--save-every", "2", "--eval-every", "2", "--keep", "1", "--ranks", "2", "--warmup", "1",
    "--bucket-mb", "0.01",
)  # fmt: skip


class Point(NamedTuple):
    """A function, which call of it, and where in a run that is."""

    function: str
    call: int
    trains: bool  # a signal is heard at the end of a step; before that it ends a rank at once
    only_rank_0: bool = False
    beside: bool = False  # training goes on meanwhile, and may end before a signal is heard
    heard: bool = True  # a rank can tell the launcher of an error; before that the launcher points at its output


POINTS = {
    "start of a rank": Point("onefold.cli.train:TrainCommand.run", 1, False, heard=False),
    "before joining": Point("onefold.comm.rendezvous:join", 1, False),
    "inside joining": Point("onefold.comm.rendezvous:_store", 1, False),
    "before the data": Point("onefold.train.run.start:_data", 1, False),
    "loading data": Point("onefold.train.run.data:load_data", 1, False),
    "building": Point("onefold.train.run.run_model:build", 1, False),
    "sharding": Point("onefold.sharding:shard", 1, False),
    "agreeing": Point("onefold.comm.agreement:agree", 3, False),
    "optimizer": Point("onefold.optim.optimizer:Optimizer.__init__", 1, False),
    "loop": Point("onefold.train.run.loop:Loop.__init__", 1, False),
    "first forward": Point("onefold.train.run.loop:Loop._forward_backward", 1, True),
    "first reduction": Point("onefold.comm.communicator:Comm.reduce_scatter", 2, True),
    "first update": Point("onefold.train.run.loop:Loop._update", 1, True),
    "telling each other": Point("onefold.train.run.loop:Loop._row", 1, True),
    "evaluation": Point("onefold.train.run.loop:Loop.evaluate", 1, True),
    "second evaluation": Point("onefold.train.run.loop:Loop._to_device", 6, True),
    "a batch of an evaluation": Point("onefold.train.run.data:Data.batch", 3, True),
    "saving": Point("onefold.checkpoint.protocol.save:save_on", 1, True),
    "writing": Point("onefold.checkpoint.format.tensorfile:write_tensors", 1, True, beside=True),
    "committing": Point("onefold.checkpoint.protocol.commit:commit", 1, True, only_rank_0=True, beside=True),
    "pruning": Point("onefold.checkpoint.protocol.commit:retain", 2, True, only_rank_0=True, beside=True),
    "last checkpoint": Point("onefold.checkpoint.protocol.background:finish_saves", 1, True, beside=True),
}
FAULTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "exception")
TARGETS = ("rank 0", "rank 1", "launcher")


def cases() -> list:
    """For every run five cases, at every fourth point, faults and targets in turn: a launch takes seconds."""
    found = []
    for number, point in enumerate(POINTS):
        for place, fault in enumerate(FAULTS):
            for turn, target in enumerate(TARGETS):
                if target == "rank 1" and POINTS[point].only_rank_0:
                    continue
                turns = place == (number // 4) % len(FAULTS) and turn == (number // 4) % len(TARGETS)
                always = turns and number % 4 == 0 and number < 4 * len(FAULTS)
                found.append(pytest.param(point, fault, target, marks=() if always else (pytest.mark.soak,)))
    return found


def test_every_point_is_a_function_that_is_there():
    for point in POINTS.values():
        module, name = point.function.split(":")
        functools.reduce(getattr, name.split("."), importlib.import_module(module))


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("a little text, again and again. " * 400)
    return path


@pytest.mark.trials_of("faults of a run")
@pytest.mark.parametrize(("point", "fault", "target"), cases())
def test_a_fault_is_named_and_everything_ends_in_time(tmp_path, text, point, fault, target, soak):
    out, fired, where = tmp_path / "deep" / "run", tmp_path / "fired", POINTS[point]
    # Rank 1 starts last: a launcher that is to stop while its ranks go on must have started all of them.
    last = target == "rank 1" or (target == "launcher" and fault == "SIGSTOP" and not where.only_rank_0)
    said = {
        "point": where.function, "call": where.call, "rank": int(last), "what": fault,
        "launcher": target == "launcher", "fired": str(fired),
    }  # fmt: skip
    path = os.pathsep.join([str(INJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    env = {"PYTHONPATH": path, "ONEFOLD_TEST_FAULT": json.dumps(said), "TMPDIR": str(temporary)}
    stops = fault == "SIGSTOP" and target != "launcher"
    limit_s = TIMEOUT_S if stops else 60.0  # on a busy machine a rank may be slow, and is not lost
    with launched(out, *SMALL, "--data", str(text), "--timeout-s", f"{limit_s:g}", env=env) as launch:
        launch.wait_for(lambda: (fired.exists() and fired.read_text()) or launch.process.poll() is not None, point)
        if target == "launcher" and fault == "SIGSTOP":
            code, err = stopped_launcher(launch)
            assert code == 0 and err == "", err
        else:
            code, _, err = launch.end()
            assert fired.exists(), f"the fault did not happen: {err}"
            slack_s = queued(SLACK_S)
            assert launch.gone(within_s=slack_s), f"still running: {launch.pids()}"
            took_s = time.time() - float(fired.read_text())
            limit_s = check_words(code, err, out, where, fault, target)
            assert took_s <= limit_s + slack_s, f"{took_s:.1f} s, where {limit_s + slack_s:.1f} are allowed: {err}"
    if not (target == "launcher" and fault == "SIGKILL"):  # who is killed cannot clean up; the next start does
        assert left_behind(out) == []
    assert list(temporary.glob("onefold*")) == []
    soak.tried()


def stopped_launcher(launch: Launch) -> tuple[int, str]:
    """The ranks go on without it (as after Ctrl-Z); when it goes on, so does its report."""
    launch.wait_for(lambda: launch.steps() == 6, "the end of the training")
    os.kill(launch.process.pid, signal.SIGCONT)
    code, _, err = launch.end()
    assert launch.gone()
    return code, err


def check_words(code: int, err: str, out: Path, where: Point, fault: str, target: str) -> float:
    """What it says, and how long it may take to say so."""
    lines = err.strip().splitlines()
    last = lines[-1] if lines else ""
    if fault == "exception" and target != "launcher" and not where.heard:
        pointed = f"onefold: {target} ended with exit code 1; see its output above"
        assert code == 1 and lines[-2:] == ["sitecustomize.Injected: injected", pointed], err
        return 0.0
    if fault == "exception":
        assert code == 1 and "injected" in last, err
        if target != "launcher":
            assert last.startswith("onefold: ") and f"{target}: " in last, err
        return 0.0
    if target == "launcher":
        if fault == "SIGKILL":
            assert code == -signal.SIGKILL and err == "", err
            return 0.0
        early = f"onefold: ended by {fault}, before the first step of this start: nothing is lost"
        saved = f"onefold: stopped and saved ({fault}); to go on: onefold train --resume --out {out} --ranks 2"
        assert (
            (lines == [early] and code == 128 + signal.Signals[fault])
            or (lines == [saved] and code == 0)
            or (where.beside and code == 0 and lines == [])
        ), err
        assert where.trains or lines == [early], err
        return GRACEFUL_S if where.trains else 0.0
    if fault in ("SIGTERM", "SIGINT") and where.trains:
        again = f"onefold train --resume --out {out} --ranks 2"
        saved = f"onefold: stopped and saved ({fault} to {target}); to go on: {again}"
        assert code == 0 and (lines == [saved] or (where.beside and lines == [])), err
        return GRACEFUL_S
    words = {
        "SIGSTOP": f"onefold: {target} was stopped by a signal (SIGSTOP or SIGTSTP) and has not answered for "
                   f"{TIMEOUT_S:g} s",
    }.get(fault, f"onefold: {target} was killed by {fault}")  # fmt: skip
    assert code == 1 and len(lines) == 1 and last.startswith(words), err
    return TIMEOUT_S if fault == "SIGSTOP" else 0.0


def left_behind(out: Path) -> list[str]:
    """Hidden files and folders, of which a run leaves none."""
    return [str(path) for path in out.rglob(".*")]
