"""The processes of one system: started, asked, heard, and ended; also when one of them fails or falls silent."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.systems.table import OTHER, SYSTEMS
from benchmarks.work import Work
from tests.harness.worlds import shared_gpu_environ

TAIL = 2000  # characters of what a failed rank wrote to stderr


class CrewFailed(RuntimeError):
    """A rank failed, ended or fell silent; and the end of what it wrote to stderr."""

    def __init__(self, what: str, told: str) -> None:
        super().__init__(what)
        self.told = told


def start_worker(*words: str, **settings: Any) -> subprocess.Popen[bytes]:
    """`python WORDS`, in a new interpreter."""
    return subprocess.Popen([sys.executable, *words], **settings)


class Crew:
    """All ranks of one system. Closing it ends them, whatever they are doing."""

    def __init__(
        self, work: Work, system: str, *, timeout_s: float, counts_wire: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.system, self._timeout_s = system, timeout_s
        checkout = SYSTEMS[system].checkout
        name = system.removeprefix(OTHER)
        asked = json.dumps({"work": dataclasses.asdict(work), "system": name, "counts_wire": counts_wire})
        self._logs = [tempfile.TemporaryFile("w+") for _ in range(work.ranks)]  # noqa: SIM115
        port = free_port()
        pipe = subprocess.PIPE
        added = {**imports_from(checkout), **(environ or {})}
        environs = [environment(work, rank, port) | added for rank in range(work.ranks)]
        self.processes = [
            start_worker("-m", "benchmarks.worker", asked, stdin=pipe, stdout=pipe, stderr=log, cwd=checkout, env=found)
            for found, log in zip(environs, self._logs)
        ]
        self._unread = [b""] * work.ranks

    def hear(self) -> list[dict[str, Any]]:
        """The next answer of every rank."""
        deadline = time.monotonic() + self._timeout_s
        with selectors.DefaultSelector() as waiting:
            for rank, process in enumerate(self.processes):
                if b"\n" not in self._unread[rank]:
                    assert process.stdout
                    waiting.register(process.stdout, selectors.EVENT_READ, rank)
            while silent := waiting.get_map():
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    rank = min(key.data for key in silent.values())
                    raise self._failure(rank, f"did not answer within {self._timeout_s:.0f} s")
                for key, _ in ready:
                    self._read(key, waiting)
        return [self._answer(rank) for rank in range(len(self.processes))]

    def _read(self, key: selectors.SelectorKey, waiting: selectors.BaseSelector) -> None:
        """More of what a rank says; once it has said a line, it is not waited for."""
        chunk = os.read(key.fd, 1 << 16)
        if not chunk:
            code = self.processes[key.data].wait(timeout=60)  # its output is closed, so it is about to end
            raise self._failure(key.data, f"ended without an answer, {told_code(code)}")
        self._unread[key.data] += chunk
        if b"\n" in chunk:
            waiting.unregister(key.fileobj)

    def _answer(self, rank: int) -> dict[str, Any]:
        line, _, self._unread[rank] = self._unread[rank].partition(b"\n")
        (what, found), *_ = json.loads(line).items()
        if what == "failed":
            raise self._failure(rank, str(found))
        return dict(found)

    def ask(self, command: str) -> None:
        for rank, process in enumerate(self.processes):
            assert process.stdin
            try:
                process.stdin.write(f"{command}\n".encode())
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failure(rank, "has ended") from None

    def _failure(self, rank: int, what: str) -> CrewFailed:
        self.end()  # also so that all is written
        log = self._logs[rank]
        log.seek(0)
        return CrewFailed(f"rank {rank}: {what}", log.read()[-TAIL:])

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        self.end()
        for process in self.processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # it ended with a command unread
        for log in self._logs:
            log.close()


def told_code(code: int) -> str:
    """
    >>> told_code(-9), told_code(1)
    ('killed by signal 9', 'with exit status 1')
    """
    return f"killed by signal {-code}" if code < 0 else f"with exit status {code}"


def environment(work: Work, rank: int, port: int) -> dict[str, str]:
    """What torchrun and DeepSpeed's launcher would set, and the same allocator for all."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": work.ranks, "LOCAL_WORLD_SIZE": work.ranks}
    found = {
        **os.environ,
        **{name: str(value) for name, value in place.items()},
        "LOCAL_SIZE": str(work.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": work.device,
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    if work.threads:
        found["OMP_NUM_THREADS"] = str(work.threads)
    if work.device == "cuda" and work.ranks > 1:
        found |= shared_gpu_environ(rank) | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # as `import onefold` sets it
    if work.device == "cpu":
        found |= {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    return found


def imports_from(checkout: str | None) -> dict[str, str]:
    """What makes a process import another checkout instead of the installed package."""
    return {"PYTHONPATH": os.pathsep.join((str(Path(checkout, "src")), checkout))} if checkout else {}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
