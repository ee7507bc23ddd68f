"""A model that nobody holds any more takes its memory, its files and its threads with it."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import onefold
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.offload.runs import offload_of

PATIENCE_S = 30.0


def left_over(tiers: str, path: str, inside: bool) -> tuple[bool, int, int]:
    """Of a model that trained and was let go of: whether it is still there, its open files, its threads."""
    onefold.init()
    threads = set(threading.enumerate())
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    onefold.shard(model, stage=3, precision="bf16", offload=offload_of(tiers, path), bucket_bytes=8 << 10)
    adam = onefold.Optimizer(model, torch.optim.AdamW, step_in_backward=inside)
    for _ in range(2):
        model(torch.randn(2, 64).bfloat16()).float().sum().backward()
        adam.step()
        adam.zero_grad()
    alive = weakref.ref(model)
    mine = [thread for thread in threading.enumerate() if thread not in threads]
    assert mine, "the host updates in threads of its own"
    del model, adam
    torch.distributed.barrier()
    deadline = time.monotonic() + PATIENCE_S
    while any(thread.is_alive() for thread in mine) and time.monotonic() < deadline:
        gc.collect()  # each thread lets go of its last job in its own time
    folder = os.path.realpath(path)
    files = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry.path)]
    return alive() is not None, sum(folder in file for file in files), sum(thread.is_alive() for thread in mine)


@pytest.mark.parametrize(("tiers", "inside"), thinned(["optimizer on the host", "both on disk"], [False, True]))
def test_a_model_that_is_let_go_of_leaves_nothing(tiers: str, inside: bool, tmp_path) -> None:
    assert run_ranks(2, left_over, tiers, str(tmp_path), inside) == [(False, 0, 0)] * 2
