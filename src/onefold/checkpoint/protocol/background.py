"""Saves in the background, one at a time: the next save or load waits for it, and raises its error.

A process that ends waits for it too, before Python shuts down the threads that the save needs, and logs its error.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

from onefold.offload.host_memory import host_bytes

LOG = logging.getLogger("onefold")


class Worker:
    """The thread of the running save, and the host memory from which saves are written, which is kept for the next."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._memory: Tensor | None = None
        self._pinned = False

    @property
    def kept(self) -> int:
        """Bytes of host memory that are kept between saves."""
        return 0 if self._memory is None else self._memory.numel()

    def memory(self, size: int, *, pinned: bool) -> Tensor:
        """Host memory for a save, valid until the next call; no save may be running."""
        assert self._thread is None
        if self._memory is None or self._memory.numel() < size or self._pinned != pinned:
            self._memory = None  # first, so that both are never allocated at once
            self._memory, self._pinned = host_bytes(size, pinned=pinned), pinned
        return self._memory[:size]

    def start(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        assert self._thread is None
        self._thread = threading.Thread(target=run, name="onefold-save", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits for a running save, and raises its error, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None  # only now: after a KeyboardInterrupt the save goes on
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish_at_exit(self) -> None:
        try:
            self.finish()
        except BaseException as error:
            LOG.error("the checkpoint that was being saved when the process ended is lost: %s", error)


WORKER = Worker()  # one per process: a second save waits for the first


def finish_saves() -> None:
    """Wait until the checkpoint that save(wait=False) began is committed; raise what went wrong in it, if anything.

    Call it before the process group is destroyed or the script ends.

    >>> import onefold
    >>> onefold.finish_saves()
    """
    WORKER.finish()


atexit.register(WORKER.finish_at_exit)
with suppress(AttributeError):  # earlier than atexit: before Python shuts down the thread pools that hash
    threading._register_atexit(WORKER.finish_at_exit)  # type: ignore[attr-defined]
