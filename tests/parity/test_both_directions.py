"""Over gloo, shards move in both directions at once, also if a rank begins to receive after its own shard has left.

Two ranks, each in a network namespace of its own, joined by a slow link, whose counters say what a rank has sent.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import onefold
from onefold.comm.communicator import Comm
from onefold.comm.mesh import Axis, axes_of
from onefold.comm.meter import Label, Meter
from tests.harness import fresh_ranks
from tests.harness.netns import WIRE, can_join_nodes, move_to, sent, two_nodes

MBIT_PER_S = 50
BYTES = 1 << 22  # of a shard: 0.7 s
LABEL = Label("gather-forward", "a unit")


def gather(node_pids: list[int], path: str) -> float:
    """The share of its shard that this rank has sent when it has received the other one's."""
    rank = int(os.environ["RANK"])
    move_to(node_pids[rank])
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2)
    comm = Comm(axes_of(onefold.mesh()).shard, torch.device("cpu"), 60.0, Meter())
    comm.connect()
    flat = torch.zeros(2, BYTES, dtype=torch.uint8)
    before = sent(WIRE).bytes
    if rank == 1:
        store.wait(["rank 0 receives"])
    posted = comm.post_shard(flat[rank], LABEL)
    while rank == 1 and sent(WIRE).bytes - before < BYTES // 32:
        pass  # the shard is leaving
    received = comm.receive_shards(flat.view(-1), LABEL)
    if rank == 0:
        store.set("rank 0 receives", "")
    received.wait()
    share = (sent(WIRE).bytes - before) / BYTES
    posted.wait()
    dist.barrier()
    dist.destroy_process_group()
    return share


def test_a_rank_that_receives_late_is_heard_before_its_own_shard_has_arrived(tmp_path: Path) -> None:
    if not can_join_nodes():
        pytest.skip("needs two network namespaces joined by a slow link: run as root, with ip and tc (iproute2)")
    with two_nodes(MBIT_PER_S) as nodes:
        pids = [node.pid for node in nodes]
        env = {"GLOO_SOCKET_IFNAME": WIRE}
        outcomes = fresh_ranks(2, gather, pids, str(tmp_path / "store"), init=False, env=env)
    errors = [outcome.error for outcome in outcomes if outcome.exitcode]
    assert not errors, "\n".join(map(str, errors))
    assert outcomes[0].value > 0.3, outcomes


def connected_twice(folder: str) -> tuple[list[int], int]:
    """Two of three ranks connect, all leave; then all connect. What each got from the others, and open sockets at the
    end."""
    rank, found = int(os.environ["RANK"]), list[int]()
    for world, ranks in (("first", [0, 1]), ("second", [0, 1, 2])):
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{world}", 3), rank=rank, world_size=3)
        group = dist.new_group(ranks)
        if rank in ranks:
            axis = Axis(group=group, rank=ranks.index(rank), size=len(ranks), world_ranks=tuple(ranks))
            comm = Comm(axis, torch.device("cpu"), 20.0, Meter())
            comm.connect()
            comm.connect()  # the groups are there
            flat = torch.zeros(len(ranks), 8)
            flat[axis.rank] = 1 + axis.rank
            comm.all_gather(flat.view(-1), LABEL).wait()
            found.append(int(flat.sum()))
            del comm, axis
        dist.barrier()
        del group
        onefold.shutdown()
    gc.collect()
    return found, sockets()


def test_ranks_that_connected_unequally_often_connect_again_and_leave_nothing_open(tmp_path: Path) -> None:
    before, *outcomes = fresh_ranks(1, sockets, init=False) + fresh_ranks(3, connected_twice, str(tmp_path), init=False)
    errors = [outcome.error for outcome in outcomes if outcome.exitcode]
    assert not errors, "\n".join(map(str, errors))
    assert [outcome.value for outcome in outcomes] == [([24, 48], before.value)] * 2 + [([48], before.value)]


def sockets() -> int:
    files = [f"/proc/self/fd/{file}" for file in os.listdir("/proc/self/fd")]
    return sum("socket" in os.readlink(file) for file in files if os.path.lexists(file))
