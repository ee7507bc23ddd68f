"""`onefold train --elastic --store`: lost ranks cost few steps, by copies in memory or else by the store."""

import os
import signal
from pathlib import Path

import pytest

from onefold.checkpoint.format.folder import MANIFEST, step_of
from onefold.checkpoint.memory.places import MEMORY, remove
from onefold.errors import ConfigError
from onefold.train.run.saved import check_store
from tests.checkpoint.s3 import keys, make_bucket, s3_server, store
from tests.train.launched import Launch, curve, launched
from tests.train.pooled import config_file, settings_of
from tests.train.test_elastic import EVERY, copied, elastic_notes, kill

SAVED = 4  # every so many steps


def newest(port: int) -> int:
    """The newest step of which the store has a checkpoint; 0 if there is none."""
    there = [key.split("/") for key in keys(port, "elastic")]
    return max((step_of(folder) or 0 for *_, folder, name in there if name == MANIFEST), default=0)


def lose_all(launch: Launch, memory: Path) -> None:
    """All ranks and their memory at once: nobody makes a copy between the two."""
    ranks = launch.rank_pids()
    for pid in ranks.values():
        os.kill(pid, signal.SIGSTOP)
    for run in memory.iterdir():
        for copy in run.iterdir():
            remove(copy)
    for pid in ranks.values():
        os.kill(pid, signal.SIGKILL)


def test_a_run_goes_on_from_memory_or_else_from_the_store_and_saves_there_when_told_to_stop(tmp_path):
    out, memory, text = tmp_path / "run", tmp_path / "memory", tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question: Whether 'tis nobler in the mind to suffer\n" * 100)
    steps = {"steps": 100_000, "eval_every": 0, "global_batch": 4}
    with s3_server() as port:
        address = f"{make_bucket(port, 'elastic')}/run"
        about = {"save_every": SAVED, "elastic": "1:2", "copy_every": EVERY, "max_restarts": 1, "store": address}
        config = config_file(out, steps=steps, checkpoints=about, data={"data": str(text)})
        with store(port), launched(out, "--config", str(config), env={MEMORY: str(memory)}) as launch:
            launch.wait_for(lambda: copied(memory, 2 * EVERY, 2), "two copies")
            kill(launch, 1)
            launch.wait_for(lambda: elastic_notes(out), "ranks that go on")
            resumed = int(elastic_notes(out)[0].split()[4].rstrip(","))
            launch.wait_for(lambda: launch.steps() > resumed + 3 * SAVED, "two checkpoints, and a third that is begun")
            lose_all(launch, memory)
            before, saved = curve(out), newest(port)
            launch.wait_for(lambda: len(elastic_notes(out)) == 2, "ranks that go on again")
            launch.wait_for(lambda: launch.steps() >= max(before), "the steps that were lost")
            launch.process.terminate()
            code, _, err = launch.end()
            assert launch.gone()
        assert code == 0 and "stopped and saved" in err, err
        assert [line.rpartition("; ")[2] for line in err.splitlines()[:2]] == [
            "going on with 1 of 2 ranks", "restart 1 of 1",
        ]  # fmt: skip
        assert elastic_notes(out) == [
            f"goes on after step {resumed} with 1 rank, from memory",
            f"goes on after step {saved} with 1 rank, from the store",
        ]
        after = curve(out)
        assert list(after) == list(range(1, len(after) + 1)) and max(before) > saved > resumed
        assert {step: after[step] for step in before} == before, "steps done again are not those of the first time"
        assert newest(port) == max(after), "the step in hand was not saved"
        assert not (out / "checkpoints").exists() and not any(memory.iterdir()), "copies are left in memory"
        with store(port), pytest.raises(ConfigError, match="--resume-or-start"):  # nobody asked for that run
            check_store(settings_of(tmp_path / "new", checkpoints=about), 2)
