"""shutdown(): the end of communication, on purpose."""

from __future__ import annotations

from contextlib import nullcontext, suppress

import torch.distributed as dist

from onefold.comm.diagnosis import SHUTDOWN
from onefold.comm.directions import end_directions
from onefold.comm.inflight import serve_peers
from onefold.comm.links import abort_links, end_links
from onefold.comm.watching import current_watcher, end_watcher


def shutdown() -> None:
    """Leave the other ranks: the end of a script that communicates no more, on every rank.

    Waits until peers have received what this rank has sent, then destroys the process groups. A rank that still waits
    for this one is told that it has called shutdown(). May be called again; after it, init() starts anew.

    >>> import onefold
    >>> onefold.init()
    >>> onefold.shutdown()
    """
    if not dist.is_initialized():
        return
    watcher = current_watcher()
    failed = watcher is not None and watcher.finding is not None
    try:
        if not failed:
            serve_peers()
            if watcher is not None:
                watcher.drain()
            end_links()
    finally:
        end_directions()
        end_watcher(SHUTDOWN)
        with suppress(Exception) if failed else nullcontext():
            if failed:
                abort_links()
            dist.destroy_process_group()
