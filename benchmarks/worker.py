"""A process that is one rank of one system. It waits for a line, does what it says and answers in JSON, a line each.

    step 3      three steps; each is answered with its seconds and loss as it ends
    rest        cached device memory goes back to the device, for others
    finish      what was the most memory; then the process ends, without the minutes that freeing it may take

Between lines it is blocked and costs nothing. When its driver is gone, its input ends, and so does it. Whatever a
library prints goes to stderr: only answers are on stdout.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from benchmarks.systems.loop import Ready
from benchmarks.systems.table import SYSTEMS
from benchmarks.work import Work

PATIENCE = timedelta(minutes=10)


def join(work: Work) -> None:
    """This rank's process group, from the environment that the driver made."""
    if work.threads:
        torch.set_num_threads(work.threads)
    if work.device == "cuda":
        torch.cuda.set_device(0)
    if work.rank_of > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=work.rank_of)
        return
    backend = "cpu:gloo,cuda:nccl" if work.device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)


class Rank:
    """Runs steps and knows what they cost."""

    def __init__(self, work: Work, system: str, rank: int, counts_wire: bool) -> None:
        self._work, self._rank, self._counts_wire, self._taken = work, rank, counts_wire, 0
        began = time.perf_counter()
        join(work)
        self._ready: Ready = SYSTEMS[system].build(work)
        self._wait()
        self.built = {
            "parameters": self._ready.parameters,
            "build_s": time.perf_counter() - began,
            "build_rss_bytes": peak_rss(),
            **self._device_peaks("build_"),
        }
        forget_peak_rss()
        if work.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def step(self) -> dict[str, Any]:
        tokens, before = self._work.tokens(self._rank, self._taken), self._sent()
        self._meet()
        began = time.perf_counter()
        loss = self._ready.step(tokens)
        self._meet()
        found: dict[str, Any] = {"step": self._taken, "seconds": time.perf_counter() - began, "loss": loss.item()}
        if before is not None:
            found["sent_bytes"] = (self._sent() or 0) - before
        self._taken += 1
        return found

    def rest(self) -> dict[str, Any]:
        if self._work.device == "cuda":
            torch.cuda.empty_cache()
        return {}

    def finish(self) -> dict[str, Any]:
        return {"peak_rss_bytes": peak_rss(), **self._device_peaks("peak_"), "says": self._ready.says()}

    def _meet(self) -> None:
        self._wait()
        dist.barrier()

    def _wait(self) -> None:
        if self._work.device == "cuda":
            torch.cuda.synchronize()

    def _sent(self) -> int | None:
        """All that ranks ever sent over the loopback device; nobody sends while it is read."""
        if not self._counts_wire:
            return None
        from tests.harness.netns import loopback_bytes

        dist.barrier()
        found = loopback_bytes()
        dist.barrier()
        return found

    def _device_peaks(self, prefix: str) -> dict[str, int]:
        if self._work.device != "cuda":
            return {}
        used, taken = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {f"{prefix}device_bytes": used, f"{prefix}device_reserved_bytes": taken}


def peak_rss() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("this kernel does not say how much memory a process had at most")


def forget_peak_rss() -> None:
    """From here on only what comes counts."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass  # not allowed here: then the peak is that of the whole life


def own_stdout() -> TextIO:
    """The pipe to the driver; what others print to stdout goes to stderr from now on."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return pipe


def main() -> None:
    answers = own_stdout()

    def answer(what: str, found: Any) -> None:
        print(json.dumps({what: found}), file=answers, flush=True)

    try:
        asked = json.loads(sys.argv[1])
        rank = Rank(Work.read(asked["work"]), asked["system"], int(os.environ["RANK"]), asked["counts_wire"])
        answer("built", rank.built)
        for line in sys.stdin:
            command, *count = line.split()
            if command == "rest":
                answer("rested", rank.rest())
                continue
            if command == "finish":
                answer("finished", rank.finish())
                break
            for _ in range(int(count[0])):
                answer("stepped", rank.step())
    except Exception as error:  # the driver tells it, and goes on with the others
        traceback.print_exc()
        answer("failed", f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
