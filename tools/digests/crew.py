"""The ranks that run cases: one set of processes for each number of ranks, started again after a failure.

Processes are forked from a server that has imported torch already (`preload`), so a new set starts quickly.
"""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from tools.digests.table import Case, Refusal

TIMEOUT_S = 120.0
_context = multiprocessing.get_context("forkserver")
PRELOAD = ["torch._dynamo", "onefold", "tools.digests.case"]


def preload() -> None:
    """Let the server import what every rank needs. Before the first process; a test suite has a server of its own."""
    _context.set_forkserver_preload(PRELOAD)


class Outcome(NamedTuple):
    """What came of a case: a digest, the class of a refusal, or why there is neither."""

    name: str
    digest: str
    seconds: float
    failed: bool = False


class RankFailed(RuntimeError):
    """A rank raised, ended or fell silent."""


def outcomes(ranks: int, cases: Sequence[Case | Refusal], timeout_s: float = TIMEOUT_S) -> Iterator[Outcome]:
    """Run these cases, all with this number of ranks."""
    crew: Crew | None = None
    try:
        for case in cases:
            began = time.monotonic()
            crew = crew or Crew(ranks)
            try:
                told, failed = crew.run(case, timeout_s), False
            except RankFailed as failure:
                told, failed = str(failure), True
            if failed or isinstance(case, Refusal):  # its peers may be in the middle of a call
                crew.end()
                crew = None
            yield Outcome(case.name, told, time.monotonic() - began, failed)
    finally:
        if crew is not None:
            crew.end()


class Crew:
    """A process for each rank, with a pipe to each. None outlives `end`, or this process."""

    def __init__(self, ranks: int) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="digests-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=serve, args=(rank, ranks, self._store.port, theirs), daemon=True)
            with theirs:  # the rank has it now; an end that stayed here would hide the rank's death
                process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, case: Case | Refusal, timeout_s: float) -> str:
        """The digest over what all ranks said, or the class of the error that refused the case."""
        with tempfile.TemporaryDirectory(dir=self._folder.name) as folder:
            for pipe in self._pipes:
                pipe.send((case, folder))
            told = self._hear(time.monotonic() + timeout_s)
        if isinstance(case, Refusal):
            return " ".join(sorted({line for lines in told for line in lines}))
        digest = hashlib.sha256()
        for rank, lines in enumerate(told):
            for line in lines:
                digest.update(f"{rank} {line}\n".encode())
        return digest.hexdigest()

    def _hear(self, deadline_s: float) -> list[list[str]]:
        told: dict[int, list[str]] = {}
        while len(told) < len(self._pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in told}
            ready = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise RankFailed(f"no answer in time from rank {min(waiting.values())}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    said, error = pipe.recv()
                except EOFError:
                    raise RankFailed(f"rank {waiting[pipe]} ended") from None
                if error:
                    raise RankFailed(f"rank {waiting[pipe]}: {error}")
                told[waiting[pipe]] = said
        return [told[rank] for rank in sorted(told)]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def serve(rank: int, ranks: int, port: int, pipe: Connection) -> None:
    """In a rank's process: join the group, then run what comes through the pipe until it closes."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_RUN_ID="digests",
    )  # fmt: skip
    import torch

    import onefold
    from tools.digests.case import run

    torch.set_num_threads(1)
    onefold.init()
    gc.freeze()  # collections look at what cases leave, not at all of torch
    while True:
        try:
            case, folder = pipe.recv()
        except EOFError:
            return
        said: list[str] = []
        error = ""
        try:
            said = run(case, folder)
        except Exception as raised:
            where = traceback.extract_tb(raised.__traceback__)[-1]
            text = str(raised).splitlines()[0] if str(raised) else ""
            error = f"{type(raised).__name__}: {text} ({Path(where.filename).name}:{where.lineno})"
        gc.collect()  # before the answer: a destructor that hangs is this case's hang
        pipe.send((said, error))
