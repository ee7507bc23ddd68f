"""A step that a flag on the device takes back: bits are those of an optimizer that never saw it, and nobody waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import onefold
from onefold import Precision
from onefold.optim.guarded_step import GuardedStep, can_be_guarded, skips_by_itself
from onefold.optim.trials import bare_step


class Lion(torch.optim.Optimizer):
    """A user's class: state made in the first step, a count that is a Python number, another of the whole optimizer."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["count"], state["momentum"] = 0, torch.zeros_like(param)
                state["count"] += 1
                param.sub_(torch.sign(0.9 * state["momentum"] + 0.1 * param.grad), alpha=group["lr"] / state["count"])
                state["momentum"].lerp_(param.grad, 0.1)


class Remembers(Lion):
    """A class that keeps something beside its state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.history: list[int] = []


CLASSES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adam": torch.optim.Adam,
    "amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "fused adam": lambda params: torch.optim.AdamW(params, fused=True),
    "adagrad": torch.optim.Adagrad,
    "fused adagrad": lambda params: torch.optim.Adagrad(params, fused=True),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "asgd": torch.optim.ASGD,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "rprop": torch.optim.Rprop,
    "lion": Lion,
}


class ReadsOfFlag(TorchDispatchMode):
    """Counts how often the host asks for the value of the flag, or of what was made from it."""

    def __init__(self, flag: Tensor) -> None:
        super().__init__()
        self._flags, self.reads = [flag], 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from_flag = any(one is flag for one in tree_leaves(args) for flag in self._flags)
        found = func(*args, **(kwargs or {}))
        if from_flag and str(func) == "aten._local_scalar_dense.default":
            self.reads += 1
        elif from_flag and isinstance(found, Tensor) and found.ndim == 0:
            self._flags.append(found)
        return found


def params_of() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(numel, generator=generator)) for numel in (128, 64)]


def give_gradients(params: list[nn.Parameter], step: int, bad: bool) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator) / (0.0 if bad else 1.0)


def trained(make: Callable[[Any], torch.optim.Optimizer], bad_steps: set[int], guarded: bool) -> tuple[Any, list[int]]:
    """Parameters and state after six steps; how often the host read the flag of each guarded one."""
    params = params_of()
    optimizer, reads = make(params), []
    for step in range(6):
        bad = step in bad_steps
        give_gradients(params, step, bad)
        if guarded:
            flag = torch.tensor(float(bad))
            with ReadsOfFlag(flag) as seen:
                taken = GuardedStep(optimizer, params, flag)
            if bad:
                taken.undo()
            reads.append(seen.reads)
        elif not bad:
            bare_step(optimizer)
    states = [dict(optimizer.state[param]) for param in params]
    return ([param.detach() for param in params], states, getattr(optimizer, "calls", 0)), reads


def same_bits(one: Any, other: Any) -> bool:
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("bad_steps", [set(), {2}, {0, 3, 4}], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_a_step_that_is_taken_back_leaves_the_bits_of_one_that_was_not_taken(name: str, bad_steps: set[int]) -> None:
    plain, _ = trained(CLASSES[name], bad_steps, guarded=False)
    guarded, reads = trained(CLASSES[name], bad_steps, guarded=True)
    assert same_bits(plain, guarded)
    made = 1 + (0 in bad_steps)  # the steps in which a class makes its state
    assert sum(reads[made:]) == 0, reads


@pytest.mark.parametrize("name", ["sgd", "adagrad", "fused adagrad"])
def test_the_host_never_reads_the_flag_where_a_class_makes_no_state_in_a_step(name: str) -> None:
    assert sum(trained(CLASSES[name], {0, 3}, guarded=True)[1]) == 0


def test_fused_classes_of_torch_skip_by_themselves_and_copy_nothing() -> None:
    assert [name for name, make in CLASSES.items() if skips_by_itself(make(params_of()))] == [
        "fused momentum", "fused adam", "fused adagrad",
    ]  # fmt: skip
    mixed = torch.optim.AdamW(params_of(), fused=True)
    mixed.param_groups[0]["fused"] = False  # changed since: its kernels would not look at the flag
    assert not skips_by_itself(mixed)


def test_a_class_that_keeps_more_than_state_and_numbers_is_not_guarded() -> None:
    assert all(can_be_guarded(make(params_of())) for make in CLASSES.values())
    assert not can_be_guarded(Remembers(params_of()))


@pytest.mark.parametrize("cls", [torch.optim.Adagrad, torch.optim.RMSprop, Lion])
@pytest.mark.parametrize("master", [None, "fp32", "split"])
def test_a_unit_whose_flag_is_set_keeps_its_parameters_master_and_state(master: Any, cls: Any) -> None:
    onefold.init()
    torch.manual_seed(0)
    precision = "fp32" if master is None else Precision(compute="bf16", master=master)
    model = onefold.shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), stage=1, precision=precision)
    optimizer = onefold.Optimizer(model, cls, lr=1e-2)
    dtype = next(model.parameters()).dtype

    def values() -> list[Any]:
        kept = [tensor.clone() for tensor in optimizer.state_tensors()]
        return [kept, onefold.full_state_dict(model), [param.detach().clone() for param in model.parameters()]]

    def backward(factor: float) -> None:
        model(torch.randn(4, 64, dtype=dtype) * factor).float().square().sum().backward()
        for _ in optimizer.gradients():
            pass  # they are complete

    for _ in range(2):
        backward(1.0)
        optimizer.step()
        optimizer.zero_grad()
    before = values()
    for flag in (1.0, 0.0):
        backward(float("inf") if flag else 1.0)
        for one in optimizer.by_unit:
            used = one.to_update([1] * len(one.unit.layout.slots))
            with one.unit.update(used):
                one.update(optimizer.param_groups, used, 1.0, torch.tensor(flag))
            if flag:
                one.undo_step()
        optimizer.zero_grad()
        assert same_bits(before, values()) == bool(flag)
