"""Links: a link is one communicator, whose messages all ranks issue in one order, and the CUDA stream they run on.

NCCL runs the messages of one communicator in the order in which they were issued, which must be the same on all ranks.
Where ranks skip different blocks, all-gathers have one common order and reduce-scatters another, but there is none of
both together. Swaps in backward follow the ends of reductions, and how many others have started by then differs, too.
So each kind has its own link: two kinds on one communicator deadlock. Links of the same ranks are shared by all models,
and connected before the first step, because connecting waits for peers on the host.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from onefold.comm.endpoint import Endpoint, StreamPending
from onefold.comm.mesh import Axis, link_name
from onefold.comm.meter import Label
from onefold.comm.streams import FIRST, SideStream
from onefold.comm.watcher import end_process
from onefold.comm.watching import current_watcher, ensure_watcher

GATHER, REDUCE, SWAP, BOTH, SEQUENCE = "gather", "reduce", "swap", "replica", "sequence"
ABORTED_WITHIN_S = 1.0
PATIENCE = 10  # times a time limit: NCCL's own watchdog ends the process, ours names the culprit before

_links: dict[tuple[tuple[int, ...], str], Link] = {}
_world: Any = None  # torch's default group when they were made
_worlds = 0  # default groups so far, counted alike on all ranks


class Link:
    """One communicator and its stream. `name` is the same on all ranks."""

    def __init__(self, name: str, axis: Axis, group: Any, device: torch.device) -> None:
        self.name, self.ranks, self.group = name, axis.world_ranks, group
        self.stream = SideStream(device, FIRST)

    def pending(self, endpoint: Endpoint, label: Label, reads: Sequence[Tensor] = ()) -> StreamPending:
        """The message that was just issued on this link, which is watched from now on. It keeps the tensors that it
        reads until it is waited for."""
        event, watcher = self.stream.event(), current_watcher()
        if watcher is not None:
            watcher.issued(self.name, self.ranks, label, event.query, endpoint.timeout.total_seconds())
        return StreamPending(endpoint, label, event, reads)

    @contextmanager
    def explained(self, label: Label) -> Iterator[None]:
        """Inside, a message is issued. NCCL refuses it if a connection broke: raises a CommError that says whose."""
        try:
            yield
        except dist.DistBackendError as error:
            if (watcher := current_watcher()) is not None:
                watcher.explain_broken(self.ranks, label, error)
            raise


def link_of(axis: Axis, kind: str, device: torch.device, timeout_s: float) -> Link:
    """The link of this kind between the ranks of an axis. Collective when it is new."""
    global _world, _worlds
    if axis.plays is not None:
        return Link(kind, axis, axis.group, device)
    if _world is not dist.group.WORLD:
        _links.clear()
        _world, _worlds = dist.group.WORLD, _worlds + 1
        if (watcher := ensure_watcher()) is not None:
            watcher.on_abort(abort_links)
    key = axis.world_ranks, kind
    if key not in _links:
        _links[key] = Link(link_name(kind, axis), axis, _new_nccl_group(axis, kind, timeout_s), device)
    return _links[key]


def _new_nccl_group(axis: Axis, kind: str, timeout_s: float) -> dist.ProcessGroup:
    """A communicator of NCCL, connected. It is not registered with torch, so nobody else's messages mix with ours."""
    ranks = crc32(repr(axis.world_ranks).encode())
    store = dist.PrefixStore(f"onefold/{_worlds}/{kind}/{ranks}", dist.distributed_c10d._get_default_store())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=PATIENCE * timeout_s)
    nccl = dist.ProcessGroupNCCL(store, axis.rank, axis.size, options)
    group = dist.ProcessGroup(store, axis.rank, axis.size)
    group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    probe = torch.zeros(axis.size, device="cuda")
    group._allgather_base(probe, probe[axis.rank : axis.rank + 1].clone()).wait()
    if kind != GATHER:
        group.alltoall(list(torch.empty_like(probe).split(1)), list(probe.split(1))).wait()
    torch.cuda.synchronize()
    return group


def abort_links() -> None:
    """Ends the messages in flight, which then do not complete: for a process that has lost a peer."""
    for link in list(_links.values()):
        _nccl(link).abort()


def end_links() -> None:
    """Ends all links, once their messages have completed."""
    links, watcher = list(_links.values()), current_watcher()
    _links.clear()
    if links and watcher is not None:
        watcher.drain()
    for link in links:
        _nccl(link).shutdown()


def _nccl(link: Link) -> Any:
    return link.group._get_backend(torch.device("cuda"))


@atexit.register
def _end_at_exit() -> None:
    """NCCL waits for ever in its destructors for a communicator that nobody has ended."""
    watcher = current_watcher()
    if watcher is not None:
        watcher.end_if_failed()
    with suppress(Exception):
        if watcher is not None and watcher.finding is None:
            end_links()
        else:
            _abort_or_end_process()


def _abort_or_end_process() -> None:
    """Aborts all links. NCCL may wait for ever there, too: then the process ends here."""
    aborting = threading.Thread(target=abort_links, daemon=True)
    aborting.start()
    aborting.join(ABORTED_WITHIN_S)
    if aborting.is_alive():
        end_process()
