"""A file is not read ahead while an update has it: between its read and its write it holds the values of the last step.

Nothing is timed. The update of the second layer is held before it writes its values until the forward of the first
layer runs, which comes after the second one's file would be read.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import onefold
from onefold.offload.disk import DiskFile, Request
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.models import Watched
from tests.offload.runs import files_in

PATIENCE_S = 60.0


def trained(offload: onefold.Offload | None) -> list[float]:
    """Losses of six steps."""
    onefold.init()
    torch.manual_seed(0)
    running = threading.Event()
    layers = nn.Sequential(*(Watched() for _ in range(4)))
    model = onefold.shard(layers, stage=3, precision="bf16", offload=offload, units=Watched, prefetch=0)
    layers[0].on_forward = running.set
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-1)
    if offload is not None:
        assert offload.path is not None
        name = f"parameters of {engine_of(model).units[1].name}"
        (file,) = (file for file in files_in(str(offload.path)) if file.name == name)
        hold_before_writing(file, running)
    losses = []
    for _ in range(6):
        loss = model(torch.ones(4, 32).bfloat16()).float().square().sum()
        losses.append(loss.item())
        loss.backward()
        running.clear()
        adam.step()
        adam.zero_grad()
    running.set()
    return losses


def hold_before_writing(file: DiskFile, until: threading.Event) -> None:
    plain = file.write

    def write(buffer: torch.Tensor) -> Request:
        assert until.wait(PATIENCE_S), "nobody waits for the second layer before the first has run"
        return plain(buffer)

    file.write = write


def compare(path: str) -> bool:
    return trained(None) == trained(onefold.Offload(optimizer="disk", parameters="disk", path=path))


@pytest.mark.parametrize("ranks", [1, 2])
def test_forward_reads_no_values_of_the_last_step(ranks: int, tmp_path) -> None:
    assert run_ranks(ranks, compare, str(tmp_path)) == [True] * ranks
