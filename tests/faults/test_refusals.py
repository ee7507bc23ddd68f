"""The table of refusals is what models do: in real situations exactly the calls in it are refused, with its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, optim

import onefold
from onefold.runtime.engine import engine_of
from onefold.runtime.refusals import REFUSALS, REFUSED_IN, Call, Situation
from onefold.runtime.scaled import scaled_backward
from onefold.runtime.situations import SITUATION_CHECKS
from onefold.train.run.tensor_parallel import parallelize
from tests.harness import run_ranks

S = Situation


class Tiny:
    """A tiny model whose parameters are sharded, and its optimizer."""

    def __init__(self, folder: str, name: str, precision: str = "fp32", in_backward: bool = False) -> None:
        self.folder, self.name = folder, name
        layers = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        layers[1].bias.requires_grad_(False)
        self.model = onefold.shard(layers, stage=3, precision=precision)
        self.optimizer = onefold.Optimizer(self.model, optim.SGD, lr=0.1, step_in_backward=in_backward)
        self.ema = onefold.EMA(self.model, 0.9)

    def loss(self) -> Any:
        return self.model(torch.ones(2, 4)).float().sum()


@contextmanager
def nothing(tiny: Tiny) -> Iterator[None]:
    yield


@contextmanager
def after_backward(tiny: Tiny) -> Iterator[None]:
    tiny.loss().backward()
    yield


@contextmanager
def in_full_parameters(tiny: Tiny) -> Iterator[None]:
    with onefold.full_parameters(tiny.model):
        yield


@contextmanager
def averaged(tiny: Tiny) -> Iterator[None]:
    with tiny.ema.applied():
        yield


@contextmanager
def accumulating(tiny: Tiny) -> Iterator[None]:
    with onefold.accumulate(tiny.model):
        yield


@contextmanager
def load_failed(tiny: Tiny) -> Iterator[None]:
    engine_of(tiny.model).mark_broken(S.LOAD_FAILED)
    yield


@contextmanager
def update_failed(tiny: Tiny) -> Iterator[None]:
    engine_of(tiny.model).mark_broken(S.UPDATE_FAILED, "unit 0")
    yield


@contextmanager
def clipped(tiny: Tiny) -> Iterator[None]:
    tiny.loss().backward()
    tiny.optimizer.clip_grad_norm(1.0)
    yield


@contextmanager
def other_scale(tiny: Tiny) -> Iterator[None]:
    with scaled_backward(4.0):
        tiny.loss().backward()
    yield


Enter = Callable[[Tiny], Any]
ALWAYS = {S.SHARDED}
UPDATES = ALWAYS | {S.UPDATES_IN_BACKWARD}
SITUATIONS: dict[str, tuple[Enter, str, bool, set[Situation]]] = {  # precision, step_in_backward, what holds then
    "nothing has happened": (nothing, "fp32", False, ALWAYS | {S.RELEASED, S.NO_GRADIENTS}),
    "after backward": (after_backward, "fp32", False, ALWAYS | {S.RELEASED, S.GRADIENTS_LEFT}),
    "full_parameters": (in_full_parameters, "fp32", False, ALWAYS | {S.IN_FULL_PARAMETERS, S.NO_GRADIENTS}),
    "averaged": (averaged, "bf16", False, ALWAYS | {S.RELEASED, S.AVERAGED, S.NO_GRADIENTS}),
    "accumulating": (accumulating, "fp32", False, ALWAYS | {S.RELEASED, S.ACCUMULATING, S.NO_GRADIENTS}),
    "load failed": (load_failed, "fp32", False, ALWAYS | {S.RELEASED, S.LOAD_FAILED, S.NO_GRADIENTS}),
    "update failed": (update_failed, "fp32", False, ALWAYS | {S.RELEASED, S.UPDATE_FAILED, S.NO_GRADIENTS}),
    "clipped": (clipped, "bf16", False, ALWAYS | {S.RELEASED, S.CLIPPED, S.GRADIENTS_LEFT}),
    "other scale": (other_scale, "fp32", False, ALWAYS | {S.RELEASED, S.OTHER_SCALE, S.GRADIENTS_LEFT}),
    "fp16": (nothing, "fp16", False, ALWAYS | {S.RELEASED, S.UNSCALED, S.NO_GRADIENTS}),
    "updates in backward": (nothing, "fp32", True, UPDATES | {S.RELEASED, S.NO_GRADIENTS}),
    "step awaited": (after_backward, "fp32", True, UPDATES | {S.RELEASED, S.STEP_AWAITED}),
    "updates in full_parameters": (
        in_full_parameters, "fp32", True, UPDATES | {S.IN_FULL_PARAMETERS, S.UPDATES_IN_FULL_PARAMETERS, S.NO_GRADIENTS}
    ),
}  # fmt: skip


def backward(tiny: Tiny) -> None:
    tiny.loss().backward()


def accumulate(tiny: Tiny) -> None:
    with onefold.accumulate(tiny.model):
        pass


def unshard(tiny: Tiny) -> None:
    with onefold.full_parameters(tiny.model):
        pass


def write(tiny: Tiny) -> None:
    with onefold.full_parameters(tiny.model, write=True):
        pass


def unfreeze(tiny: Tiny) -> None:
    bias = tiny.model[1].bias.requires_grad_(True)
    try:
        tiny.loss()
    except onefold.StateError:
        bias.requires_grad_(False)
        raise


CALLS: dict[Call, Callable[[Tiny], Any]] = {  # all that users call
    Call.FORWARD: Tiny.loss,
    Call.BACKWARD: backward,
    Call.CLIP: lambda tiny: tiny.optimizer.clip_grad_norm(1.0),
    Call.GRADIENTS: lambda tiny: onefold.grad_norms(tiny.model),
    Call.STEP: lambda tiny: tiny.optimizer.step(),
    Call.ZERO_GRAD: lambda tiny: tiny.optimizer.zero_grad(),
    Call.ACCUMULATE: accumulate,
    Call.FULL_PARAMETERS: unshard,
    Call.WRITE: write,
    Call.FULL_STATE_DICT: lambda tiny: onefold.full_state_dict(tiny.model),
    Call.STATE_DICT: lambda tiny: tiny.model.state_dict(),
    Call.SAVE: lambda tiny: onefold.save(f"{tiny.folder}/{tiny.name}", tiny.model, tiny.optimizer),
    Call.LOAD: lambda tiny: onefold.load(tiny.folder + "/first", tiny.model, tiny.optimizer),
    Call.LOAD_PART: lambda tiny: onefold.load(tiny.folder + "/first", tiny.model),
    Call.OPTIMIZER: lambda tiny: onefold.Optimizer(tiny.model, optim.SGD, lr=0.1),
    Call.APPLY: lambda tiny: tiny.ema.applied().__enter__(),
    Call.PARALLELIZE: lambda tiny: parallelize(tiny.model, onefold.mesh()),
    Call.UNFREEZE: unfreeze,
    Call.UNSHARD: lambda tiny: onefold.unshard(tiny.model),
}


def said(call: Call, tiny: Tiny) -> str:
    try:
        CALLS[call](tiny)
    except onefold.StateError as error:
        return str(error).removeprefix("rank 0: ")  # save() and load() agree first on who raises
    return ""


def tried(folder: str) -> dict[tuple[str, Call], str]:
    first, found = Tiny(folder, "first"), {}
    onefold.save(folder + "/first", first.model, first.optimizer)
    for name, (enter, precision, in_backward, _) in SITUATIONS.items():
        calls = list(CALLS)
        while calls:
            tiny = Tiny(folder, name, precision, in_backward)
            with enter(tiny):
                while calls:
                    call = calls.pop(0)
                    found[name, call] = said(call, tiny)
                    if not found[name, call] or call is Call.BACKWARD:  # else the model is as it was
                        break
    for call in (Call.SAVE, Call.LOAD):
        tiny = Tiny(folder, "in backward")
        loss = tiny.loss()
        loss.register_hook(lambda _, call=call, tiny=tiny: found.update({("in backward", call): said(call, tiny)}))
        loss.backward()
    return found


def wanted(call: Call, holds: set[Situation]) -> str:
    """The text of the first situation that holds, of the model before the caller's; "" if the call is allowed."""
    calls = {Call.LOAD_PART: (Call.LOAD, Call.LOAD_PART), Call.BACKWARD: (Call.FORWARD, Call.BACKWARD)}
    calls[Call.WRITE] = (Call.FULL_PARAMETERS, Call.WRITE)
    calls[Call.UNFREEZE] = (Call.FORWARD, Call.UNFREEZE)
    pairs = [(one, situation) for one in calls.get(call, (call,)) for situation in REFUSED_IN[one]]
    refused = sorted((pair for pair in pairs if pair[1] in holds), key=lambda pair: pair[1] not in SITUATION_CHECKS)
    return REFUSALS[refused[0]].format(unit="unit 0", before=4.0, now=1.0) if refused else ""


def test_exactly_the_calls_of_the_table_are_refused_in_real_situations(tmp_path) -> None:
    expected = {(name, call): wanted(call, row[3]) for name, row in SITUATIONS.items() for call in CALLS}
    expected |= {("in backward", call): wanted(call, {S.IN_BACKWARD}) for call in (Call.SAVE, Call.LOAD)}
    for found in run_ranks(2, tried, str(tmp_path)):
        assert {pair: text for pair, text in found.items() if text != expected[pair]} == {}
        assert set(found) == set(expected)
