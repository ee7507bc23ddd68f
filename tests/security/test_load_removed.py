"""Two ranks that load from a folder whose run removes checkpoints meanwhile take what is then the newest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import onefold
from onefold.checkpoint.format.reading import Checkpoint
from onefold.checkpoint.protocol import load as loading
from onefold.errors import CheckpointRemoved
from tests.harness import run_ranks


def trained(value: float) -> tuple[torch.nn.Module, onefold.Optimizer]:
    model = torch.nn.Linear(8, 8)
    torch.nn.init.constant_(model.weight, value)
    sharded = onefold.shard(model, stage=3)
    return sharded, onefold.Optimizer(sharded, torch.optim.AdamW, lr=1e-3)


def load_while_it_is_removed(folder: str, name: str, fallback: bool) -> tuple[int, float, str, list[str]]:
    """The step that was loaded, a weight, what was raised, and the folders left; step 2 comes while step 1 is read."""
    run, opened = Path(folder), []
    model, optimizer = trained(1.0)
    onefold.save(run, model, optimizer, step=1, extra=1)
    later, its_optimizer = trained(2.0)
    real = loading.fill_parameters

    def fill(engine, source, found) -> None:
        if not opened:
            opened.append(source.folder)
            assert isinstance(source, Checkpoint)
            onefold.save(run, later, its_optimizer, step=2, extra=2, keep=1)
        real(engine, source, found)

    loading.fill_parameters = fill
    said, extra = "", 0
    try:
        extra = onefold.load(run / name, model, optimizer, fallback=fallback)
    except CheckpointRemoved as error:
        said = str(error)
    finally:
        loading.fill_parameters = real
    found = 0.0
    if extra:
        with onefold.full_parameters(model):
            found = float(model.weight[0, 0])
    return extra, found, said, sorted(path.name for path in run.iterdir())


@pytest.mark.parametrize("fallback", [False, True])
def test_load_takes_what_is_then_the_newest_and_sets_nothing_aside(tmp_path, fallback):
    ends = run_ranks(2, load_while_it_is_removed, str(tmp_path), "", fallback)
    assert ends == [(2, 2.0, "", ["step-00000002"])] * 2


def test_load_of_one_checkpoint_says_that_it_was_removed(tmp_path):
    ends = run_ranks(2, load_while_it_is_removed, str(tmp_path), "step-00000001", True)
    assert len(set(map(str, ends))) == 1 and ends[0][0] == 0
    assert "step-00000001 was removed by its run while it was being read; newest is now step-00000002" in ends[0][2]
