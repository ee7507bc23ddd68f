"""`onefold train --elastic`: a run that loses a rank goes on with the others, as one restored from disk would."""

import os
import signal
from pathlib import Path

import pytest

from onefold.checkpoint.format.folder import committed, step_name
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.memory.places import MEMORY
from onefold.errors import ConfigError
from onefold.train.run.metrics import Listener
from onefold.train.run.records import read_lines
from onefold.train.run.settings import Settings
from onefold.train.run.start import train
from onefold.train.run.stop import Stop
from onefold.train.run.toml import with_values
from tests.harness import run_ranks
from tests.train.launched import Launch, curve, launched
from tests.train.pooled import config_file, settings_of

EVERY = 3
SETTINGS = {
    "steps": {"steps": 400, "eval_every": 0, "global_batch": 12},
    "checkpoints": {"save_every": 0, "elastic": "2:3", "copy_every": EVERY},
}
PLAIN = {**SETTINGS, "checkpoints": {"save_every": 0, "resume_or_start": True}}


class Until(Listener):
    """Stops after a step, which is then saved."""

    def __init__(self, stop: Stop, last: int) -> None:
        self._stop, self._last = stop, last

    def stepped(self, step: int) -> None:
        if step >= self._last - 1:
            self._stop.ask()


def train_until(settings: Settings, last: int) -> None:
    stop = Stop()
    train(settings, stop, Until(stop, last))


def copied(memory: Path, step: int, ranks: int) -> bool:
    return len(list(memory.glob(f"*/{step_name(step)}-*"))) == ranks


def kill(launch: Launch, rank: int) -> None:
    os.kill(launch.rank_pids()[rank], signal.SIGKILL)


def test_a_killed_rank_costs_the_steps_since_the_last_copy_and_then_losses_are_those_of_a_resumed_run(tmp_path):
    out, memory, text = tmp_path / "run", tmp_path / "memory", tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer\n" * 100)
    data = {"data": {"data": str(text)}}
    config = config_file(out, **SETTINGS, **data)
    with launched(out, "--config", str(config), env={MEMORY: str(memory)}) as launch:
        launch.wait_for(lambda: copied(memory, 2 * EVERY, 3), "two copies")
        kill(launch, 1)
        notes = launch.wait_for(lambda: elastic_notes(out), "ranks that go on")
        launch.wait_for(lambda: copied(memory, 4 * EVERY, 2), "a copy of two ranks")
        kill(launch, 0)  # one is left, which is fewer than two
        code, _, err = launch.end()
        assert launch.gone()
    first, last = err.splitlines()
    assert first.endswith("a rank was lost (rank 1 was killed by SIGKILL); going on with 2 of 3 ranks")
    assert code == 1 and "rank 0 was killed by SIGKILL" in last
    assert memory.is_dir() and not any(memory.iterdir()), "copies are left in memory"

    (note,) = notes
    step = int(note.split()[4].rstrip(","))
    assert step >= 2 * EVERY and step % EVERY == 0
    assert note == f"goes on after step {step} with 2 ranks, from memory"
    found = curve(out)
    assert list(found) == list(range(1, len(found) + 1)) and len(found) >= 4 * EVERY
    disk = tmp_path / "disk"
    run_ranks(3, train_until, settings_of(disk, **PLAIN, **data), step, timeout_s=120)
    run_ranks(2, train_until, settings_of(disk, **PLAIN, **data), len(found), timeout_s=120)
    assert curve(disk) == found


def test_a_signal_while_the_ranks_that_are_left_start_again_saves_what_is_in_memory_alone(tmp_path):
    out, memory = tmp_path / "run", tmp_path / "memory"
    with launched(out, "--config", str(config_file(out, **SETTINGS)), env={MEMORY: str(memory)}) as launch:
        launch.wait_for(lambda: copied(memory, 2 * EVERY, 3), "two copies")
        before = set(launch.rank_pids().values())
        kill(launch, 1)
        launch.wait_for(lambda: len(set(launch.rank_pids().values()) - before) == 2, "ranks that start again")
        os.kill(launch.process.pid, signal.SIGTERM)
        code, _, err = launch.end()
    assert code == 0 and "stopped and saved (SIGTERM)" in err, err
    (step,) = committed(Storage(), out / "checkpoints")
    assert step > 2 * EVERY and list(curve(out)) == list(range(1, step + 1))


def elastic_notes(out: Path) -> list[str]:
    return [row["message"] for row in read_lines(out / "warnings.jsonl") if row["kind"] == "elastic"]


@pytest.mark.parametrize(
    ("ranks", "groups", "said"),
    [
        (3, {"checkpoints": {"elastic": "two"}}, "is not MIN:MAX ranks"),
        (3, {"checkpoints": {"elastic": "3:2"}}, "has no ranks between its bounds"),
        (4, {"checkpoints": {"elastic": "2:3"}}, "but there are 4 ranks"),
        (4, {"zero": {"mesh": "shard=4"}}, "2 ranks do not fit --mesh shard=4"),
        (4, {"zero": {"mesh": "shard=*,tp=4"}}, "2 ranks do not fit"),
        (4, {"steps": {"global_batch": 6, "micro_batch": 2}}, "multiple of 8"),
        (4, {"compare": "0,1"}, "leave out --compare"),
        (2, {"checkpoints": {"elastic": "1:99999999999"}}, "use at most 1,048,576 ranks"),
        (4, {"checkpoints": {"elastic": "2:4", "copy_every": 0}}, "--copy-every 0 is out of range"),
    ],
)
def test_bounds_that_no_run_can_have_are_refused_in_one_line(ranks, groups, said):
    settings = with_values(Settings(), {"checkpoints": {"elastic": "2:4"}}, "test")
    with pytest.raises(ConfigError) as error:
        with_values(settings, groups, "test").check(ranks)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_run_goes_on_with_the_numbers_of_ranks_that_share_its_batch_and_fill_its_mesh():
    def of(elastic, **groups):
        settings = with_values(Settings(), {"checkpoints": {"elastic": elastic}, **groups}, "test")
        settings.check(settings.checkpoints.bounds.most)
        return settings.elastic_batch(), settings.elastic_ranks()

    steps = {"micro_batch": 2}
    assert of("2:3", steps=steps) == (12, [2, 3])
    assert of("2:4", steps=steps) == (8, [2, 4])
    assert of("2:6", steps={**steps, "global_batch": 24}) == (24, [2, 3, 4, 6])
    assert of("4:8", steps=steps, zero={"mesh": "shard=*,tp=2"}) == (8, [4, 8])
