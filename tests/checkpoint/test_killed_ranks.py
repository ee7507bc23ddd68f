"""Real ranks, really killed, at any moment of a save: no committed checkpoint is lost, no partial one is loadable."""

import os
import random
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import onefold
from onefold.checkpoint.format.folder import committed, step_name
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.verify import verify
from onefold.checkpoint.protocol.quiesce import background_comm
from onefold.runtime.engine import engine_of
from tests.harness import start_ranks, tell
from tests.harness.soak import Soak

RANKS = 2


def train_and_save(folder: str, sworn: str, wait: bool) -> None:
    """On every rank: go on from what is there, then step and save for ever; rank 0 writes down what was committed."""
    onefold.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = onefold.shard(nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 3)), stage=2, timeout_s=20)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)
    if committed(Storage(), Path(folder)):
        extra = onefold.load(folder, model, optimizer)
        assert extra["sum"] == checksum(model)
    else:
        assert background_comm(engine_of(model))  # the ranks have met, as they do in the first save or load
    tell(optimizer.steps)
    before = None
    while True:
        optimizer.backward(model(torch.randn(4, 16)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        path = onefold.save(folder, model, optimizer, extra={"sum": checksum(model)}, keep=1 + wait, wait=wait)
        done = path if wait else before  # the next save has waited for the one before
        if done and torch.distributed.get_rank() == 0:
            with open(sworn, "a") as out:
                out.write(f"{done.name}\n")
            tell(done.name)
        before = path


def checksum(model: nn.Module) -> str:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum().item().hex()


def kill_at_random(folder: Path, kills: int, dice: random.Random, soak: Soak) -> None:
    run, sworn = folder / "run", folder / "sworn"
    run.mkdir()
    loaded = 0
    for number in range(kills):
        wait = number % 2 == 0
        with start_ranks(RANKS, train_and_save, str(run), str(sworn), wait) as group:
            started = [group.message(rank) for rank in range(RANKS)]
            assert started[0] == started[1] >= loaded, "a committed checkpoint was lost"
            for _ in range(dice.randrange(3)):
                group.message(0)  # a save is committed; strike in one of the next
            time.sleep(dice.uniform(0.0, 0.06))  # where in a save it strikes is left to chance
            struck = dice.choice([[0], [1], [0, 1]])
            for rank in struck:
                group.kill(rank)
            for outcome in group.join():
                assert outcome.exitcode == (-9 if outcome.rank in struck else 1), outcome.error
                assert outcome.rank in struck or "CommError" in outcome.error, outcome.error
        steps = committed(Storage(), run)
        promised = sworn.read_text().split() if sworn.exists() else []
        if promised:
            assert steps and step_name(steps[-1]) >= promised[-1], "a committed checkpoint was lost"
        for step in steps:
            assert verify(Storage(), run / step_name(step)) == [], "a partial checkpoint has a committed one's name"
        assert len([name for name in os.listdir(run) if name.startswith(".")]) <= 2, "leftovers pile up"
        loaded = steps[-1] if steps else 0
        soak.tried()
    assert loaded > kills // 2, "hardly any save was committed between the kills"


@pytest.mark.trials_of("kills while saving")
def test_nothing_is_lost_when_ranks_are_killed_while_they_save(tmp_path, soak):
    kill_at_random(tmp_path, 8, random.Random(0), soak)


@pytest.mark.trials_of("kills while saving")
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_in_a_thousand_kills(seed, tmp_path, soak):
    kill_at_random(tmp_path, 50, random.Random(1 + seed), soak)
