"""N rank processes and their pipes: start, listen, end. They never outlive their owner."""

import contextlib
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Collection, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.harness.failures import RankHang, how_it_ended
from tests.harness.packed_calls import Died, Setup
from tests.harness.worker import STACKS_SIGNAL, rank_main
from tests.harness.worlds import GLOO, World

STACKS_TIMEOUT_S = 5.0

# A fork of a process that has already imported torch takes milliseconds; importing it takes seconds, and as long
# again for torch._dynamo, which the first optimizer of a process imports; onefold besides, for ranks that live shortly.
_context = multiprocessing.get_context("forkserver")
LIBRARIES = ["tests.uncollected", "torch._dynamo", "pytest", "onefold.train.run.start", "tests.harness.worker"]
FRAMEWORKS = [
    "transformers.trainer",
    "peft",
    "lightning",
]  # five seconds more; one that is not installed is passed over
_context.set_forkserver_preload(LIBRARIES)


def preload_frameworks() -> None:
    """Ranks are forked with transformers, PEFT and Lightning imported, if this is called before the first of them."""
    _context.set_forkserver_preload([*LIBRARIES, *FRAMEWORKS])


class Event(NamedTuple):
    rank: int
    message: Any


class RankProcesses:
    def __init__(
        self, n: int, *, init: bool, once: bool, env: dict[str, str] | None = None, world: World = GLOO
    ) -> None:
        # The store lives here, on a port that the system picks: no race for it, and no rank's death takes it away.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._processes = []
        self._conns: list[Connection] = []
        try:
            for rank in range(n):
                here = {**world.environ(rank), **(env or {})}
                stacks = str(self._stacks_path(rank))
                setup = Setup(rank, n, self._store.port, init, once, here, stacks, world.backend)
                ours, theirs = _context.Pipe()
                self._conns.append(ours)
                process = _context.Process(target=rank_main, args=(setup, theirs), name=f"rank{rank}of{n}")
                with theirs:  # theirs alone, or its end would never show
                    process.start()
                self._processes.append(process)
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, rank: int, message: Any) -> None:
        try:
            self._conns[rank].send_bytes(pickle.dumps(message))
        except OSError:
            pass  # the rank is gone, which next_event reports with its exit code

    def next_event(self, ranks: Collection[int], deadline_s: float) -> Event | None:
        """The next message of any of these ranks, or its death; None when time is up."""
        by_handle = {self._conns[rank]: rank for rank in ranks}
        by_handle |= {self._processes[rank].sentinel: rank for rank in ranks}
        ready = wait(list(by_handle), max(0.0, deadline_s - time.monotonic()))
        for rank in sorted({by_handle[handle] for handle in ready}):
            try:
                if self._conns[rank].poll():  # last words come before the death
                    return Event(rank, pickle.loads(self._conns[rank].recv_bytes()))
            except (EOFError, OSError):
                pass
            self._processes[rank].join()
            return Event(rank, Died(self._processes[rank].exitcode))
        return None

    def kill(self, ranks: Iterable[int], signum: int) -> None:
        for rank in ranks:
            if self._processes[rank].is_alive():
                with contextlib.suppress(ProcessLookupError):  # it ended just now
                    os.kill(self._processes[rank].pid, signum)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for conn in self._conns:
            conn.close()
        self._folder.cleanup()

    def end_with_stacks(self) -> dict[int, str]:
        """End every rank, and say where each one was."""
        ranks = range(len(self._processes))
        self.kill(ranks, STACKS_SIGNAL)  # writes the stacks, then dies of it
        deadline_s = time.monotonic() + STACKS_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
        stacks = {rank: self._stack(rank) for rank in ranks}
        self.end()
        return stacks

    def hang(self, name: str, timeout_s: float, waiting: list[int], said: str = "") -> RankHang:
        return RankHang(name, timeout_s, waiting, self.end_with_stacks(), said)

    def _stack(self, rank: int) -> str:
        path = self._stacks_path(rank)
        text = path.read_text() if path.exists() else ""
        exitcode = self._processes[rank].exitcode
        if text:
            return text
        return "(no stack: did not answer the signal)" if exitcode is None else f"(no stack: {how_it_ended(exitcode)})"

    def _stacks_path(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.stacks"
