"""An update that fails in the middle of a step, by every update policy: the model says so until a load mends it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks
from tests.models import Residual
from tests.parity.training import same_bits
from tests.parity.whole import LAMB

UNITS, LARGE = 5, 320  # elements of a unit's shard, but for the third unit


class Fault:
    """While it is armed, updates fail: of the unit that is larger than all others, or after so many tensors."""

    armed = False
    tensors = 0


class FragileSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        if Fault.armed and sum(param.numel() for group in self.param_groups for param in group["params"]) > LARGE:
            raise ArithmeticError("this kernel fails")
        super().step()


class FragileLAMB(LAMB):
    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        Fault.tensors += Fault.armed
        if Fault.tensors > 3:  # every rank owns a tensor of each of the first rounds
            raise ArithmeticError("this kernel fails")
        return super().direction(param, grad, state)


HOST = onefold.Offload(optimizer="host")
POLICIES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], bool]] = {  # class, shard()'s, step_in_backward
    "at step, replicated": (FragileSGD, {"stage": 1}, False),
    "at step, sharded": (FragileSGD, {"stage": 3}, False),
    "in backward, replicated": (FragileSGD, {"stage": 2}, True),
    "in backward, sharded": (FragileSGD, {"stage": 3}, True),
    "on the host": (FragileSGD, {"stage": 3, "offload": HOST}, False),
    "on the host, waited for": (FragileSGD, {"stage": 2, "offload": HOST}, False),
    "on the host, in backward": (FragileSGD, {"stage": 3, "offload": HOST}, True),
    "whole tensors at step": (FragileLAMB, {"stage": 2}, False),
    "whole tensors in backward": (FragileLAMB, {"stage": 3}, True),
    "whole tensors of the host": (FragileLAMB, {"stage": 3, "offload": HOST}, False),
}


class Tried:
    """A model that takes two steps and is saved; the update of its third unit fails in the third step."""

    def __init__(self, policy: str, folder: str) -> None:
        cls, fields, inside = POLICIES[policy]
        torch.manual_seed(0)
        layers = nn.Sequential(*(Residual(8, 40 if number == 2 else 16) for number in range(UNITS)))
        self.model = onefold.shard(layers, units=(Residual,), bucket_bytes=1 << 12, **fields)
        self.optimizer = onefold.Optimizer(self.model, cls, lr=0.1, step_in_backward=inside)
        for number in range(2):
            self.step(number)
        self.folder = f"{folder}/{policy}"
        onefold.save(self.folder, self.model, self.optimizer)
        self.saved = onefold.full_state_dict(self.model)
        Fault.armed, Fault.tensors = True, 0
        self.first = self.said(lambda: (self.step(2), self.forward(3)))
        Fault.armed, Fault.tensors = False, 0

    def forward(self, number: int) -> Tensor:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        return self.model(x).square().mean()

    def step(self, number: int) -> None:
        self.forward(number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def said(self, call: Callable[[], Any]) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    def heard(self) -> dict[str, str]:
        """What was said at once, and by each call that needs the values."""
        calls = {
            "forward": lambda: self.forward(3),
            "step": self.optimizer.step,
            "save": lambda: onefold.save(self.folder + " again", self.model, self.optimizer),
        }
        return {"at once": self.first, **{name: self.said(call) for name, call in calls.items()}}

    def mended(self) -> list[str]:
        """Which parameters a load does not bring back, or not as they were; then the run goes on."""
        onefold.load(self.folder, self.model, self.optimizer)
        found = onefold.full_state_dict(self.model)
        wrong = [name for name in self.saved if not same_bits(self.saved[name], found[name])]
        self.step(2)
        gone_on, again = onefold.full_state_dict(self.model), self.twin()
        return wrong + [f"{name} later" for name in again if not same_bits(again[name], gone_on[name])]

    def twin(self) -> dict[str, Tensor]:
        """The parameters after a third step that does not fail, from the same checkpoint."""
        onefold.load(self.folder, self.model, self.optimizer)
        self.step(2)
        return onefold.full_state_dict(self.model)


def tried(folder: str) -> dict[str, tuple[dict[str, str], list[str]]]:
    onefold.init()
    found = {}
    for policy in POLICIES:
        one = Tried(policy, folder)
        found[policy] = one.heard(), one.mended()
    return found


def test_a_step_that_failed_half_way_is_heard_at_the_next_call_and_a_load_mends_it(tmp_path) -> None:
    for rank in run_ranks(2, tried, str(tmp_path)):
        for policy, (heard, wrong) in rank.items():
            at_once = heard.pop("at once")
            assert "this kernel fails" in at_once, (policy, at_once)
            for call, said in heard.items():
                found = policy, call, said
                assert said.removeprefix("StateError: ").removeprefix("rank 0: ").startswith("the update of "), found
                assert "holds values of two steps; load a checkpoint" in said, found
            assert not wrong, (policy, wrong)


def refused_settings() -> list[str]:
    """A setting that the form of the state cannot have, which is then taken back: what both steps say."""
    onefold.init()
    model = onefold.shard(nn.Sequential(*(Residual(8) for _ in range(2))), stage=2, precision="bf16")
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, state="bf16", lr=0.1)
    model(torch.ones(2, 8).bfloat16()).float().sum().backward()
    found = []
    for amsgrad in (True, False):
        optimizer.param_groups[0]["amsgrad"] = amsgrad
        try:
            optimizer.step()
            found.append("")
        except onefold.OnefoldError as error:
            found.append(str(error))
    return found


def test_a_step_that_was_refused_before_it_wrote_can_be_taken_again() -> None:
    [(first, second)] = run_ranks(1, refused_settings)
    assert "take it back" in first and second == ""


def refused_in_backward() -> list[str]:
    """The same in backward, of which the update of one unit is lost: what backward and step() say."""
    onefold.init()
    blocks = nn.Sequential(*(Residual(8) for _ in range(3)))
    model = onefold.shard(blocks, stage=2, precision="bf16", units=(Residual,), bucket_bytes=256)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, state="bf16", lr=0.1, step_in_backward=True)
    optimizer.param_groups[0]["amsgrad"] = True
    found = []
    for call in (lambda: model(torch.ones(2, 8).bfloat16()).float().sum().backward(), optimizer.step):
        try:
            call()
            found.append("")
        except Exception as error:
            found.append(str(error))
        optimizer.param_groups[0]["amsgrad"] = False
    return found


def test_an_update_that_is_refused_in_backward_is_not_silently_left_out() -> None:
    [(backward, step)] = run_ranks(1, refused_in_backward)
    assert "take it back" in backward and "holds values of two steps; load a checkpoint" in step
