"""Checkpoints do not know tiers: what one run saves any other goes on from, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onefold
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import MODELS
from tests.offload.runs import PRECISIONS, TIERS, offload_of
from tests.parity.training import batch_for

STEPS = 2  # before a save, and after it


def built(precision: Any, offload: onefold.Offload | None) -> tuple[torch.nn.Module, onefold.Optimizer]:
    onefold.init()
    torch.manual_seed(1)
    model = onefold.shard(MODELS["gpt"].build(), stage=3, precision=precision, offload=offload, bucket_bytes=64 << 10)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)


def train(model: torch.nn.Module, adam: onefold.Optimizer, first: int) -> None:
    for step in range(first, first + STEPS):
        torch.manual_seed(step)
        loss = MODELS["gpt"].loss(model, batch_for(step, 0, torch.distributed.get_rank()), step)
        adam.backward(loss)
        adam.clip_grad_norm(0.5)
        adam.step()
        adam.zero_grad()


def whole_state(model: torch.nn.Module, adam: onefold.Optimizer, folder: str) -> dict[str, Any]:
    """All that a checkpoint holds."""
    onefold.save(folder, model, adam)
    return onefold.full_state_dict(model)


def saved_and_gone_on(folder: str, precision: Any, offload: onefold.Offload | None, wait: bool) -> dict[str, Any]:
    model, adam = built(precision, offload)
    train(model, adam, 0)
    onefold.save(folder, model, adam, wait=wait)
    train(model, adam, STEPS)
    onefold.finish_saves()
    return onefold.full_state_dict(model)


def loaded_and_gone_on(folder: str, precision: Any, offload: onefold.Offload | None) -> dict[str, Any]:
    model, adam = built(precision, offload)
    train(model, adam, 7)  # other values and moments, to be replaced
    onefold.load(folder, model, adam)
    train(model, adam, STEPS)
    return onefold.full_state_dict(model)


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [name for name in a if not torch.equal(a[name], b[name])]


def both_ways(folder: str, precision: Any, offload: onefold.Offload, wait: bool) -> list[str]:
    whole = saved_and_gone_on(f"{folder}/plain", precision, None, wait)
    moved = saved_and_gone_on(f"{folder}/moved", precision, offload, wait)
    found = [f"without saving: {name}" for name in differing(whole, moved)]
    again = loaded_and_gone_on(f"{folder}/moved", precision, None)
    found += [f"saved from tiers: {name}" for name in differing(whole, again)]
    again = loaded_and_gone_on(f"{folder}/plain", precision, offload)
    return found + [f"loaded into tiers: {name}" for name in differing(whole, again)]


@pytest.mark.parametrize(("tiers", "precision", "wait"), thinned(TIERS, PRECISIONS, (True, False)))
def test_what_any_tier_saves_any_other_goes_on_from(tiers: str, precision: str, wait: bool, tmp_path) -> None:
    path = offload_of(tiers, str(tmp_path))
    assert run_ranks(2, both_ways, str(tmp_path), PRECISIONS[precision], path, wait) == [[]] * 2


def values_written_by_hand(offload: onefold.Offload) -> list[float]:
    model, adam = built("bf16", offload)
    train(model, adam, 0)
    with onefold.full_parameters(model, write=True), torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    read = [float(value.min()) for value in onefold.full_state_dict(model).values() if value.is_floating_point()]
    train(model, adam, STEPS)
    return read


def states_taken_back(offload: onefold.Offload) -> list[str]:
    model, adam = built("bf16", offload)
    train(model, adam, 0)
    state = adam.state_dict()
    kept = onefold.full_state_dict(model)
    train(model, adam, STEPS)
    after = onefold.full_state_dict(model)
    with onefold.full_parameters(model, write=True), torch.no_grad():  # 16 bits of it: enough to tell moments apart
        for name, param in model.named_parameters():
            if kept:
                param.copy_(kept[name])
    adam.load_state_dict(state)
    fresh = adam.state_dict()
    again = [
        f"{row['unit']} {key}"
        for row, old in zip(fresh["slices"], state["slices"], strict=True)
        for key in row["state"]
        if not torch.equal(torch.as_tensor(row["state"][key]), torch.as_tensor(old["state"][key]))
    ]
    assert after.keys() == kept.keys()
    return again


@pytest.mark.parametrize("tiers", TIERS)
def test_values_written_by_hand_and_states_taken_back_reach_every_tier(tiers: str, tmp_path) -> None:
    offload = offload_of(tiers, str(tmp_path))
    (read,) = run_ranks(1, values_written_by_hand, offload)
    assert read and set(read) == {0.5}
    assert run_ranks(1, states_taken_back, offload) == [[]]
