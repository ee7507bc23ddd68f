"""torch.compile and sharded models: what is compiled is what runs, equal blocks share a graph, and the bits stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks
from tests.models import DIM, Stack, blocks
from tests.parity.stage3.compare import batch, equal

LAYERS, STEPS = 12, 2  # more blocks than torch compiles versions of one function


class Counting:
    """A backend that compiles nothing, and counts the graphs of blocks (those with a tanh) and their runs."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        if "tanh" not in graph.code:
            return graph.forward
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


def forwards(model: nn.Module, backend: Counting) -> nn.Module:
    for block in model.layers:
        block.forward = torch.compile(block.forward, backend=backend)
    return model


def wrapped(model: nn.Module, backend: Counting) -> nn.Module:
    for index, block in enumerate(model.layers):
        model.layers[index] = torch.compile(block, backend=backend)
    return model


def blocks_compile(model: nn.Module, backend: Counting) -> nn.Module:
    for block in model.layers:
        block.compile(backend=backend)
    return model


def model_compile(model: nn.Module, backend: Counting) -> nn.Module:
    model.compile(backend=backend)
    return model


def compiled_model(model: nn.Module, backend: Counting) -> nn.Module:
    return torch.compile(model, backend=backend)


AFTER = {
    "block.forward": forwards,
    "block.compile()": blocks_compile,
    "model.compile()": model_compile,
    "torch.compile(model)": compiled_model,
}
BEFORE = {
    "block.forward before": forwards,
    "torch.compile(block) before": wrapped,
    "block.compile() before": blocks_compile,
    "model.compile() before": model_compile,
}


def trained(way: str, **fields: Any) -> tuple[list[Tensor], dict[str, Tensor], Counting]:
    torch._dynamo.reset()
    torch.manual_seed(7)
    counting = Counting()
    model: nn.Module = Stack(blocks(LAYERS), nn.Linear(DIM, 3), nn.Linear(DIM, DIM))
    model = BEFORE[way](model, counting) if way in BEFORE else model
    sharded = onefold.shard(model, bucket_bytes=1 << 14, timeout_s=20.0, **fields)
    optimizer = onefold.Optimizer(sharded, torch.optim.SGD, lr=0.1)
    called = AFTER[way](sharded, counting) if way in AFTER else sharded
    losses = []
    for step in range(STEPS):
        loss = called(batch(step)).square().mean()
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    state = onefold.full_state_dict(sharded)
    return losses, {name.replace("_orig_mod.", ""): value for name, value in state.items()}, counting


def compare(ways: list[str], fields: dict[str, Any]) -> dict[str, tuple[bool, int, int]]:
    """Per way to compile: whether the bits are those of stage 0 without, graphs of blocks, and their runs."""
    losses, params, _ = trained("", stage=0)
    found = {}
    for way in ways:
        others, theirs, counting = trained(way, **fields)
        same = all(map(equal, losses, others)) and all(equal(params[name], theirs[name]) for name in theirs)
        found[way] = (same and params.keys() == theirs.keys(), counting.graphs, counting.runs)
    return found


@pytest.mark.parametrize("ways", [list(AFTER), list(BEFORE)], ids=["after", "before"])
@pytest.mark.parametrize("stage", [2, 3])
def test_compiled_blocks_are_used_and_share_a_graph(stage: int, ways: list[str]) -> None:
    for found in run_ranks(2, compare, ways, {"stage": stage}, timeout_s=120):
        runs = STEPS * LAYERS
        if stage == 3:
            assert found == {way: (True, 1, runs) for way in ways}
        else:  # a whole model is one graph, or few
            assert all(same and graphs >= 1 for same, graphs, _ in found.values())


@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_blocks_are_compiled(stage: int) -> None:
    ways = ["block.forward", "block.compile()", *list(BEFORE)[:3]]
    for found in run_ranks(2, compare, ways, {"stage": stage, "activations": "checkpoint"}, timeout_s=120):
        assert found == {way: (True, found[way][1], 2 * STEPS * LAYERS) for way in ways}
        assert all(graphs <= 2 for _, graphs, _ in found.values())


def compiled_whole(stage: int) -> list[bool]:
    """shard(torch.compile(model)) trains as shard(model) does."""
    torch._dynamo.reset()
    finals = []
    for wrap in (False, True):
        torch.manual_seed(7)
        model: nn.Module = Stack(blocks(2), nn.Linear(DIM, 3))
        model = torch.compile(model, backend="eager") if wrap else model
        model = onefold.shard(model, stage=stage, timeout_s=20.0)
        optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
        for step in range(STEPS):
            model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with onefold.full_parameters(model):
            finals.append([param.detach().clone() for param in model.parameters()])
    return [equal(a, b) for a, b in zip(*finals, strict=True)]


def test_a_compiled_model_can_be_sharded() -> None:
    for stage in (2, 3):
        assert all(map(all, run_ranks(2, compiled_whole, stage)))
