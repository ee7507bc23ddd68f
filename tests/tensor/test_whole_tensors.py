"""Optimizers that need whole tensors, on tensors split over tp: the bits of one process, at every stage and mesh."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh

import onefold
from onefold.optim.whole_unit_optimizer import PURPOSES
from onefold.train.run.tensor_parallel import parallelize
from tests.harness import run_ranks, run_ranks_raises
from tests.models import GivenGradients, NoSplitDim
from tests.parity.training import same_bits
from tests.parity.whole import LAMB, Shampoo
from tests.tensor.runs import SHAPE, fresh, stream_of, tokens

SHAPES = {
    "rows": (12, 8), "columns": (6, 10), "uneven": (7, 6), "stack": (3, 4, 6), "same": (8, 8), "bias": (12,),
    "same_bias": (6,),
}  # fmt: skip
DIMS = {"rows": 0, "columns": 1, "uneven": 0, "stack": 2, "bias": 0}  # along which tensors are split
STREAMS = 2
TORCHS, OURS, LAMBS, SHAMPOOS = "torch.optim.Muon", "onefold.Muon", "LAMB", "Shampoo"


@dataclass(frozen=True)
class Leg:
    """Steps of a run on one mesh."""

    shard: int
    tp: int
    stage: int
    steps: range = range(3)
    optimizer: str = OURS
    precision: str = "fp32"
    tier: str | None = None  # of the optimizer state
    in_backward: bool = False
    bucket_bytes: int = 300

    @property
    def ranks(self) -> int:
        return self.shard * self.tp


@dataclass
class Trained:
    params: dict[str, Tensor]  # whole ones, on the first rank
    unplanned: list[str]  # traffic and memory that are not as planned
    moments: int  # elements of optimizer state of Muon on this rank


def build() -> GivenGradients:
    torch.manual_seed(0)
    return GivenGradients(SHAPES)


def optimizer_for(model: nn.Module, name: str, *, in_backward: bool = False) -> onefold.Optimizer:
    if name == OURS:
        split = {"rows": (4, 4, 4)}
        return onefold.Muon(model, lr=0.1, adamw={"lr": 0.1}, split=split, step_in_backward=in_backward)
    if name in (LAMBS, SHAMPOOS):
        return onefold.Optimizer(model, LAMB if name == LAMBS else Shampoo)
    matrices = [param for param in model.parameters() if param.ndim == 2]
    rest = {"params": [p for p in model.parameters() if p.ndim != 2], "cls": optim.AdamW, "lr": 0.1}
    return onefold.Optimizer(model, optim.Muon, groups=[{"params": matrices}, rest], lr=0.1)


def mesh_of(leg: Leg) -> DeviceMesh:
    return onefold.mesh(shard=leg.shard, tp=leg.tp)


def trained(leg: Leg, mesh: DeviceMesh, load: str = "", save: str = "") -> Trained:
    """Trains on a mesh: ranks of "shard" have a stream of gradients each, one alone has all of them."""
    model = build()
    if leg.tp > 1:
        model.split(mesh["tp"] if mesh.ndim > 1 else mesh, DIMS)
    fields = {"bucket_bytes": leg.bucket_bytes, "precision": leg.precision, "offload": leg.tier}
    onefold.shard(model, stage=leg.stage, mesh=mesh, **fields)
    optimizer = optimizer_for(model, leg.optimizer, in_backward=leg.in_backward)
    if load:
        onefold.load(load, model, optimizer)
    for step in leg.steps:
        streams = range(STREAMS) if leg.shard == 1 else [stream_of(mesh) % STREAMS]
        for stream in streams:
            (model(step, stream) / len(streams)).backward()
        if not leg.in_backward:
            optimizer.clip_grad_norm(1e9)
        optimizer.step()
        optimizer.zero_grad()
    sent, memory = onefold.traffic(model), onefold.memory(model).optimizer
    rows = [(key, sent.by_purpose.get(key), sent.planned.get(key)) for key in PURPOSES]
    wrong = [f"{leg}: {key}: sent {found}, planned {planned}" for key, found, planned in rows if found != planned]
    wrong += [] if memory.measured == memory.planned else [f"{leg}: {memory}"]
    if save:
        onefold.save(save, model, optimizer, step=leg.steps.stop)
    moments = sum(tensor.numel() for tensor in optimizer.state_tensors() if tensor.ndim > 1)
    return Trained(onefold.full_state_dict(model), wrong, moments)


def train(legs: list[Leg]) -> list[Trained]:
    torch.set_num_threads(1)
    onefold.init()
    meshes: dict[tuple[int, int], DeviceMesh] = {}
    return [trained(leg, meshes.setdefault((leg.shard, leg.tp), mesh_of(leg))) for leg in legs]


def plain(optimizers: Any) -> dict[str, Tensor]:
    """In one process, with torch alone."""
    model = build()
    both = optimizers(model)
    for step in range(3):
        for stream in range(STREAMS):
            (model(step, stream) / STREAMS).backward()
        for one in both:
            one.step()
            one.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def torchs_own(model: nn.Module) -> list[optim.Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim == 2]
    return [
        optim.Muon(matrices, lr=0.1),
        optim.AdamW([param for param in model.parameters() if param.ndim != 2], lr=0.1),
    ]


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name, value in theirs.items() if not same_bits(ours[name], value)]


def test_split_tensors_get_the_bits_of_one_process_at_every_stage() -> None:
    """Split by rows, by columns and unevenly, stacks, vectors, and tensors that are not split."""
    wanted = {TORCHS: plain(torchs_own), LAMBS: plain(lambda model: [LAMB(model.parameters())])}
    alone = run_ranks(1, train, [Leg(1, 1, 0), Leg(1, 1, 0, precision="bf16")])[0]
    legs = [Leg(2, 2, stage, optimizer=name) for name in (TORCHS, OURS) for stage in range(4)]
    legs += [Leg(1, 4, 0), Leg(1, 4, 2, optimizer=TORCHS), Leg(2, 2, 1, optimizer=LAMBS), Leg(2, 2, 3, optimizer=LAMBS)]
    legs += [Leg(2, 2, stage, precision="bf16") for stage in (0, 2, 3)]
    legs += [Leg(2, 2, 3, tier="host", bucket_bytes=4096), Leg(2, 2, 1, in_backward=True, bucket_bytes=4096)]
    legs += [Leg(2, 2, 2, tier="host", in_backward=True, bucket_bytes=4096)]
    by_rank = run_ranks(4, train, legs)
    for number, leg in enumerate(legs):
        reference = wanted.get(leg.optimizer, alone[leg.precision == "bf16"].params)
        assert differing(by_rank[0][number].params, reference) == [], leg
        assert [rank[number].unplanned for rank in by_rank] == [[]] * 4
        if leg.optimizer == OURS:  # the momentum of a split tensor is kept once, of others once along tp
            split = sum(torch.Size(SHAPES[name]).numel() for name in ("rows", "columns", "uneven", "stack"))
            copies = 1 if leg.stage else leg.shard
            assert sum(rank[number].moments for rank in by_rank) == copies * (split + leg.tp * 64)


def go_on(legs: list[Leg], load: str, folder: str) -> list[Trained]:
    """One leg after the other, each from the checkpoint of the one before."""
    torch.set_num_threads(1)
    onefold.init()
    found = []
    for leg in legs:
        save = f"{folder}/{leg.shard}x{leg.tp}-{leg.stage}-{leg.steps.start}"
        found.append(trained(leg, mesh_of(leg), load, save))
        load = save
    return found


@pytest.mark.parametrize("optimizer", [OURS, SHAMPOOS])
def test_a_run_that_changes_its_mesh_at_every_step_gets_the_bits_of_one_process(optimizer: str, tmp_path: Path) -> None:
    """Shampoo has matrices of other shapes than its tensors."""
    meshes = [(1, 1, 0), (2, 2, 3), (1, 4, 0), (2, 2, 0), (4, 1, 1), (2, 2, 2), (1, 2, 1), (2, 1, 3), (1, 1, 2)]
    legs = [Leg(*mesh, range(step, step + 1), optimizer) for step, mesh in enumerate(meshes)]
    load, params = "", dict[str, Tensor]()
    for ranks, some in ((1, legs[:1]), (4, legs[1:6]), (2, legs[6:8]), (1, legs[8:])):
        params = run_ranks(ranks, go_on, some, load, str(tmp_path))[0][-1].params
        last = some[-1]
        load = f"{tmp_path}/{last.shard}x{last.tp}-{last.stage}-{last.steps.start}"
    straight = run_ranks(1, train, [Leg(1, 1, 0, range(len(meshes)), optimizer)])[0][0]
    assert differing(params, straight.params) == []


# -- a model whose products are split, too -----------------------------------------------------------------------------


def language(stages: list[int], shard: int, tp: int) -> list[dict[str, Tensor]]:
    """The built-in GPT, trained by onefold.Muon; Newton-Schulz in fp32, because bf16 would show the rounding of
    products that are split."""
    torch.set_num_threads(1)
    onefold.init()
    mesh, found = onefold.mesh(shard=shard, tp=tp), []
    for stage in stages:
        model = onefold.shard(parallelize(fresh(), mesh), stage=stage, mesh=mesh, bucket_bytes=8 << 10)
        optimizer = onefold.Muon(
            model, lr=0.02, adamw={"lr": 1e-3, "eps": 1e-3}, ns_dtype="fp32", split={"*.qkv.weight": SHAPE.heads}
        )
        for step in range(2):
            streams = range(STREAMS) if shard == 1 else [stream_of(mesh)]
            for stream in streams:
                (model(*tokens(step, 0, stream)) / len(streams)).backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        found.append(onefold.full_state_dict(model))
    return found


def test_a_language_model_trains_as_one_process_does() -> None:
    first, second = run_ranks(4, language, [0, 3], 2, 2)[0]
    assert differing(first, second) == []
    wanted = run_ranks(1, language, [0], 1, 1)[0][0]
    for name, value in wanted.items():
        torch.testing.assert_close(
            first[name], value, rtol=1e-3, atol=2e-5, msg=lambda said, name=name: f"{name}: {said}"
        )


# -- refused -----------------------------------------------------------------------------------------------------------


def split_along_an_unknown_dim() -> None:
    onefold.init()
    onefold.Optimizer(onefold.shard(NoSplitDim(), mesh=onefold.mesh(shard=1, tp=2)), LAMB)


def units_that_differ() -> None:
    """Three rows on one rank and two on the other: with the vector behind them they are a unit, or two."""
    mesh = onefold.mesh(shard=1, tp=2)
    model = GivenGradients({"a": (5, 32), "b": (64,)}).split(mesh, {"a": 0})
    onefold.Optimizer(onefold.shard(model, mesh=mesh, bucket_bytes=512), LAMB, step_in_backward=True)


def test_updates_in_backward_want_equal_units_along_tp() -> None:
    for error in run_ranks_raises(2, units_that_differ):
        assert error.type_name == "OptimizerError" and "a is in unit" in error.message
        assert "bucket_bytes" in error.message


def test_a_part_of_an_unknown_whole_is_not_updated() -> None:
    for error in run_ranks_raises(2, split_along_an_unknown_dim):
        assert "partition_dim" in error.message and "weight" in error.message
