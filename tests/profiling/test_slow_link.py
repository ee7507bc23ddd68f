"""Over a slow link most of a step is exposed communication, where compute is the limit little of it; a profile says so.

Two ranks, each in a network namespace of its own, joined by a link of so many Mbit/s.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from tests.harness import fresh_ranks
from tests.harness.netns import WIRE, can_join_nodes, move_to, two_nodes
from tests.models import Repeating

RANKS, STEPS = 2, 3
MBIT_PER_S = 20
WIDTH, LAYERS = 256, 4  # a megabyte, of which half goes each way three times in a step: half a second
NARROW, REPEATED, ROWS = 64, 40, 4096  # much compute for 16 kilobytes


def exposed(model: nn.Module, batch: Callable[[], Tensor]) -> tuple[float, str]:
    """On a rank: the share of a step that waits for messages, and the summary."""
    model = onefold.shard(model, stage=3, units=nn.Linear)
    sgd = onefold.Optimizer(model, torch.optim.SGD, lr=1e-3)
    with onefold.profile(model, steps=STEPS, warmup=2) as found:
        while not found.done:
            with found.step():
                model(batch()).square().mean().backward()
                sgd.step()
                sgd.zero_grad()
    return found.report.exposed_s / found.report.step_s, found.summary()


def both(node_pids: list[int], path: str) -> list[tuple[float, str]]:
    rank = int(os.environ["RANK"])
    move_to(node_pids[rank])
    dist.init_process_group("gloo", store=dist.FileStore(path, RANKS), rank=rank, world_size=RANKS)
    large = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    found = [
        exposed(large, lambda: torch.randn(1, WIDTH)),
        exposed(Repeating(NARROW, REPEATED), lambda: torch.randn(ROWS, NARROW)),
    ]
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[tuple[float, str]]]:
    if not can_join_nodes():
        pytest.skip("needs two network namespaces joined by a slow link: run as root, with ip and tc (iproute2)")
    path = tmp_path_factory.mktemp("slow_link") / "store"
    with two_nodes(MBIT_PER_S) as nodes:
        pids = [node.pid for node in nodes]
        outcomes = fresh_ranks(RANKS, both, pids, str(path), init=False, env={"GLOO_SOCKET_IFNAME": WIRE})
    errors = [outcome.error for outcome in outcomes if outcome.exitcode]
    assert not errors, "\n".join(map(str, errors))
    return [outcome.value for outcome in outcomes]


def test_most_of_a_step_over_a_slow_link_is_exposed(ranks: list[list[tuple[float, str]]]) -> None:
    for (share, text), _ in ranks:
        assert share > 0.6, text


def test_little_is_exposed_where_compute_is_the_limit(ranks: list[list[tuple[float, str]]]) -> None:
    assert min(share for _, (share, _) in ranks) < 0.2, [text for _, (_, text) in ranks]  # the slower rank never waits
