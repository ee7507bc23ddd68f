"""Steps that are spikes are skipped before they change anything: a run that skips a batch never had it, to the bit."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold import ConfigError, LossScale, PrecisionError, Spikes
from onefold.optim import finite
from tests.harness import device, run_ranks

STEPS, BAD = 9, 6
AFTER = 3


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 8, generator=generator).to(device())


def trained(stage: int, precision: str, kind: str | None, folder: str) -> dict[str, Any]:
    """With a bad batch, which is found, or without it; `kind` says what is bad about it on one rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(device())
    model = onefold.shard(model, stage=stage, precision=precision)
    scale = LossScale(initial=16.0) if precision == "fp16" else None
    optimizer = onefold.Optimizer(
        model, torch.optim.Adam, lr=1e-2, amsgrad=True, skip_spikes=Spikes(after=AFTER), loss_scale=scale
    )
    schedule = onefold.Scheduler(optimizer, torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)
    losses, rank = [], torch.distributed.get_rank()
    for step in range(STEPS):
        if step == BAD and kind is None:
            continue
        bad = step == BAD and rank == 1
        loss = (model(batch(step, rank)) - 2.0).square().mean()
        loss = {"nan": loss * math.nan, "norm": loss * 1e3, "loss": loss + 1e3}[kind or "nan"] if bad else loss
        for _ in range(2):  # micro-batches, so that all but the last count half
            optimizer.backward(loss / 2, retain_graph=True)
        if step % 2:
            optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == BAD - 1 and folder:  # the means of good steps come back
            onefold.save(folder, model, optimizer, overwrite=True)
            onefold.load(folder, model, optimizer)
        elif step == BAD - 1:
            optimizer.load_state_dict(optimizer.state_dict())
        if not (step == BAD and kind):
            losses.append(loss.item())
    state = dict(onefold.shards(model)) | {str(i): value for i, value in enumerate(optimizer.state_tensors())}
    return {
        "losses": losses, "state": {key: value.cpu() for key, value in state.items()}, "skipped": optimizer.skipped,
        "why": optimizer.why_skipped, "scale": optimizer.loss_scale, "lr": optimizer.param_groups[0]["lr"],
        "means": optimizer.state_dict()["spikes"],
    }  # fmt: skip


def compared(stage: int, precision: str, folder: str, *, on_device: bool) -> list[dict[str, Any]]:
    """Without the bad batch, and with each kind of it; with the flag on the device as on CUDA, or on the host."""
    before = set(finite.FLAG_STAYS_ON)
    finite.FLAG_STAYS_ON.update({"cpu"} if on_device else ())
    try:
        return [trained(stage, precision, kind, folder) for kind in (None, "nan", "norm", "loss")]
    finally:
        finite.FLAG_STAYS_ON.intersection_update(before)


@pytest.mark.parametrize(
    ("stage", "precision", "on_device"), [(0, "fp32", True), (2, "fp16", True), (3, "bf16", False)]
)
def test_a_run_that_skips_a_batch_equals_one_that_never_had_it(tmp_path, stage, precision, on_device):
    for without, *others in run_ranks(
        2, compared, stage, precision, "" if on_device else str(tmp_path), on_device=on_device
    ):
        assert without["skipped"] == 0 and len(without["losses"]) == STEPS - 1
        for seen, said in zip(others, ("infinite or NaN", "the gradient norm was", "the loss was"), strict=True):
            assert said in seen["why"] and seen["skipped"] == 1, seen["why"]
            assert seen["losses"] == without["losses"] and seen["lr"] == without["lr"]
            assert seen["means"] == without["means"]
            assert seen["state"].keys() == without["state"].keys()
            assert all(torch.equal(seen["state"][key], value) for key, value in without["state"].items()), said
            assert seen["scale"] == (without["scale"] if said != "infinite or NaN" or precision != "fp16" else
                                     without["scale"] / 2)  # fmt: skip


def never_good() -> str:
    model = onefold.shard(nn.Linear(4, 1), stage=1)
    optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1, skip_spikes=Spikes(in_a_row=3))
    for _ in range(3):
        (model(torch.ones(1, 4)) * math.nan).sum().backward()
        try:
            optimizer.step()
        except PrecisionError as error:
            return str(error)
        optimizer.zero_grad()
    return ""


def test_a_run_whose_every_step_is_bad_ends_and_wrong_settings_are_refused():
    for said in run_ranks(2, never_good):
        assert "3 steps in a row were skipped" in said and "load an earlier checkpoint" in said
    for wrong in ({"norm": 1.0}, {"loss": "2"}, {"after": 0}, {"in_a_row": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Spikes(**wrong)
