"""Modules may return anything, parameters too, and leave losses in attributes."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from tests.harness.grids import thinned
from tests.models import ReturningBlocks, opened
from tests.parity.stage3.compare import Case, assert_equal, batch, differences


def loss_with_aux(model: nn.Module, step: int) -> Tensor:
    out = model(batch(step))
    loss = sum(layer.aux for layer in model.layers)
    if model.kind == "parameter":
        loss = loss + out[0].square().mean() + (out[1] * out[0]).square().mean() + (out[0] @ out[2]).square().mean()
    elif out is not None:
        loss = loss + opened(out).square().mean()
    loss.backward()
    return loss


def returning(kind: str) -> list[str]:
    return differences(Case(lambda: ReturningBlocks(kind), loss_with_aux))


@pytest.mark.parametrize(
    ("kind", "ranks"), thinned(["tensor", "dict", "tuple", "dataclass", "None", "parameter"], [2, 3])
)
def test_modules_may_return_anything_and_leave_losses_in_attributes(kind: str, ranks: int) -> None:
    assert_equal(ranks, returning, kind)
