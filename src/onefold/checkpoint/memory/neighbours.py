"""Which rank keeps the copy of which, and whether all nodes have room for that. Integers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from onefold.errors import ConfigError
from onefold.offload.host_memory import size_text

AT_ONCE = 2  # copies in memory while one is made: the last complete one and the new one


class Node(NamedTuple):
    """Some memory, and the ranks that see it."""

    name: str
    ranks: tuple[int, ...]


def nodes_of(names: Sequence[str]) -> list[Node]:
    """The nodes of all ranks; `names` has the node of each rank."""
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        found.setdefault(name, []).append(rank)
    return [Node(name, tuple(ranks)) for name, ranks in found.items()]


def keepers(nodes: Sequence[Node]) -> dict[int, int]:
    """For each rank, the rank on the next node that keeps a copy of its state; empty where all are on one node.

    >>> keepers(nodes_of(["a", "a", "b"]))
    {0: 2, 1: 2, 2: 0}
    """
    if len(nodes) == 1:
        return {}
    following = [*nodes[1:], nodes[0]]
    return {
        rank: there.ranks[place % len(there.ranks)]
        for node, there in zip(nodes, following, strict=True)
        for place, rank in enumerate(node.ranks)
    }


def check_room(nodes: Sequence[Node], size_bytes: Sequence[int], room_bytes: Mapping[str, int], where: str) -> None:
    """Raises if a node has no room for the copies of its ranks and for those that it keeps for others.

    `size_bytes` has the state of each rank, `room_bytes` the room on each node, `where` says where that is.
    """
    kept = keepers(nodes)
    for node in nodes:
        own = sum(size_bytes[rank] for rank in node.ranks)
        others = sum(size_bytes[rank] for rank, keeper in kept.items() if keeper in node.ranks)
        needed = AT_ONCE * (own + others) + own  # and a snapshot beside training
        if needed > room_bytes[node.name]:
            raise ConfigError(
                f"the node of rank{'s' * (len(node.ranks) > 1)} {', '.join(map(str, node.ranks))} has no room for "
                f"copies of the state: they need {size_text(needed)} of memory, and {where} has "
                f"{size_text(room_bytes[node.name])}; enlarge it (mount -o remount,size=…, docker --shm-size=…), use "
                f"more nodes, or train without copies"
            )
