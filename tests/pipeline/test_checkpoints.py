"""Checkpoints of a pipeline: one file set for the whole model, read by any number of stages, also by none."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import onefold
from onefold.cost.shapes import Shape
from onefold.train.run.cut import Part, loss_of
from onefold.train.run.model import GPT, Block, initialise
from tests.harness import run_ranks, run_ranks_raises

SHAPE = Shape(layers=4, hidden=32, heads=2, seq=16, vocab=48)
LR = 1e-2


def fill(module: nn.Module) -> None:
    initialise(module, SHAPE.layers)


def unit(name: str, module: nn.Module) -> bool:
    return name == "wte" or isinstance(module, Block)


def batch(step: int) -> Tensor:
    return torch.randint(SHAPE.vocab, (8, SHAPE.seq + 1), generator=torch.Generator().manual_seed(step))


class Training:
    """The GPT over `stages` of a pipeline; one stage is no pipeline."""

    def __init__(self, stages: int, zero: int) -> None:
        self.shards = dist.get_world_size() // stages
        self.mesh = onefold.mesh(pp=stages, shard=self.shards)
        names = self.mesh.mesh_dim_names
        self.shard = self.mesh.get_local_rank("shard") if "shard" in names else 0
        at = self.mesh.get_local_rank("pp") if "pp" in names else 0
        with torch.device("meta"):
            self.model = Part(SHAPE, at, stages) if stages > 1 else GPT(SHAPE)
        onefold.shard(self.model, stage=zero, mesh=self.mesh, init=fill, units=unit, device="cpu")
        groups = [
            {"params": [p for p in self.model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in self.model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.stage = None
        if stages > 1:
            self.stage = onefold.PipelineStage(self.model, self.mesh, reduce="each", tied=["wte.weight"])
            self.run = Schedule1F1B(self.stage, 4 // self.shards, loss_fn=loss_of, scale_grads=False)
        self.optimizer = onefold.Optimizer(self.model, torch.optim.AdamW, groups=groups, lr=LR)

    def step(self, number: int) -> None:
        tokens = batch(number).tensor_split(self.shards)[self.shard]
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        if self.stage is None:
            self.model(x, y).backward()
        else:
            self.run.step(*[x] * self.stage.is_first, target=y if self.stage.is_last else None, losses=[])
        self.optimizer.step()
        self.optimizer.zero_grad()


def saved(stages: int, zero: int, folder: str) -> dict[str, Tensor]:
    training = Training(stages, zero)
    for number in range(2):
        training.step(number)
    training.optimizer.param_groups[1]["lr"] = 2 * LR
    onefold.save(folder, training.model, training.optimizer, extra={"steps": 2})
    return dict(onefold.full_state_dict(training.model))


def loaded(stages: int, zero: int, folder: str) -> tuple[dict[str, Tensor], dict[str, int], list[float]]:
    training = Training(stages, zero)
    extra = onefold.load(folder, training.model, training.optimizer)
    rates = [group["lr"] for group in training.optimizer.param_groups]
    return dict(onefold.full_state_dict(training.model)), extra, rates


@pytest.mark.parametrize(("before", "after"), [((2, 4, 3), (1, 2, 1)), ((1, 2, 2), (2, 4, 2)), ((2, 2, 3), (4, 4, 0))])
def test_a_checkpoint_goes_from_any_number_of_stages_to_any_other(before, after, tmp_path):
    wanted: dict[str, Tensor] = {}
    for rank in run_ranks(before[1], saved, before[0], before[2], str(tmp_path)):
        wanted |= rank
    found: dict[str, Tensor] = {}
    for rank, extra, rates in run_ranks(after[1], loaded, after[0], after[2], str(tmp_path)):
        found |= rank
        assert extra == {"steps": 2} and rates == [LR, 2 * LR]
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_what_stages_saved_is_exported_as_the_whole_model(tmp_path):
    wanted: dict[str, Tensor] = {}
    for rank in run_ranks(2, saved, 2, 3, str(tmp_path / "run")):
        wanted |= rank
    onefold.export(tmp_path / "run", tmp_path / "weights")
    found = safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")
    assert found.keys() == wanted.keys() == dict(GPT(SHAPE).named_parameters()).keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def resumed(stages: int, zero: int, folder: str, at: int) -> dict[str, Tensor]:
    training = Training(stages, zero)
    for number in range(4):
        if number == at:
            onefold.save(folder, training.model, training.optimizer)
            training = Training(stages, zero)
            onefold.load(folder, training.model, training.optimizer)
        training.step(number)
    return dict(onefold.full_state_dict(training.model))


@pytest.mark.parametrize("zero", [0, 3])
def test_a_resumed_pipeline_ends_with_the_bits_of_one_that_was_not(zero, tmp_path):
    """Moments included: they shape every step after the second."""
    plain = run_ranks(4, resumed, 2, zero, str(tmp_path), -1)
    for before, after in zip(plain, run_ranks(4, resumed, 2, zero, str(tmp_path), 2), strict=True):
        assert all(torch.equal(after[name], value) for name, value in before.items())


def names_that_clash(folder: str) -> None:
    mesh = onefold.mesh(pp=2)
    part = onefold.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh)
    onefold.save(folder, part, step=1)


def test_parts_whose_names_clash_are_refused(tmp_path):
    for caught in run_ranks_raises(2, names_that_clash, str(tmp_path)):
        assert caught.type_name.endswith("CheckpointError") and "0.weight is in stages 0 and 1" in caught.message
    assert not list(tmp_path.iterdir())
