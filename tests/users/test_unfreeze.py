"""Parameters that were frozen when shard() was called train once they are unfrozen, as in plain torch."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks
from tests.models import Stack, blocks

DIM, RANKS = 16, 2


def built() -> Stack:
    """The first layer and two blocks are frozen, and a matrix of the third."""
    torch.manual_seed(5)
    model = Stack(blocks(3, DIM), nn.Linear(DIM, 4), nn.Linear(DIM, DIM))
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(("first", "layers.0", "layers.1", "layers.2.up.weight")))
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


def later(model: nn.Module) -> list[nn.Parameter]:
    """All of a block that was frozen, and one parameter of another."""
    return [p for name, p in model.named_parameters() if name.startswith("layers.1") or name == "layers.0.up.weight"]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def plain(how: str) -> dict[str, Tensor]:
    """Both ranks' batches in one process."""
    model = built()
    optimizer = adamw(model.parameters() if how == "same" else [p for p in model.parameters() if p.requires_grad])
    for step in range(6):
        if step == 3:
            for param in later(model):
                param.requires_grad_(True)
            if how == "group":
                optimizer.add_param_group({"params": later(model), "lr": 0.005})
            if how == "new":
                optimizer = adamw([p for p in model.parameters() if p.requires_grad])
        loss = sum(model(batch(step, rank)).square().sum() for rank in range(RANKS)) / RANKS
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def train(stage: int, how: str, fields: dict[str, Any], folder: str = "") -> dict[str, Tensor]:
    rank = torch.distributed.get_rank()
    model = onefold.shard(built(), stage=stage, **fields)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.02)
    ema = onefold.EMA(model, 0.5)
    for step in range(6):
        if step == 3:
            for param in later(model):
                param.requires_grad_(True)
            if how == "group":
                optimizer.add_param_group({"params": (param for param in later(model)), "lr": 0.005})
            if how == "new":
                optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.02)
        loss = model(batch(step, rank)).float().square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.clip_grad_norm(0.5)
        optimizer.step()
        ema.update()
    optimizer.zero_grad()
    memory = onefold.memory(model)
    assert memory.optimizer.measured == memory.optimizer.planned
    assert memory.parameters.measured == memory.parameters.planned
    if folder:
        onefold.save(folder, model, optimizer)
        again = onefold.shard(built_unfrozen(), stage=1, precision=fields.get("precision", "fp32"))
        onefold.load(folder, again, onefold.Optimizer(again, torch.optim.AdamW, lr=1.0))
        mine, theirs = onefold.full_state_dict(model), onefold.full_state_dict(again)
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    return onefold.full_state_dict(model)


def built_unfrozen() -> Stack:
    model = built()
    for param in later(model):
        param.requires_grad_(True)
    return model


@pytest.mark.parametrize("how", ["same", "group", "new"])
def test_unfrozen_parameters_train_as_in_plain_torch_at_every_stage(how: str) -> None:
    wanted = plain(how)
    before = dict(built().named_parameters())
    trained = [name for name, param in built_unfrozen().named_parameters() if param.requires_grad]
    first = run_ranks(RANKS, train, 0, how, {})[0]
    for name, value in first.items():
        assert torch.allclose(value, wanted[name], atol=1e-6)
        assert torch.equal(value, before[name]) == (name not in trained)
    for stage in (1, 2, 3):
        for name, value in run_ranks(RANKS, train, stage, how, {})[0].items():
            assert torch.equal(value, first[name])


FIELDS = {
    "bf16": ({"precision": "bf16"}, (0, 3)),
    "recomputed": ({"precision": "bf16", "activations": "checkpoint", "prefetch": 0}, (0, 3)),
    "optimizer on the host": ({"offload": "host"}, (2, 3)),
    "all on the host": (
        {"precision": "bf16", "offload": onefold.Offload(optimizer="host", parameters="host")},
        (3,),
    ),
}


