"""A host that enqueues faster than the device runs does not stop the threads that run host updates."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import onefold
from tests.harness import run_ranks
from tests.models.many_kernels import ManyKernels

pytestmark = pytest.mark.gpu
BLOCKS, WIDTH = 48, 512  # a backward of some 2,500 launches
STILL = 0.1  # seconds: a part of such a backward


class Ticks:
    """The longest gap between two runs of a Python thread that wants to run every millisecond."""

    def __init__(self) -> None:
        self.longest, self._ended = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._tick)

    def _tick(self) -> None:
        last, ended = time.perf_counter(), False
        while not ended:
            ended = self._ended.wait(0.001)
            now = time.perf_counter()
            self.longest, last = max(self.longest, now - last), now

    def __enter__(self) -> Ticks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def longest_standstill() -> float:
    torch.cuda.set_device(0)
    onefold.init()
    model = nn.Sequential(*(ManyKernels(WIDTH) for _ in range(BLOCKS))).cuda()
    onefold.shard(model, stage=3, precision="bf16", offload="host", units=ManyKernels, bucket_bytes=1 << 18)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-4)
    x = torch.randn(16, WIDTH, device="cuda")
    found = 0.0
    for step in range(5):
        with Ticks() as ticks:
            model(x).float().square().mean().backward()
            adam.clip_grad_norm(1e6)
            adam.step()
            adam.zero_grad()
        if step >= 2:  # kernels are loaded, and spare memory is there
            found = max(found, ticks.longest)
    return found


def test_no_thread_stands_still_while_the_device_is_behind() -> None:
    (longest,) = run_ranks(1, longest_standstill, timeout_s=120)
    assert longest < STILL, f"a thread could not run for {longest:.2f} s"
