"""Between two nodes hybrid sharding sends the all-reduce of one gradient shard and nothing else, and so is faster.

A node is a network namespace with two ranks. They reach each other over its own `lo`, and the other node over a slow
veth pair, whose counters say what crossed. A second model, sharded over all four ranks, takes turns with the hybrid
one, step by step. The ranks meet before and after each step through a file, so only steps use the network.

The counters include each packet's headers, and count packets; all headers are of one size, so the payload is known to
the byte. It is tensors and gloo's frames: three for each message, one before it and two that arrange it. TCP may send a
packet twice, which is not our doing: the most that may cross is asked of steps in which, as it says, it did not.
"""

from __future__ import annotations

import os
import time
from statistics import mean
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from tests.harness import fresh_ranks
from tests.harness.netns import WIRE, can_join_nodes, move_to, sent, sent_again, two_nodes

NODES, PER_NODE = 2, 2  # replicas are on different nodes, shards on the same
RANKS = NODES * PER_NODE
MBIT_PER_S = 50
WIDTH, LAYERS = 256, 4
WARM_UP, STEPS = 2, 5
PARAMETER_BYTES = LAYERS * WIDTH * WIDTH * 4
HEADER_BYTES = 14 + 20 + 32  # Ethernet, IPv4, TCP with timestamps
FRAME_BYTES = 48  # of gloo's


class Step(NamedTuple):
    """What one rank saw of one step."""

    seconds: float
    crossed: int  # payload bytes, from this node to the other
    at_home: int  # bytes on this node's lo
    metered: dict[str, int]  # sent by this rank, by purpose
    again: int  # packets that TCP sent a second time, from this node


def train_in_turns(node_pids: list[int], path: str) -> dict[str, list[Step]]:
    """On every rank, outside every group: move to its node, then train both models."""
    rank = int(os.environ["RANK"])
    move_to(node_pids[rank // PER_NODE])
    store = dist.FileStore(path, RANKS)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (NODES, PER_NODE), mesh_dim_names=("replica", "shard"))
    batch = torch.randn(1, WIDTH)
    models, optimizers = {}, {}
    for name, axes in {"hybrid": mesh, "full": None}.items():
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        models[name] = onefold.shard(layers, stage=3, mesh=axes, units=nn.Linear)
        optimizers[name] = onefold.Optimizer(models[name], torch.optim.SGD, lr=1e-3)

    def meet(where: str) -> None:
        if store.add(where, 1) == RANKS:
            store.set(f"all {where}", "")
        store.wait([f"all {where}"])

    def step(name: str, number: int) -> Step:
        meet(f"before {name} {number}")
        wire, home, again = sent(WIRE), sent("lo"), sent_again()
        meet(f"at {name} {number}")  # nobody sends before all have read
        started_s = time.perf_counter()
        models[name](batch).square().mean().backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
        seconds = time.perf_counter() - started_s
        meet(f"after {name} {number}")
        now, at_home = sent(WIRE), sent("lo").bytes - home.bytes
        crossed = now.bytes - wire.bytes - HEADER_BYTES * (now.packets - wire.packets)
        return Step(seconds, crossed, at_home, onefold.traffic(models[name]).by_purpose, sent_again() - again)

    turns = [{name: step(name, number) for name in models} for number in range(WARM_UP + STEPS)]
    dist.destroy_process_group()
    return {name: [turn[name] for turn in turns[WARM_UP:]] for name in models}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Step]]]:
    """By rank and model: its steps."""
    if not can_join_nodes():
        pytest.skip("needs two network namespaces joined by a slow link: run as root, with ip and tc (iproute2)")
    path = tmp_path_factory.mktemp("two_nodes") / "store"
    with two_nodes(MBIT_PER_S) as nodes:
        pids = [node.pid for node in nodes]
        env = {"GLOO_SOCKET_IFNAME": WIRE}
        outcomes = fresh_ranks(RANKS, train_in_turns, pids, str(path), init=False, env=env)
    errors = [outcome.error for outcome in outcomes if outcome.exitcode]
    assert not errors, "\n".join(map(str, errors))
    return [outcome.value for outcome in outcomes]


def test_only_the_sum_of_one_gradient_shard_crosses_between_nodes(ranks: list[dict[str, list[Step]]]) -> None:
    shard_bytes = PARAMETER_BYTES // PER_NODE
    sum_bytes = 2 * (NODES - 1) * shard_bytes // NODES  # sent by each rank: an all-reduce over the nodes
    flag_bytes, others = 2 * LAYERS, RANKS - PER_NODE  # a flag for each parameter and unit, to each rank over there
    wanted = PER_NODE * (sum_bytes + flag_bytes * others)
    frames = 3 * PER_NODE * (2 * LAYERS + others)  # of each unit a part goes and a sum comes back
    for rank, found in enumerate(ranks):
        assert any(not step.again for step in found["hybrid"]), "TCP repeated itself in every step"
        for _, crossed, at_home, metered, again in found["hybrid"]:
            assert metered["reduce-replica"] == sum_bytes
            assert wanted <= crossed, f"from the node of rank {rank}"
            assert again or crossed <= wanted + frames * FRAME_BYTES, f"from the node of rank {rank}"
            stays = sum(metered[purpose] for purpose in ("gather-forward", "gather-backward", "reduce"))
            assert at_home >= PER_NODE * stays


def test_full_sharding_sends_several_times_as_much_between_nodes(ranks: list[dict[str, list[Step]]]) -> None:
    for found in ranks:
        for hybrid, full in zip(found["hybrid"], found["full"], strict=True):
            assert full.crossed > 2.5 * hybrid.crossed  # two gathers and a reduce, less the layer kept for backward


def test_steps_over_a_slow_link_are_faster_than_with_full_sharding(ranks: list[dict[str, list[Step]]]) -> None:
    def step_s(name: str) -> float:
        return mean(max(step.seconds for step in steps) for steps in zip(*(found[name] for found in ranks)))

    assert step_s("hybrid") < step_s("full")
