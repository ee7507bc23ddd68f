"""Messages that outlive their model, and peers that outrun each other.

gloo stalls a connection whose message has lost its buffer. So what is still on the way when a model is let go of stays
here. Shards that were offered may go once every rank has taken as many as were offered; all ranks find that out
together when the next model is made. And a rank that ends well first lets its peers have what they may still want.
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

PATIENCE_S = 10.0  # at the end of a process, for peers that want shards of models it has let go of


class PostedShards:
    """How often this rank has offered a shard of one model to all, and has taken what others offered."""

    def __init__(self) -> None:
        self.model = ""  # the same on all ranks, and no other model's
        self.made = self.taken = 0


class Orphan(NamedTuple):
    """A message on the way."""

    posted: PostedShards | None  # where it is a shard that peers take when they like
    work: Any


class Serving(Protocol):
    """What has offers that peers may not have taken yet."""

    def finish_posted(self) -> None: ...


_kept: list[Orphan] = []
_serving: weakref.WeakSet[Serving] = weakref.WeakSet()


def keep(posted: PostedShards | None, works: Sequence[Any]) -> None:
    _kept.extend(Orphan(posted, work) for work in works)


def count() -> int:
    return len(_kept)


def adopt_orphans(exchange: Callable[[bytes], list[bytes]]) -> None:
    """Forget shards of models that are gone, where every rank has taken all that was offered. Collective."""
    mine = {left.posted.model: [left.posted.made, left.posted.taken] for left in _kept if left.posted}
    rows = [json.loads(row) for row in exchange(json.dumps(mine).encode())]
    done = {model for model, (made, taken) in mine.items() if made == taken}
    done = {model for model in done if all(row.get(model) == mine[model] for row in rows)}
    for left in list(_kept):
        if left.posted and left.posted.model in done:
            left.work.wait()
            _kept.remove(left)


def serve_at_the_end(one: Serving) -> None:
    _serving.add(one)


@atexit.register
def _serve_peers() -> None:
    """A rank that ends well, before others have run as far, lets them have its shards first."""
    if hasattr(sys, "last_value"):  # it ends by an error: the others must hear of that at once
        return
    for one in _serving:
        with suppress(Exception):  # a peer has ended too, or the process group is gone
            one.finish_posted()
    with suppress(Exception):
        for left in _kept:
            left.work.wait(timedelta(seconds=PATIENCE_S))
