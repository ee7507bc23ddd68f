"""The watcher of this process: one at most, for as long as torch's default process group lives."""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist

from onefold.comm.diagnosis import SHUTDOWN
from onefold.comm.hang_record import RECORDS
from onefold.comm.watcher import Watcher

_current: Watcher | None = None
_watched: dist.ProcessGroup | None = None  # the default group of which it is


def current_watcher() -> Watcher | None:
    """The watcher of this process, if there is one."""
    return _current


def check_watcher() -> None:
    """Raises the CommError that the watcher of this process has found, if it has."""
    if _current is not None and _current.finding is not None:
        _current.check()


def ensure_watcher() -> Watcher | None:
    """The watcher of this process, made where NCCL moves messages between several ranks, or where ranks record hangs;
    None elsewhere.

    On gloo a message whose peer is gone raises by itself. But the peer that is late hears of that from a watcher only,
    and its record says where it is.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    nccl = "nccl" in dist.get_backend_config()
    if not nccl and not os.environ.get(RECORDS):
        return None
    if _watched is not dist.group.WORLD:
        end_watcher(SHUTDOWN)  # of a group that the user has destroyed
    return _current or start_watcher(torch.device("cuda", torch.cuda.current_device()) if nccl else None)


def start_watcher(device: torch.device | None = None) -> Watcher:
    """Makes the watcher of this process, over the store of torch's default process group."""
    global _current, _watched
    assert _current is None
    root = store = dist.distributed_c10d._get_default_store()
    while isinstance(root, dist.PrefixStore):
        root = root.underlying_store
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    server = 0 if isinstance(root, dist.TCPStore) and not by_agent else None
    _current = Watcher(store, dist.get_rank(), dist.get_world_size(), server=server, device=device)
    _watched = dist.group.WORLD
    return _current


def end_watcher(how: str) -> None:
    """Ends the watcher of this process, if there is one; `how` is what peers are told."""
    global _current, _watched
    watcher, _current, _watched = _current, None, None
    if watcher is not None:
        watcher.end(how)


@atexit.register
def _at_exit() -> None:
    if _current is not None:
        _current.end_at_exit()