@pytest.mark.parametrize("kind", FIELDS)
def test_stages_agree_with_16_bits_recomputation_and_offload(kind: str, tmp_path: Path) -> None:
    fields, stages = FIELDS[kind]
    results = [run_ranks(RANKS, train, stage, "same", fields, str(tmp_path / str(stage)))[0] for stage in stages]
    assert results[0]
    for name, value in results[0].items():
        assert torch.equal(value, results[-1][name])


def in_backward(stage: int) -> dict[str, Tensor]:
    rank = torch.distributed.get_rank()
    model = onefold.shard(built(), stage=stage)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.02, step_in_backward=True)
    for step in range(4):
        if step == 2:
            model.requires_grad_(True)
        model(batch(step, rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return onefold.full_state_dict(model)


def test_unfreezing_goes_with_updates_in_backward() -> None:
    first = run_ranks(RANKS, in_backward, 1)[0]
    for name, value in run_ranks(RANKS, in_backward, 3)[0].items():
        assert torch.equal(value, first[name])
        assert not torch.equal(value, dict(built().named_parameters())[name])


def gradually(stage: int, folder: str) -> None:
    """One layer after the other, all in one unit; the last by an Optimizer of its own. Then the run is resumed."""

    def start() -> tuple[nn.Module, onefold.Optimizer]:
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(4)))
        model[:3].requires_grad_(False)
        onefold.shard(model, stage=stage)
        return model, onefold.Optimizer(model, torch.optim.AdamW, lr=0.02)

    model, optimizer = start()
    x, optimizers = batch(0, 0), [optimizer]

    def step(net: nn.Module, using: list[onefold.Optimizer]) -> None:
        net(x).square().sum().backward()
        for one in using:
            one.step()
        net.zero_grad()

    def moved(before: dict[str, Tensor]) -> set[str]:
        now = onefold.full_state_dict(model, every_rank=True)
        return {name[0] for name in now if not torch.equal(now[name], before[name])}

    step(model, optimizers)
    for layer in (2, 1):
        model[layer].requires_grad_(True)
        before = onefold.full_state_dict(model, every_rank=True)
        step(model, optimizers)
        assert moved(before) == {str(number) for number in range(layer, 4)}
    onefold.save(folder, model, optimizer)
    other, fresh = start()
    other[1:3].requires_grad_(True)
    onefold.load(folder, other, fresh)  # with the state of parameters that were frozen in shard()
    for net, using in ((model, optimizer), (other, fresh)):
        step(net, [using])
    mine, theirs = onefold.full_state_dict(model), onefold.full_state_dict(other)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    model[0].requires_grad_(True)
    groups = [{"params": model[0].parameters()}]
    optimizers.append(onefold.Optimizer(model, torch.optim.SGD, groups=groups, lr=0.1))
    before = onefold.full_state_dict(model, every_rank=True)
    step(model, optimizers)
    assert moved(before) == set("0123")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_layers_are_unfrozen_one_after_the_other_and_the_run_is_resumed(stage: int, tmp_path: Path) -> None:
    run_ranks(RANKS, gradually, stage, str(tmp_path / "run"))


def all_frozen(stage: int) -> None:
    """A model without anything to train, such as a reference, is trained later."""
    model = onefold.shard(built().requires_grad_(False), stage=stage, precision="bf16")
    x = batch(0, 0)
    with torch.no_grad():
        before = model(x)
    model.requires_grad_(True)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    assert torch.equal(model(x), before)
    model(x).float().square().sum().backward()
    optimizer.step()
    assert not torch.equal(model(x), before)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_model_that_was_frozen_altogether_trains(stage: int) -> None:
    run_ranks(RANKS, all_frozen, stage)


