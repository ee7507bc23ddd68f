"""Messages in flight after their model died, and shards that peers have not received when a process ends.

gloo stalls a connection whose message has lost its buffer. So the messages that are in flight when a model is freed are
kept here, as orphans. Posted shards can be dropped once every rank has received as many as were posted; all ranks find
that out together when the next model is sharded. A process that ends without an error first waits until its peers have
received its shards.
"""

from __future__ import annotations

import atexit
import json
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

from onefold.errors import CommError

PATIENCE_S = 10.0  # at the end of a process, for peers to receive shards of models that were freed


class PostedShards:
    """How many shards of one model this rank has posted to all peers, and how often it has received theirs."""

    def __init__(self) -> None:
        self.model = ""  # identifies the model; the same on all ranks
        self.sent = self.received = 0


class Orphan(NamedTuple):
    """A message in flight whose model has been freed."""

    posted: PostedShards | None  # if it is a posted shard, which peers receive at any time
    work: Any


class Serving(Protocol):
    """What has posted shards that peers may not have received yet."""

    def finish_posted(self) -> None: ...


_kept: list[Orphan] = []
_serving: weakref.WeakSet[Serving] = weakref.WeakSet()


def keep(posted: PostedShards | None, works: Sequence[Any]) -> None:
    _kept.extend(Orphan(posted, work) for work in works)


def count() -> int:
    return len(_kept)


def has_orphans() -> bool:
    """Whether this rank keeps orphaned shards, which all ranks together may find to have been received."""
    return any(orphan.posted for orphan in _kept)


def adopt_orphans(exchange: Callable[[bytes], list[bytes]], limit: timedelta) -> None:
    """Drops the orphaned shards of models of which every rank has received all that was posted; waits for each up to
    the limit. Collective."""
    mine = {orphan.posted.model: [orphan.posted.sent, orphan.posted.received] for orphan in _kept if orphan.posted}
    rows = [json.loads(row) for row in exchange(json.dumps(mine).encode())]
    done = {model for model, (sent, received) in mine.items() if sent == received}
    done = {model for model in done if all(row.get(model) == mine[model] for row in rows)}
    for orphan in list(_kept):
        if orphan.posted and orphan.posted.model in done:
            _kept.remove(orphan)  # also if it fails: it would fail again
            try:
                orphan.work.wait(limit)
            except Exception as error:
                raise CommError(
                    f"a shard of a model that was freed has not reached every rank within {limit.total_seconds():g} s; "
                    f"look at the error that ended that model first. The backend says: {str(error).splitlines()[0]}"
                ) from error


def finish_posted_at_exit(one: Serving) -> None:
    _serving.add(one)


def serve_peers() -> None:
    """Waits until peers, which may be behind, have received what this rank has posted."""
    for one in list(_serving):
        with suppress(Exception):  # a peer has ended too, or the process group is gone
            one.finish_posted()
    with suppress(Exception):
        while _kept:
            _kept[0].work.wait(timedelta(seconds=PATIENCE_S))
            del _kept[0]  # a second wait, as at the exit after shutdown(), would find no message and take all its time


@atexit.register
def _serve_peers_at_exit() -> None:
    if not hasattr(sys, "last_value"):  # after an error peers must see at once that this rank has ended
        serve_peers()
