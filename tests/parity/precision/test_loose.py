"""One rank in 16 bits takes gradients as autograd made them: no copy, no buffer, and the bits of one vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import onefold
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.models import ChannelsLast


def built(loose: bool, cls: type[torch.optim.Optimizer], inside: bool = False) -> tuple[Any, Any]:
    onefold.init()
    torch.manual_seed(0)
    model = onefold.shard(ChannelsLast(), stage=3, precision="bf16", bucket_bytes=256)
    for unit in engine_of(model).units:
        unit.gradients._may_stay_unflattened &= loose
    return model, onefold.Optimizer(model, cls, lr=0.05, step_in_backward=inside)


def inputs(step: int) -> Tensor:
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(step))


def plainly(model: Any, adam: Any, step: int) -> None:
    model(inputs(step)).backward()


def clipped(model: Any, adam: Any, step: int) -> None:
    model(inputs(step)).backward()
    adam.clip_grad_norm(0.1)


def twice(model: Any, adam: Any, step: int) -> None:
    model(inputs(step)).backward()
    model(inputs(step + 100)).backward()


def in_parts(model: Any, adam: Any, step: int) -> None:
    with onefold.accumulate(model):
        model(inputs(step)).backward()
    model(inputs(step + 100)).backward()


def unused(model: Any, adam: Any, step: int) -> None:
    model.skip = step % 2 == 1
    clipped(model, adam, step)


def forgotten(model: Any, adam: Any, step: int) -> None:
    model(inputs(step)).backward()
    model.odd.bias.grad = None
    adam.clip_grad_norm(0.1)


def edited(model: Any, adam: Any, step: int) -> None:
    model(inputs(step)).backward()
    model.odd.weight.grad.mul_(2)
    model.conv.weight.grad.clamp_(-0.01, 0.01)


def from_zeros(model: Any, adam: Any, step: int) -> None:
    model(inputs(step)).backward()
    adam.zero_grad(set_to_none=False)
    model(inputs(step + 100)).backward()


def trained(how: Callable[..., None], loose: bool, cls: type[torch.optim.Optimizer]) -> dict[str, Tensor]:
    model, adam = built(loose, cls)
    for step in range(4):
        how(model, adam, step)
        adam.step()
        adam.zero_grad()
    return onefold.full_state_dict(model)


WAYS = [plainly, clipped, twice, in_parts, unused, forgotten, edited, from_zeros]


def differing(names: list[str], cls: type[torch.optim.Optimizer]) -> list[tuple[str, str]]:
    ways = [way for way in WAYS if way.__name__ in names]
    pairs = [(way.__name__, trained(way, True, cls), trained(way, False, cls)) for way in ways]
    return [(way, key) for way, ours, flat in pairs for key in ours if not torch.equal(ours[key], flat[key])]


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Adagrad], ids=["one kernel", "torch's class"])
def test_loose_gradients_train_to_the_bits_of_one_vector(cls: type[torch.optim.Optimizer]) -> None:
    assert run_ranks(1, differing, [way.__name__ for way in WAYS], cls) == [[]]


def seen_behind_a_parameter() -> list[float]:
    """What torch's class gets for the gap behind a lone parameter, out of a buffer that was used before."""
    onefold.init()
    model = onefold.shard(torch.nn.Linear(7, 1, bias=False), stage=3, precision="bf16")
    sgd = onefold.Optimizer(model, torch.optim.Adagrad, lr=0.1)
    (unit,) = engine_of(model).units
    used = unit.pool.take(unit.layout.numel, torch.float32).fill_(9.0)
    unit.pool.give(used)
    model(torch.ones(2, 7)).float().sum().backward()
    sgd.step()
    (state,) = sgd.by_unit[0].inner.state.values()
    return state["sum"][7:].tolist()


def test_a_gap_is_never_updated_from_what_a_buffer_held_before() -> None:
    (found,) = run_ranks(1, seen_behind_a_parameter)
    assert found and set(found) == {0.0}


def inside_differs() -> list[str]:
    found = []
    for loose in (True, False):
        model, adam = built(loose, torch.optim.AdamW, inside=True)
        for step in range(4):
            model(inputs(step)).backward()
            adam.step()
        found.append(onefold.full_state_dict(model))
    return [key for key in found[0] if not torch.equal(found[0][key], found[1][key])]


def test_updates_inside_backward_too() -> None:
    assert run_ranks(1, inside_differs) == [[]]


def taken_and_freed() -> tuple[bool, int, int, int]:
    model, adam = built(True, torch.optim.AdamW)
    model(inputs(0)).backward()
    shown = all(param.grad is not None for param in model.parameters())
    engine = engine_of(model)
    after = onefold.memory(model).gradients.measured
    adam.step()
    adam.zero_grad()
    return shown, len(engine.pool.buffers()), after, onefold.memory(model).gradients.measured


def test_no_buffer_holds_them_and_zero_grad_frees_them() -> None:
    elements = sum(p.numel() for p in ChannelsLast().parameters())
    assert run_ranks(1, taken_and_freed) == [(True, 0, 2 * elements, 0)]
