"""Meshes: the axes and their order, sizes that do not fit, and which ranks of a model talk to which."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import onefold
from onefold.comm.mesh import axes_of
from tests.harness import run_ranks, run_ranks_raises


def lay_out(sizes: dict[str, int]) -> tuple[tuple[str, ...], Any, dict[str, tuple[int, ...]]]:
    mesh = onefold.mesh(**sizes)
    axes = axes_of(mesh)
    ranks = {name: axis.world_ranks for name, axis in axes._asdict().items()}
    return mesh.mesh_dim_names or (), mesh.mesh.tolist(), ranks


def test_tp_is_innermost_and_axes_of_one_rank_are_left_out() -> None:
    assert run_ranks(4, lay_out, {"shard": 2, "tp": 2})[0][:2] == (("shard", "tp"), [[0, 1], [2, 3]])
    assert run_ranks(4, lay_out, {"replica": 2, "tp": -1})[0][:2] == (("replica", "tp"), [[0, 1], [2, 3]])
    assert run_ranks(4, lay_out, {"pp": 2})[0][:2] == (("pp", "shard"), [[0, 1], [2, 3]])
    assert run_ranks(4, lay_out, {"tp": 4, "shard": 1})[0][:2] == (("tp",), [0, 1, 2, 3])
    assert run_ranks(2, lay_out, {})[0][:2] == (("shard",), [0, 1])
    assert run_ranks(1, lay_out, {"shard": 1})[0][:2] == (("shard",), [0])


@pytest.mark.parametrize(
    ("sizes", "rank", "wanted"),
    [
        (
            {"shard": 2, "tp": 2}, 3,
            {
                "shard": (1, 3), "replica": (3,), "everyone": (1, 3), "tp": (2, 3), "pp": (3,),
                "owners": (0, 1, 2, 3), "holders": (0, 1, 2, 3),
            },
        ),
        (
            {"replica": 2, "shard": 1, "tp": 2}, 1,
            {
                "shard": (1,), "replica": (1, 3), "everyone": (1, 3), "tp": (0, 1), "pp": (1,),
                "owners": (0, 1), "holders": (0, 1),
            },
        ),
        (
            {"pp": 2, "shard": 2}, 2,
            {
                "shard": (2, 3), "replica": (2,), "everyone": (2, 3), "tp": (2,), "pp": (0, 2),
                "owners": (2, 3), "holders": (0, 1, 2, 3),
            },
        ),
        (
            {"replica": 2, "shard": 2}, 2,
            {
                "shard": (2, 3), "replica": (0, 2), "everyone": (0, 1, 2, 3), "tp": (2,), "pp": (2,),
                "owners": (2, 3), "holders": (2, 3),
            },
        ),
        (
            {"replica": 2, "sequence": 2}, 2,
            {
                "shard": (2, 3), "replica": (0, 2), "everyone": (0, 1, 2, 3), "sequence": (2, 3), "tp": (2,),
                "pp": (2,), "owners": (2, 3), "holders": (2, 3),
            },
        ),
        (
            {"shard": 2, "sequence": 2}, 2,
            {
                "shard": (0, 1, 2, 3), "replica": (2,), "everyone": (0, 1, 2, 3), "sequence": (2, 3), "tp": (2,),
                "pp": (2,), "owners": (0, 1, 2, 3), "holders": (0, 1, 2, 3),
            },
        ),
    ],
)  # fmt: skip
def test_state_is_shared_among_equal_tp_and_pp_coordinates_only(
    sizes: dict[str, int], rank: int, wanted: dict[str, tuple[int, ...]]
) -> None:
    found = run_ranks(4, lay_out, sizes)[rank][2]
    assert found == {"sequence": (rank,), **wanted, "world": (0, 1, 2, 3)}


def of_eight(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    return lay_out(sizes)[2]


@pytest.mark.soak
def test_three_axes_of_two() -> None:
    found = run_ranks(8, of_eight, {"replica": 2, "shard": 2, "tp": 2})[5]
    assert found["everyone"] == (1, 3, 5, 7) and found["holders"] == (4, 5, 6, 7) and found["tp"] == (4, 5)


def pipeline_of_two(stage: int) -> tuple[list[str], float, float]:
    """Two halves of a model, each sharded by two ranks; their gradients have one norm."""
    mesh = onefold.mesh(pp=2, shard=2)
    half = mesh.get_local_rank("pp")
    torch.manual_seed(half)
    layers = [nn.Linear(8, 8) for _ in range(1 + half)]
    model = onefold.shard(nn.Sequential(*layers), stage=stage, mesh=mesh, bucket_bytes=1)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    alone = torch.stack([p.grad.norm() for p in _whole(layers)]).norm()
    return [row.unit for row in onefold.placement(model).rows], float(alone), float(optimizer.clip_grad_norm(1e9))


def _whole(layers: list[nn.Linear]) -> list[nn.Parameter]:
    torch.manual_seed(torch.initial_seed())
    copies = nn.Sequential(*(nn.Linear(8, 8) for _ in layers))
    copies(torch.ones(2, 8)).sum().backward()
    return list(copies.parameters())


@pytest.mark.parametrize("stage", [2, 3])
def test_norms_span_pipeline_stages_that_hold_different_units(stage: int) -> None:
    found = run_ranks(4, pipeline_of_two, stage)
    assert [len(units) for units, _, _ in found] == [2, 2, 4, 4]
    whole = (found[0][1] ** 2 + found[2][1] ** 2) ** 0.5
    assert [norm for _, _, norm in found] == pytest.approx([whole] * 4, rel=1e-5)


def overflow_in_one_stage() -> tuple[int, str]:
    mesh = onefold.mesh(pp=2, shard=2)
    half = mesh.get_local_rank("pp")
    model = onefold.shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(1 + half))), stage=2, mesh=mesh)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    model(torch.full((2, 8), float("inf") if half else 1.0)).sum().backward()
    optimizer.clip_grad_norm(1.0)
    try:
        optimizer.step()
    except onefold.PrecisionError as error:
        return optimizer.skipped, str(error)
    return 0, ""


def test_no_pipeline_stage_steps_when_another_overflows() -> None:
    found = run_ranks(4, overflow_in_one_stage)
    assert [skipped for skipped, _ in found] == [1] * 4
    assert "another pipeline stage" in found[0][1] and "unit" in found[3][1]


def ask(sizes: dict[str, Any]) -> None:
    onefold.mesh(**sizes)


@pytest.mark.parametrize(
    ("sizes", "found", "remedy"),
    [
        ({"shard": 3}, "shard=3", "multiply to 2"),
        ({"shard": 2, "tp": 2}, "needs 4 ranks, and there are 2", "one of 1, 2"),
        ({"shard": -1, "tp": 4}, "a multiple of 4", "one of 1, 2"),
        ({"shard": -1, "tp": -1}, "tp=-1", "one of them may be -1"),
        ({"shard": 0}, "shard=0", "at least 1"),
        ({"tp": "2"}, "tp='2'", "whole numbers"),
    ],
)
def test_sizes_that_do_not_fit_are_named_with_what_would(sizes: dict[str, Any], found: str, remedy: str) -> None:
    for error in run_ranks_raises(2, ask, sizes):
        assert error.type_name == "ConfigError" and found in error.message and remedy in error.message, error


def odd_axes() -> None:
    onefold.shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "cp")))


def test_an_unknown_axis_is_named() -> None:
    for error in run_ranks_raises(2, odd_axes):
        assert error.type_name == "ConfigError" and "cp" in error.message and "onefold.mesh" in error.message


def in_another_order() -> tuple[tuple[int, ...], ...]:
    axes = axes_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "shard")))
    return axes.tp.world_ranks, axes.shard.world_ranks


def test_a_mesh_of_the_users_own_may_have_another_order() -> None:
    assert run_ranks(4, in_another_order)[1] == ((1, 3), (0, 1))
