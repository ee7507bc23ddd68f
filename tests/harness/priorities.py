"""Who gets a core first: ranks that compute, then gloo's threads.

While a rank sends, it holds the lock of a connection, and gloo's thread asks for that lock over and over as long as the
connection has something to read. Where ranks outnumber cores, the sender loses its core to the very thread that its
message wakes, and a gloo thread spins until its time slice ends: a third of the processor time of a test of stages.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

GLOO_NICE = 19  # the highest: with 10 its threads still spin twice as long


def take_turns() -> None:
    """From now on this process, and all that it starts, takes no core from another of them: it waits for its turn."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def put_gloo_behind() -> None:
    """Threads of gloo groups that this process makes from now on get a core once nobody else wants it."""
    make = dist.ProcessGroupGloo.__init__

    def make_behind(group: dist.ProcessGroupGloo, *args: Any, **kwargs: Any) -> None:
        make(group, *args, **kwargs)
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # a thread that ended just now
                if (task / "comm").read_text() == "gloo_tcp_loop\n":
                    os.setpriority(os.PRIO_PROCESS, int(task.name), GLOO_NICE)

    dist.ProcessGroupGloo.__init__ = make_behind
