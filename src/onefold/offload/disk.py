"""State on disk: scratch files that are read before use and written after it, by threads beside compute.

Requests are cut into pieces of a few MiB, and a few threads run the pieces in the order of the requests; the system
calls release the GIL. The requests of one file run one after the other, so a read sees the write before it; requests of
different files run side by side. A request holds its buffer until it is done. After the first error every request
raises: what could not be written is lost.

Threads, not io_uring: at these sizes they keep a disk as busy as it can be (docs/performance.md), so a binding, which
Python does not have, would gain nothing.
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
    """A folder for scratch files, which live as long as this process. Raises unless `needed_bytes` are free there.

    `buffered` files go through the page cache even where O_DIRECT works.

    >>> from onefold.offload.host_memory import host_bytes
    >>> scratch = Scratch("/tmp", needed_bytes=4096)
    >>> file = scratch.file(4096, "the optimizer state of unit 0")
    >>> file.write(host_bytes(4096, pinned=False)).wait()
    >>> scratch.close()
    """

    def __init__(self, path: str | Path, needed_bytes: int, *, buffered: bool = False) -> None:
        self.path = Path(path).expanduser().absolute()
        files.check_folder(self.path, needed_bytes)
        self._direct = not buffered and files.supports_direct(self.path)
        self.workers = Workers(self.path)
        self._files: weakref.WeakSet[DiskFile] = weakref.WeakSet()
        weakref.finalize(self, self.workers.stop)  # at the latest when the interpreter ends

    @property
    def direct(self) -> bool:
        """Whether bytes go past the page cache (O_DIRECT)."""
        return self._direct

    def file(self, nbytes: int, name: str) -> DiskFile:
        """A new file of so many zeros, freed with its object; `name` says in errors what it holds."""
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
        """Waits for the requests that run, drops those that wait, and frees the disk space."""
        self.workers.stop()
        for file in list(self._files):
            file.shut()


class DiskFile:
    """A scratch file; its length is a multiple of 4096 bytes."""

    def __init__(self, scratch: Scratch, number: int, name: str) -> None:
        self.name, self.nbytes = name, 0
        self.scratch, self.workers = scratch, scratch.workers
        self.requests: deque[Request] = deque()  # the first one runs
        self._number = number
        self.shut = weakref.finalize(self, os.close, number)
        self.shut.atexit = False  # at exit the kernel closes it

    def fileno(self) -> int:
        return self._number

    def read(self, buffer: Tensor) -> Request:
        """Starts to fill the buffer with the first bytes of the file."""
        return self._request("read", os.preadv, buffer)

    def write(self, buffer: Tensor) -> Request:
        """Starts to write the buffer to the start of the file. The buffer must not change until that is done."""
        return self._request("write", os.pwritev, buffer)

    def resize(self, nbytes: int) -> None:
        """Truncates the file, or extends it by zeros, after the requests before."""
        assert nbytes % ALIGN == 0, nbytes
        with self.workers.accepting():
            before = list(self.requests)[-1:]
        for request in before:
            request.done.wait()
        self.workers.check()
        try:
            files.resize(self._number, nbytes)
        except OSError as error:
            raise self.workers.failed(error, f"make room for {self.name} in {self.scratch.path}") from error
        self.nbytes = nbytes

    def _request(self, verb: str, move: files.Move, buffer: Tensor) -> Request:
        assert buffer.dtype == torch.uint8 and buffer.ndim == 1 and buffer.is_contiguous() and buffer.is_cpu
        assert buffer.numel() % ALIGN == buffer.data_ptr() % ALIGN == 0, (buffer.numel(), buffer.data_ptr())
        assert buffer.numel() <= self.nbytes, (buffer.numel(), self.nbytes)
        request = Request(self, verb, move, buffer)
        with self.workers.accepting():
            self.workers.unfinished += 1
            self.requests.append(request)
            if len(self.requests) == 1:
                request.start()
        return request


class Request:
    """A read or write of one file, run in pieces by the worker threads."""

    def __init__(self, file: DiskFile, verb: str, move: files.Move, buffer: Tensor) -> None:
        self._file, self._verb, self._move = file, verb, move
        self._buffer: Tensor | None = buffer
        self._starts = range(0, max(buffer.numel(), 1), PIECE_BYTES)
        self._left = len(self._starts)
        self._error: OnefoldError | None = None
        self.done = threading.Event()

    def wait(self) -> None:
        """Waits until the request is done, and raises its error, once."""
        self._file.workers.check_process()
        with NOTHING if self.done.is_set() else span("wait", "disk", self._file.name):
            self.done.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def start(self) -> None:
        """Queues all pieces for the worker threads."""
        for start in self._starts:
            self._file.workers.pieces.put(partial(self._piece, start))

    def _piece(self, start: int) -> None:
        """Runs one piece in a worker thread, unless an error came before; the last piece ends the request."""
        workers = self._file.workers
        error = workers.why_stopped() or self._tried(self._move_piece, start)
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
        """Marks the request done and starts the file's next one."""
        file, workers = self._file, self._file.workers
        if self._error is None and not file.scratch.direct:
            self._error = self._tried(files.drop_from_cache, file.fileno(), self._verb == "write")
        with workers.lock:
            self._buffer = None
            file.requests.popleft()
            if file.requests:
                file.requests[0].start()
            workers.unfinished -= 1
            workers.lock.notify_all()
            self.done.set()

    def _tried(self, work: Callable[..., None], *args: int) -> OnefoldError | None:
        try:
            work(*args)
        except BaseException as error:
            return self._file.workers.failed(error, f"{self._verb} {self._file.name} in {self._file.scratch.path}")
        return None


class Workers:
    """The threads of a Scratch, and the error that stopped them. They hold no reference to it but in the pieces that
    are queued."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Condition()
        self.pieces: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.unfinished = 0  # requests
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
        """The error to raise for a failed system call; the first one is also raised by all later requests."""
        explained = files.explained(error, doing)
        with self.lock:
            self._first_error = self._first_error or explained
        return _fresh(explained)

    def why_stopped(self) -> OnefoldError | None:
        """Why nothing is read or written any more, as a new exception object; None while requests are run."""
        if self._first_error is not None:
            return _fresh(self._first_error)
        return StateError(f"the files in {self._path} were closed; make another Scratch") if self._stopped else None

    @contextmanager
    def accepting(self) -> Iterator[None]:
        """Holds the lock while a request is queued; raises if the workers have stopped."""
        self.check_process()  # before the lock, which may have been held when this process was forked
        with self.lock:
            self.check()
            yield

    def check(self) -> None:
        self.check_process()
        if (error := self.why_stopped()) is not None:
            raise error

    def check_process(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                f"state in {self._path} was used in a forked process, which has not the threads that read and write "
                f"it; use it in the process that made it, or start others by spawn"
            )

    def stop(self) -> None:
        if os.getpid() != self._process:
            return  # forked: the threads are the parent's
        with self.lock:
            self._stopped = True
            self.lock.wait_for(lambda: self.unfinished == 0)
        for _ in self._threads:
            self.pieces.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # a worker may hold the last reference to the Scratch
                thread.join()


def _fresh(error: OffloadError) -> OffloadError:
    """A new exception object: one that was raised holds its traceback's frames, and the buffers in them."""
    fresh = OffloadError(*error.args)
    fresh.__cause__ = error.__cause__
    return fresh


def _work(pieces: SimpleQueue[Callable[[], None] | None]) -> None:
    while (piece := pieces.get()) is not None:
        piece()
        del piece  # it holds a file, which could not be freed while this thread waits
