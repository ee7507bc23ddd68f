"""State that rests on disk: files that are read before use and written after it, beside compute.

Requests are cut into pieces of a few MiB, and a few threads run them in the order in which they were asked for; the
system calls let Python go on meanwhile. The requests of one file run one after the other, so a read sees the write
before it; files do not wait for each other. A request holds its buffer until it is done. The first error ends it all:
what could not be written is lost, so whoever asks next hears of it too.

Threads, not io_uring: they keep a disk as busy as it can be at these sizes (docs/performance.md), so nothing is left to
gain by a binding that Python does not have.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from onefold.comm.spans import NOTHING, span
from onefold.errors import OffloadError, OnefoldError, StateError
from onefold.offload import files
from onefold.offload.host_memory import ALIGN, bytes_of

THREADS = 4
PIECE_BYTES = 4 << 20  # neither more threads nor larger pieces were faster


class Scratch:
    """A folder for files that live as long as this process, which needs so many bytes there all in all.

    `buffered` goes through the page cache even where O_DIRECT works.

    >>> from onefold.offload.host_memory import host_bytes
    >>> scratch = Scratch("/tmp", needed_bytes=4096)
    >>> file = scratch.file(4096, "the optimizer state of unit 0")
    >>> file.write(host_bytes(4096, pinned=False)).wait()
    >>> scratch.close()
    """

    def __init__(self, path: str | Path, needed_bytes: int, *, buffered: bool = False) -> None:
        self.path = Path(path).expanduser().absolute()
        files.check_folder(self.path, needed_bytes)
        self._direct = not buffered and files.takes_direct(self.path)
        self.workers = Workers(self.path)
        self._files: weakref.WeakSet[DiskFile] = weakref.WeakSet()
        weakref.finalize(self, self.workers.stop)  # at the latest when the interpreter ends

    @property
    def direct(self) -> bool:
        """Whether bytes go past the page cache (O_DIRECT)."""
        return self._direct

    def file(self, nbytes: int, name: str) -> DiskFile:
        """So many zeros, for as long as somebody holds the file; `name` says in errors what is in it."""
        self.workers.check()
        try:
            number = files.nameless(self.path, direct=self._direct)
        except OSError as error:
            raise self.workers.failed(error, f"make a file for {name} in {self.path}") from error
        file = DiskFile(self, number, name)
        self._files.add(file)
        file.resize(nbytes)
        return file

    def close(self) -> None:
        """Wait for what runs, give up what does not run yet, and free the disk."""
        self.workers.stop()
        for file in list(self._files):
            file.shut()


class DiskFile:
    """Bytes on disk, a multiple of 4096 of them."""

    def __init__(self, scratch: Scratch, number: int, name: str) -> None:
        self.name, self.nbytes = name, 0
        self.scratch, self.workers = scratch, scratch.workers
        self.asked: deque[Pending] = deque()  # the first of them runs
        self._number = number
        self.shut = weakref.finalize(self, os.close, number)
        self.shut.atexit = False  # the system does it then

    def fileno(self) -> int:
        return self._number

    def read(self, buffer: Tensor) -> Pending:
        """Fill the buffer with the first bytes of the file."""
        return self._ask("read", os.preadv, buffer)

    def write(self, buffer: Tensor) -> Pending:
        """The buffer becomes the first bytes of the file. It must not change until that is done."""
        return self._ask("write", os.pwritev, buffer)

    def resize(self, nbytes: int) -> None:
        """Cut the file, or let it grow by zeros, after all that was asked of it before."""
        assert nbytes % ALIGN == 0, nbytes
        with self.workers.asking():
            before = list(self.asked)[-1:]
        for pending in before:
            pending.done.wait()
        self.workers.check()
        try:
            files.resize(self._number, nbytes)
        except OSError as error:
            raise self.workers.failed(error, f"make room for {self.name} in {self.scratch.path}") from error
        self.nbytes = nbytes

    def _ask(self, verb: str, move: files.Move, buffer: Tensor) -> Pending:
        assert buffer.dtype == torch.uint8 and buffer.ndim == 1 and buffer.is_contiguous() and buffer.is_cpu
        assert buffer.numel() % ALIGN == buffer.data_ptr() % ALIGN == 0, (buffer.numel(), buffer.data_ptr())
        assert buffer.numel() <= self.nbytes, (buffer.numel(), self.nbytes)
        pending = Pending(self, verb, move, buffer)
        with self.workers.asking():
            self.workers.asked += 1
            self.asked.append(pending)
            if len(self.asked) == 1:
                pending.start()
        return pending


class Pending:
    """A read or write that was asked for."""

    def __init__(self, file: DiskFile, verb: str, move: files.Move, buffer: Tensor) -> None:
        self._file, self._verb, self._move = file, verb, move
        self._buffer: Tensor | None = buffer
        self._starts = range(0, max(buffer.numel(), 1), PIECE_BYTES)
        self._left = len(self._starts)
        self._error: OnefoldError | None = None
        self.done = threading.Event()

    def wait(self) -> None:
        """Until it is done. Raises what went wrong, once."""
        self._file.workers.check_process()
        with NOTHING if self.done.is_set() else span("wait", "disk", self._file.name):
            self.done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def start(self) -> None:
        for start in self._starts:
            self._file.workers.pieces.put(partial(self._piece, start))

    def _piece(self, start: int) -> None:
        """In a thread: one piece, unless there is no more use in it; with the last one the request is done."""
        workers = self._file.workers
        error = workers.trouble() or self._tried(self._move_piece, start)
        with workers.lock:
            self._error = self._error or error
            self._left -= 1
            last = self._left == 0
        if last:
            self._end()

    def _move_piece(self, start: int) -> None:
        assert self._buffer is not None
        memory = bytes_of(self._buffer)[start : start + PIECE_BYTES]
        files.transfer(self._move, self._file.fileno(), memory, start)

    def _end(self) -> None:
        file, workers = self._file, self._file.workers
        if self._error is None and not file.scratch.direct:
            self._error = self._tried(files.leave_cache, file.fileno(), self._verb == "write")
        with workers.lock:
            self._buffer = None
            file.asked.popleft()
            if file.asked:
                file.asked[0].start()
            workers.asked -= 1
            workers.lock.notify_all()
            self.done.set()

    def _tried(self, work: Callable[..., None], *args: int) -> OnefoldError | None:
        try:
            work(*args)
        except BaseException as error:
            return self._file.workers.failed(error, f"{self._verb} {self._file.name} in {self._file.scratch.path}")
        return None


class Workers:
    """The threads of a Scratch, and why they work no more. They hold nothing of it but the pieces to run."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Condition()
        self.pieces: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.asked = 0  # requests that are not done
        self._path, self._process = path, os.getpid()
        self._first_error: OffloadError | None = None
        self._stopped = False
        self._threads = [
            threading.Thread(target=_work, args=(self.pieces,), name=f"onefold-disk-{number}", daemon=True)
            for number in range(THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def failed(self, error: BaseException, doing: str) -> OffloadError:
        """What to raise for it; if it is the first, for all that is asked from now on too."""
        told = files.explained(error, doing)
        with self.lock:
            self._first_error = self._first_error or told
        return _again(told)

    def trouble(self) -> OnefoldError | None:
        """Why nothing is read or written any more: an error of its own for each who asks."""
        if self._first_error is not None:
            return _again(self._first_error)
        return StateError(f"the files in {self._path} were closed; make another Scratch") if self._stopped else None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """What is asked for inside will be run; raises if nothing is."""
        self.check_process()  # before the lock, which a fork may have caught closed
        with self.lock:
            self.check()
            yield

    def check(self) -> None:
        self.check_process()
        if (error := self.trouble()) is not None:
            raise error

    def check_process(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                f"state in {self._path} was used in a process forked from the one that keeps it there, and its threads "
                f"are not here; use it in the first one, or start others by spawn"
            )

    def stop(self) -> None:
        if os.getpid() != self._process:
            return  # the threads of another
        with self.lock:
            self._stopped = True
            self.lock.wait_for(lambda: self.asked == 0)
        for _ in self._threads:
            self.pieces.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # one of them may hold the last reference
                thread.join()


def _again(error: OffloadError) -> OffloadError:
    """The same, to be raised: one that was raised holds the frames it went through, and all that is in them."""
    again = OffloadError(*error.args)
    again.__cause__ = error.__cause__
    return again


def _work(pieces: SimpleQueue[Callable[[], None] | None]) -> None:
    while (piece := pieces.get()) is not None:
        piece()
        del piece  # it holds a file, which may be waiting to be freed
