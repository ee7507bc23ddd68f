"""The time in which a backward of one model runs: from the first thing autograd does in the model until autograd ends.

A backward that raises has no end of its own: it is closed by the next forward, step or zero_grad(), which completes the
order of its reductions, so that all ranks stay in step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from onefold.comm.spans import spanned
from onefold.runtime.accumulating import Accumulating
from onefold.runtime.phases import Progress
from onefold.runtime.reduce_schedule import ReduceSchedule
from onefold.runtime.unsharding import Unsharding


class Backward:
    """`closed` is called at the end of every backward that brought gradients and did not raise, `failed` once it is
    known that one has raised."""

    def __init__(
        self,
        unsharding: Unsharding,
        schedule: ReduceSchedule,
        progress: Progress,
        accumulating: Accumulating,
        closed: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self._unsharding, self._schedule, self._progress = unsharding, schedule, progress
        self._accumulating, self._closed, self._failed = accumulating, closed, failed
        self._training_thread = threading.get_ident()

    def trains_here(self) -> None:
        """A training forward runs in this thread."""
        self._training_thread = threading.get_ident()

    def enter(self) -> None:
        """Called inside backward, in its outermost graph where we can: the end of that graph closes the backward."""
        if not self._unsharding.in_backward:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
            self._unsharding.open_backward()

    @spanned("close", "backward", "the model")
    def _end(self) -> None:
        if self._unsharding.in_backward:  # else an error cut it short, and `close_failed` has closed it
            with torch.no_grad():
                if self._close():
                    self._closed()

    def _close(self) -> bool:
        """True if the backward brought gradients."""
        reducing = self._accumulating.reducing
        gradients = self._progress.backward_ended(reducing=reducing)
        self._unsharding.close_backward()
        if gradients:
            self._schedule.flush(start=reducing)
        return gradients

    def close_failed(self) -> None:
        """Close a backward that raised, if there is one."""
        ours = threading.get_ident() == self._training_thread  # another thread may run a forward during our backward
        if self._unsharding.in_backward and ours and torch._C._current_graph_task_id() == -1:
            self._close()
            self._failed()
