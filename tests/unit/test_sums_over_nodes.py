"""How 16-bit gradients are summed over NCCL, from how ranks lie on nodes; and that the sum by node is the sum."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import onefold
from onefold.comm.mesh import Axis, simulated_axes
from onefold.comm.nodes import node_axes, ranks_per_node
from onefold.comm.strategy import Sums, sums_of
from onefold.sharding import shard_over


def axis_of(ranks: tuple[int, ...], rank: int) -> Axis:
    return Axis(None, ranks.index(rank), len(ranks), ranks)  # type: ignore[arg-type]


@given(nodes=st.integers(1, 6), per_node=st.integers(1, 8), data=st.data())
def test_every_rank_is_once_in_its_node_and_once_across_nodes(nodes: int, per_node: int, data: st.DataObject) -> None:
    ranks = tuple(range(nodes * per_node))
    rank = data.draw(st.sampled_from(ranks))
    near, far = node_axes(axis_of(ranks, rank), per_node)
    assert near.world_ranks[near.rank] == far.world_ranks[far.rank] == rank
    assert set(near.world_ranks) & set(far.world_ranks) == {rank}
    assert near.size * far.size == len(ranks)
    assert {other // per_node for other in near.world_ranks} == {rank // per_node}


@pytest.mark.parametrize(
    ("ranks", "local", "found"),
    [((0, 1, 2, 3), "2", 2), ((0, 2, 4, 6), "2", 1), ((0, 1, 2), "2", 1), ((0, 4, 1, 5), "4", 1), ((4, 5), "4", 2)],
)
def test_ranks_per_node_counts_only_equal_runs(
    ranks: tuple[int, ...], local: str, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    assert ranks_per_node(axis_of(ranks, ranks[0])) == found


def test_few_ranks_exchange_and_nodes_sum_first() -> None:
    assert {sums_of(n, n) for n in (2, 8)} == {sums_of(2, 1)} == {Sums.IN_RANK_ORDER}
    assert sums_of(16, 8) is sums_of(4096, 8) is Sums.BY_NODE
    assert sums_of(4, 2) is Sums.IN_RANK_ORDER  # two on a node would send as much between nodes
    assert sums_of(4096, 1) is Sums.BY_NCCL


@pytest.mark.parametrize(("ranks", "sums"), [(8, Sums.IN_RANK_ORDER), (64, Sums.BY_NODE)])
def test_placement_says_how_gradients_are_summed(ranks: int, sums: Sums, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    onefold.init()
    model = torch.nn.Linear(64, 64)
    shard_over(simulated_axes(ranks, plays="nccl"), model, onefold.Zero(stage=2, precision="bf16"), {})
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    adam.step()
    assert onefold.placement(model).sums == sums.value
    assert str(onefold.placement(model)).startswith(f"gradients: {sums.value}\n")
