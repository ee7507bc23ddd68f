"""Which parameters hang where: every change is found, wherever it hangs and whatever changed before it."""

from __future__ import annotations

import pytest
from torch import nn

from onefold.errors import StateError
from onefold.model.tree import ParameterTree


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))


def wrapped_in_another_module(net: nn.Sequential) -> None:
    net[1] = nn.Sequential(net[1])


def test_a_module_that_was_wrapped_keeps_its_parameters_and_changes_inside_it_are_still_found():
    net = model()
    tree = ParameterTree(net)
    wrapped_in_another_module(net)
    tree.check()
    net[1][0][0].weight = nn.Parameter(net[1][0][0].weight.detach().clone())
    with pytest.raises(StateError, match=r"weight"):
        tree.check()


@pytest.mark.parametrize("before", [lambda net: None, wrapped_in_another_module])
@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net[0], "bias", None),
        lambda net: setattr(net, "more", nn.Linear(1, 1)),
        lambda net: setattr(net[0], "weight", nn.Parameter(net[0].weight.detach())),
        lambda net: net.__delitem__(1),
        lambda net: net.__setitem__(0, nn.Linear(2, 2)),
    ],
    ids=["removed", "added", "replaced", "module removed", "module replaced"],
)
def test_every_look_finds_a_change(before, change):
    net = model()
    tree = ParameterTree(net)
    before(net)
    tree.check()
    tree.check()
    change(net)
    for _ in range(2):
        with pytest.raises(StateError):
            tree.check()
