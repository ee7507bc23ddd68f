"""FabricZeroStrategy under lightning.fabric.Fabric, on two ranks over gloo."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins import MixedPrecision
from lightning.fabric.strategies import DDPStrategy
from torch import nn

import onefold
from onefold.lightning import FabricZeroStrategy
from tests.harness import run_ranks, run_ranks_raises
from tests.lightning.lit import as_if_launched, blocks, data, weights

STAGES = (0, 1, 2, 3)


def fabric(stage: int | str, **settings: Any) -> L.Fabric:
    """A Fabric on a rank of the harness."""
    as_if_launched()
    strategy = DDPStrategy() if stage == "ddp" else "onefold" if stage == "name" else FabricZeroStrategy(stage=stage)
    found = L.Fabric(strategy=strategy, accelerator="cpu", devices=dist.get_world_size(), **settings)
    found.launch()
    return found


def steps(here: L.Fabric, model: Any, optimizer: Any, scheduler: Any, number: int, clip: dict[str, float]) -> list[Any]:
    """Each of two micro-batches; losses."""
    losses = []
    batches = iter(here.setup_dataloaders(data()))
    for _ in range(number):
        for micro, (x, y) in enumerate((next(batches), next(batches))):
            with here.no_backward_sync(model, enabled=micro == 0):
                out = model(x)
                loss = nn.functional.mse_loss(out, y) / 2
                here.backward(loss)
            losses.append((loss.item(), str(out.dtype)))
        here.clip_gradients(model, optimizer, **clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


def trained(stage: int | str, number: int = 3, clip: dict[str, float] | None = None, **settings: Any) -> Any:
    """On a rank: losses and weights."""
    here = fabric(stage, **settings)
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = here.setup(model, optimizer, scheduler=scheduler)
    losses = steps(here, model, optimizer, scheduler, number, clip or {"max_norm": 0.05})
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**number
    inner = model.module
    return losses, weights(inner)


def of_stages(clip: dict[str, float]) -> Any:
    return {stage: trained(stage, clip=clip) for stage in ("ddp", "name", *STAGES)}


@pytest.mark.parametrize("clip", [{"max_norm": 0.05}, {"clip_val": 1e-3}])
def test_stages_are_bitwise_equal_and_ddp_agrees_to_1e_6(clip):
    for found in run_ranks(2, of_stages, clip):
        for stage in ("name", *STAGES):
            losses, values = found[stage]
            assert losses == found[0][0] and all(torch.equal(values[name], found[0][1][name]) for name in values)
        losses, values = found["ddp"]
        assert [loss for loss, _ in losses] == pytest.approx([loss for loss, _ in found[0][0]], abs=1e-6)
        assert all(found[0][1][name].allclose(values[name], rtol=0, atol=1e-6) for name in values)


def narrow(precision: str) -> Any:
    plugin = {"plugins": MixedPrecision(precision, "cpu")} if precision == "16-mixed" else {"precision": precision}
    return [trained(stage, **plugin) for stage in (1, 3)]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_in_16_bits_outputs_are_fp32_and_stages_are_equal(precision):
    for first, last in run_ranks(2, narrow, precision):
        assert first[0] == last[0] and all(torch.equal(first[1][name], last[1][name]) for name in first[1])
        assert {dtype for _, dtype in first[0]} == {"torch.float32"}


def saved(path: str, stage: int, at: int, number: int, resume: bool) -> Any:
    """On a rank: trains, and saves after step `at`; or goes on from there. Losses after it, and weights."""
    here = fabric(stage)
    with here.init_module(empty_init=True):
        model = blocks()
    model = here.setup_module(model)
    optimizer = here.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "done": 0}
    if resume:
        left = here.load(path, state)
        assert left == {"note": "of the first"} and state["done"] == at and scheduler.last_epoch == at
    else:
        steps(here, model, optimizer, scheduler, at, {"max_norm": 0.05})
        here.save(path, {**state, "done": at, "note": "of the first"})
    losses = steps(here, model, optimizer, scheduler, number, {"max_norm": 0.05})
    return losses, weights(model.module), [group["lr"] for group in optimizer.param_groups]


def test_a_loop_is_saved_and_goes_on_bit_for_bit_at_another_stage(tmp_path):
    path = str(tmp_path / "here")
    whole = run_ranks(2, saved, path, 3, 2, 2, False)
    for stage in (1, 3):
        for one, other in zip(whole, run_ranks(2, saved, path, stage, 2, 2, True), strict=True):
            assert one[0] == other[0] and one[2] == other[2]
            assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    (alone,) = run_ranks(1, saved, path, 2, 2, 1, True)
    assert len(alone[0]) == 2


def raw(path: str) -> Any:
    """On a rank: weights of a folder and of a plain file, into another model."""
    here = fabric(3)
    first, second, third = (here.setup_module(blocks()) for _ in range(3))
    with onefold.full_parameters(first.module, write=True), torch.no_grad():
        for param in first.parameters():
            param.add_(1)
    here.save(f"{path}/folder", {"model": first})
    here.load_raw(f"{path}/folder", second)
    whole = weights(first.module)
    if here.is_global_zero:
        torch.save(whole, f"{path}/plain.pt")
    here.barrier()
    here.load_raw(f"{path}/plain.pt", third)
    return whole, weights(second.module), weights(third.module)


def test_weights_are_read_raw_from_a_folder_and_from_a_file(tmp_path):
    for whole, *others in run_ranks(2, raw, str(tmp_path)):
        assert all(torch.equal(whole[name], other[name]) for other in others for name in whole)


def half_of_two_models() -> Any:
    """On a rank: of two models in fp16 the second overflows, until the loss scale is small enough for both."""
    here = fabric(2, plugins=MixedPrecision("16-mixed", "cpu"))
    nets = [blocks(), blocks()]
    (one, first), (two, second) = [here.setup(net, torch.optim.SGD(net.parameters(), lr=1e-3)) for net in nets]
    scales, x = [], torch.ones(2, 16)
    while not second.steps and len(scales) < 40:
        scales.append((first.loss_scale, second.loss_scale))
        for model, optimizer, factor in ((one, first, 1.0), (two, second, 300.0)):
            here.backward(factor * model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
    gone = weakref.ref(two.module)
    del two, second, model, optimizer, nets
    gc.collect()
    return scales, gone() is None


def test_models_of_one_fabric_find_a_loss_scale_and_are_freed():
    for scales, freed in run_ranks(2, half_of_two_models):
        assert 1 < len(scales) < 40 and scales[-1][1] < scales[-1][0] and freed


def without_module() -> None:
    fabric(2).setup_optimizers(torch.optim.SGD(blocks().parameters(), lr=0.1))


def not_set_up(path: str) -> None:
    here, net = fabric(2), blocks()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    here.save(path, {"model": here.setup(net, optimizer)[0], "optimizer": optimizer})


def two_models(path: str) -> None:
    here = fabric(2)
    here.save(path, {"one": here.setup_module(blocks()), "other": here.setup_module(blocks())})


def test_what_cannot_be_set_up_or_saved_is_said(tmp_path):
    for error in run_ranks_raises(2, without_module):
        assert error.type_name == "ConfigError" and "setup_module(model) first" in error.message
    for error in run_ranks_raises(2, not_set_up, str(Path(tmp_path) / "here")):
        assert error.type_name == "CheckpointError" and "'optimizer' is a SGD that was not set up" in error.message
    for error in run_ranks_raises(2, two_models, str(Path(tmp_path) / "here")):
        assert error.type_name == "CheckpointError" and "found 2 modules in its state (one, other)" in error.message