def refused(stage: int) -> list[str]:
    model = onefold.shard(built(), stage=stage, timeout_s=60)
    rank, said = torch.distributed.get_rank(), []

    def hear() -> None:
        with pytest.raises(onefold.OnefoldError) as caught:
            model(batch(0, rank))
        said.append(str(caught.value))

    model(batch(0, rank)).sum().backward()
    later(model)[0].requires_grad_(True)
    hear()  # a step has gradients that would be lost
    model.zero_grad()
    later(model)[0].requires_grad_(False)
    later(model)[rank].requires_grad_(True)
    hear()  # ranks unfroze different ones
    later(model)[rank].requires_grad_(False)
    model(batch(0, rank)).sum().backward()
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_every_rank_raises_where_gradients_would_be_lost_or_ranks_differ(stage: int) -> None:
    for said in run_ranks(RANKS, refused, stage):
        assert "no step() has used" in said[0]
        assert "unfrozen since shard()" in said[1] and "layers.1" in said[1]


def loaded_between(stage: int) -> None:
    """A state dict that is loaded after parameters were unfrozen, and before a forward, reaches their masters in fp32;
    what is written after it counts too."""
    torch.manual_seed(7)
    state = {name: torch.randn_like(param) for name, param in built().named_parameters()}
    for part in ("", "layers.1"):
        model = onefold.shard(built(), stage=stage, precision="bf16")
        for param in later(model):
            param.requires_grad_(True)
        given = {name.removeprefix(f"{part}."): value for name, value in state.items() if name.startswith(part)}
        model.get_submodule(part).load_state_dict(given)
        if stage < 3:
            model.layers[1].up.bias.data[:3] = 0.5
        model(batch(0, 0))
        masters = onefold.full_state_dict(model, every_rank=True)
        names = [name for name, param in model.named_parameters() if param.requires_grad and name.startswith(part)]
        assert "layers.1.down.weight" in names
        for name in names:
            if name == "layers.1.up.bias" and stage < 3:
                assert masters[name][:3].tolist() == [0.5] * 3
                assert torch.equal(masters[name][3:], state[name][3:])
            else:
                assert torch.equal(masters[name], state[name]), name
        model(batch(0, 0)).float().sum().backward()


@pytest.mark.parametrize("stage", range(4))
def test_a_load_between_unfreezing_and_a_forward_reaches_the_masters_unrounded(stage: int) -> None:
    run_ranks(RANKS, loaded_between, stage)


def alone(stage: int, where: str) -> str:
    """One rank alone unfreezes a parameter; what every rank is told. Once it is frozen again, all train."""
    model = onefold.shard(built(), stage=stage, precision="bf16", timeout_s=20)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.02)
    rank, param = torch.distributed.get_rank(), later(model)[0]

    def step(number: int, micro_batches: int = 1) -> None:
        for micro in range(micro_batches):
            with onefold.accumulate(model) if micro + 1 < micro_batches else nullcontext():
                model(batch(number, rank)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    if where != "first step":
        step(0)
    param.requires_grad_(rank == 1)
    with pytest.raises(onefold.MismatchError) as caught:
        if where == "Optimizer()":
            onefold.Optimizer(model, torch.optim.AdamW, lr=0.02)
        else:
            step(1, 3 if where == "accumulate()" and rank == 0 else 1)
    param.requires_grad_(False)
    model.zero_grad()
    before = onefold.full_state_dict(model, every_rank=True)
    step(2)
    after = onefold.full_state_dict(model, every_rank=True)
    assert not torch.equal(before["head.weight"], after["head.weight"])
    assert torch.equal(before["layers.0.up.weight"], after["layers.0.up.weight"])
    return str(caught.value)


@pytest.mark.parametrize("where", ["step", "first step", "accumulate()", "Optimizer()"])
def test_every_rank_raises_where_one_alone_unfreezes(where: str) -> None:
    for stage in range(3 if where == "accumulate()" else 4):
        for said in run_ranks(RANKS, alone, stage, where):
            assert "rank 1 has [unfrozen since shard(): layers.0.up.weight], rank 0 has [nothing more]" in said, said
            assert "on every rank" in said
