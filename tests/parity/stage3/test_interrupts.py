"""KeyboardInterrupt in a forward at stage 3. torch calls no forward hook after it; training goes on all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import Gained
from tests.parity.stage3.compare import Case, batch, differences, learn

STRUCK = {  # which module is interrupted, and which is called
    "inside a block": ("layers.1.up", ""),
    "before a block": ("layers.1", ""),
    "the head": ("head", ""),
    "a block called by itself": ("layers.1.up", "layers.1"),
}


def interrupt_forward(model: nn.Module, struck: str, called: str) -> None:
    def strike(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.get_submodule(struck).register_forward_pre_hook(strike)
    with pytest.raises(KeyboardInterrupt):
        model.get_submodule(called)(batch(9))
    hook.remove()


def error_of_a_changed_activation() -> str:
    """torch's own error; under saved_tensors_hooks autograd does not check, and Onefold's unpack raises another."""
    y = torch.ones(2, requires_grad=True).exp()
    y.add_(1)
    with pytest.raises(RuntimeError) as error:
        y.sum().backward()
    return str(error.value)


def differences_after_interrupts(struck: str, called: str, evaluating: bool) -> list[str]:
    messages = []

    def turn(model: nn.Module, step: int) -> torch.Tensor:
        if step:
            with torch.set_grad_enabled(not evaluating):
                interrupt_forward(model, struck, called)
            messages.append(error_of_a_changed_activation())
        return learn(model, step)

    found = differences(Case(Gained, turn))
    return found + [text for text in messages if "an activation was changed" in text]


@pytest.mark.parametrize(("where", "ranks"), thinned(STRUCK, [1, 2]))
def test_after_an_interrupted_forward_no_saved_tensor_hooks_stay_and_training_goes_on(where: str, ranks: int) -> None:
    for evaluating in (False, True):
        found = run_ranks(ranks, differences_after_interrupts, *STRUCK[where], evaluating)
        assert found == [[]] * ranks
