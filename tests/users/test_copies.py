"""deepcopy of a part of a sharded model: a plain module of its own, or an error; never one that runs the original."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import onefold
from tests.harness import run_ranks
from tests.users.runs import built, rows, train


def copied(stage: int, precision: str, activations: str) -> list[bool]:
    model, optimizer = built(stage, precision, activations=activations)
    train(model, optimizer, range(1))
    found = []
    for part in (model.layers, model.layers[1], model.first):
        clone: nn.Module = copy.deepcopy(part)
        x = rows(3).to(next(clone.parameters()).dtype).requires_grad_()
        run = clone[0] if isinstance(clone, nn.ModuleList) else clone
        theirs = part[0] if isinstance(part, nn.ModuleList) else part
        same = torch.equal(run(x), theirs(x))
        run(x).float().sum().backward()  # its own gradients, and none of the original's
        own = all(p.grad is not None for p in run.parameters()) and all(p.grad is None for p in theirs.parameters())
        with torch.no_grad():
            for param in clone.parameters():
                param.zero_()
        changed = not torch.equal(run(x), theirs(x))
        clone.load_state_dict(part.state_dict())  # no load of the original's
        found += [same, own, changed]
    train(model, optimizer, range(1, 3))
    return found


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_copy_of_a_part_is_a_plain_module_with_weights_of_its_own(stage: int, activations: str) -> None:
    for precision in ("fp32", "bf16"):
        assert run_ranks(2, copied, stage, precision, activations) == [[True] * 9] * 2


def refused(activations: str) -> str:
    model, _ = built(3, "fp32", activations=activations)
    try:
        copy.deepcopy(model.layers)
    except onefold.StateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("activations", ["keep", "checkpoint"])
def test_at_stage_3_a_copy_of_a_part_raises(activations: str) -> None:
    for said in run_ranks(2, refused, activations):
        assert "cannot be copied" in said and "full_state_dict" in said
