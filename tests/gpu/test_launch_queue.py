"""A host that enqueues faster than the device runs does not stop the threads that run host updates."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks

pytestmark = pytest.mark.gpu
BLOCKS, KERNELS, CYCLES = 48, 40, 20_000_000  # a backward of some 2,000 launches that runs for about half a second
STILL = 0.15  # seconds: less than half of such a backward


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.cuda._sleep(CYCLES)
        return grad


class Block(nn.Module):
    """Many small kernels, and a backward that keeps the device busy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        y = SlowBackward.apply(self.linear(x))
        for _ in range(KERNELS):
            y = y * 1.001
        return x + y


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
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).cuda()
    onefold.shard(model, stage=3, precision="bf16", offload="host", units=Block, bucket_bytes=1 << 18)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-4)
    x = torch.randn(16, 512, device="cuda")
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
