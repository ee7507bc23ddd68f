"""torch.compile and sharded models: what is compiled is what runs, equal blocks share a graph, and the bits stay."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters

import onefold
from onefold.activations import automatic
from tests.harness import run_ranks, run_ranks_raises
from tests.models import DIM, Residual, Stack, blocks
from tests.parity.stage3.compare import batch, equal

LAYERS, STEPS = 9, 3  # more blocks than torch compiles versions of one function


class Counting:
    """A backend that counts the graphs of blocks (those with a tanh) and their runs; `inner` compiles them."""

    def __init__(self, inner: str = "eager") -> None:
        self.graphs = self.runs = 0
        self._inner = inner

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled = lookup_backend(self._inner)(graph, inputs)
        if "tanh" not in graph.code:
            return compiled
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return compiled(*args)

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


def model_used(model: nn.Module, backend: Counting) -> nn.Module:
    """Compiled and run, before any hook is there."""
    model.compile(backend=backend)
    model(torch.ones(3, DIM))
    backend.graphs = backend.runs = 0
    return model


FIELD = "shard(compile=…)"
AFTER = {
    "block.forward": forwards,
    "block.compile()": blocks_compile,
    "torch.compile(block)": wrapped,
    "model.compile()": model_compile,
    "torch.compile(model)": compiled_model,
}
BEFORE = {
    "block.forward before": forwards,
    "torch.compile(block) before": wrapped,
    "block.compile() before": blocks_compile,
    "model.compile() before": model_compile,
    "torch.compile(model) before": compiled_model,
    "model.compile() and a forward before": model_used,
}


class Trained(NamedTuple):
    losses: list[Tensor]
    params: dict[str, Tensor]
    counting: Counting
    frames: list[int]  # that torch.compile has looked at, after each step


def trained(way: str, inner: str = "eager", layers: int = LAYERS, **fields: Any) -> Trained:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(7)
    counting, frames = Counting(inner), []
    model: nn.Module = Stack(blocks(layers), nn.Linear(DIM, 3), nn.Linear(DIM, DIM))
    model = BEFORE[way](model, counting) if way in BEFORE else model
    fields = {**fields, "compile": {"backend": counting}} if way == FIELD else fields
    sharded = onefold.shard(model, bucket_bytes=1 << 14, timeout_s=20.0, **fields)
    optimizer = onefold.Optimizer(sharded, torch.optim.SGD, lr=0.1)
    called = AFTER[way](sharded, counting) if way in AFTER else sharded
    losses = []
    for step in range(STEPS):
        loss = called(batch(step)).square().mean()
        optimizer.backward(loss)
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
        frames.append(counters["frames"]["total"])
    state = onefold.full_state_dict(sharded)
    return Trained(losses, {name.replace("_orig_mod.", ""): value for name, value in state.items()}, counting, frames)


def same_bits(one: Trained, other: Trained) -> bool:
    same = all(map(equal, one.losses, other.losses)) and one.params.keys() == other.params.keys()
    return same and all(equal(one.params[name], other.params[name]) for name in one.params)


class Found(NamedTuple):
    """Of one way to compile."""

    same: bool  # the bits are those of stage 0 without
    graphs: int  # of blocks
    runs: int  # of these graphs
    steady: bool  # nothing was compiled after the second step


def compare(ways: list[str], fields: dict[str, Any]) -> dict[str, Found]:
    plain = trained("", stage=0)
    found = {}
    for way in ways:
        one = trained(way, **fields)
        found[way] = Found(
            same_bits(plain, one), one.counting.graphs, one.counting.runs, one.frames[1] == one.frames[-1]
        )
    return found


FEW = [FIELD, "model.compile() and a forward before"]


@pytest.mark.parametrize(("stage", "ways"), [(2, FEW), (3, [FIELD, *AFTER]), (3, list(BEFORE))])
def test_compiled_blocks_are_used_and_share_a_graph(stage: int, ways: list[str]) -> None:
    for found in run_ranks(2, compare, ways, {"stage": stage}):
        for way, one in found.items():
            whole = stage == 2 and "model" in way  # is one graph
            assert one == Found(True, 1, STEPS * (1 if whole else LAYERS), True), way


@pytest.mark.parametrize(
    ("stage", "policy", "ways"),
    [
        (2, "checkpoint", FEW),
        (3, "checkpoint", [*list(AFTER)[1:4], *list(BEFORE)[1:3]]),
        (3, "checkpoint+host", [FIELD, "torch.compile(model)"]),
    ],
)
def test_recomputed_blocks_are_compiled_in_forward_and_in_backward(stage: int, policy: str, ways: list[str]) -> None:
    for found in run_ranks(2, compare, ways, {"stage": stage, "activations": policy}):
        assert found == {way: Found(True, 1, 2 * STEPS * LAYERS, True) for way in ways}


def decided(ways: list[str], room: int) -> dict[str, Found]:
    """With activations="auto" and so much room for blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic, "room_left", lambda *_, **__: room)
        return compare(ways, {"stage": 3, "activations": "auto"})


@pytest.mark.parametrize(("room", "again"), [(1 << 30, 0), (8000, 2 * STEPS - 1)], ids=["keep", "checkpoint of 2"])
def test_blocks_are_compiled_whatever_becomes_of_activations(room: int, again: int) -> None:
    ways = ["torch.compile(model)", "block.compile() before"]
    for found in run_ranks(2, decided, ways[: 1 + bool(again)], room):
        for way, one in found.items():  # the first block of all decides, and keeps its activations
            assert one == Found(True, one.graphs, STEPS * LAYERS + again, True), way
            assert one.graphs <= 2


EVERY = [  # a stage, and what else may differ between runs whose bits are the same
    (0, {}),
    (1, {"activations": "checkpoint"}),
    (2, {"offload": "host"}),
    (3, {"activations": "checkpoint+host"}),
    (3, {"activations": "checkpoint", "offload": onefold.Offload(optimizer="host", parameters="host")}),
]


def bits(precision: str, inner: str, which: list[int]) -> list[tuple[bool, int, bool]]:
    runs = [trained(FIELD, inner, 3, stage=EVERY[i][0], precision=precision, **EVERY[i][1]) for i in which]
    return [(same_bits(runs[0], one), one.counting.runs, one.frames[1] == one.frames[-1]) for one in runs]


@pytest.mark.parametrize(
    ("precision", "inner", "which"),
    [
        ("fp32", "aot_eager", [0, 1, 2, 3, 4]),
        ("bf16", "aot_eager", [0, 4]),
        ("fp16", "aot_eager", [2, 3]),
        pytest.param("bf16", "inductor", [0, 1, 2, 3, 4], marks=pytest.mark.soak),
    ],
)
def test_the_same_compiled_blocks_give_the_same_bits_at_every_stage(
    precision: str, inner: str, which: list[int]
) -> None:
    wanted = [(True, STEPS * 3 * (2 if "activations" in EVERY[i][1] else 1), True) for i in which]
    assert run_ranks(2, bits, precision, inner, which) == [wanted] * 2


def split(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


def refused(given: Any, model: Callable[[], nn.Module]) -> str:
    try:
        sharded = onefold.shard(model(), stage=3, compile=given, timeout_s=20.0)
        sharded(torch.ones(3, DIM))
    except onefold.errors.OnefoldError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def stack() -> nn.Module:
    return Stack(blocks(2))


def breaking() -> nn.Module:
    return Stack(nn.ModuleList(Residual(activation=split) for _ in range(2)))


def lone() -> nn.Module:
    return nn.Linear(DIM, DIM)


REFUSED = [
    ("yes", stack, r"ConfigError: compile='yes' is neither True, False nor a mapping of torch.compile's options; use"),
    ({"fulgraph": 1}, stack, r"ConfigError: compile= has 'fulgraph', no option of torch.compile; known are backend, "),
    ({"backend": "x"}, stack, r"ConfigError: torch.compile refuses compile={'backend': 'x'}: .*'x'"),
    (True, lone, r"ConfigError: compile= compiles blocks, and this model has none: .* torch.compile\(model\)"),
    ({"fullgraph": True, "backend": "eager"}, breaking,
     r"ModelError: torch.compile cannot compile layers.0 \(Residual\): .*; change the block, or leave out fullgraph="),
    ({"backend": "eager"}, breaking, "nothing was refused"),
]  # fmt: skip


def all_refused() -> list[str]:
    return [refused(given, model) for given, model, _ in REFUSED]


def test_what_cannot_be_compiled_is_one_message() -> None:
    for said in run_ranks(2, all_refused):
        for one, (_, _, pattern) in zip(said, REFUSED, strict=True):
            assert re.match(pattern, one), one


def ranks_differ() -> None:
    onefold.shard(stack(), compile={"dynamic": dist.get_rank() == 0})


def test_ranks_that_compile_differently_are_told() -> None:
    for error in run_ranks_raises(2, ranks_differ):
        assert "compile: {'dynamic': True}" in str(error) and "compile: {'dynamic': False}" in str(error)


def taken_off() -> list[Any]:
    """A copy of a compiled block is plain, compile() replaces compile=, and unshard() takes off what compile= added."""
    counting, other = Counting(), Counting()
    model = onefold.shard(stack(), stage=2, compile={"backend": counting})
    x = torch.ones(3, DIM)
    copy.deepcopy(model.layers[0])(x)
    copied = counting.runs
    for block in model.layers:
        block.compile(backend=other)
    model(x)
    replaced = (counting.runs, other.runs)
    for block in model.layers:
        del block.forward
    model = onefold.shard(onefold.unshard(model), stage=2, compile={"backend": counting})
    onefold.unshard(model)(x)
    return [
        copied,
        replaced,
        counting.runs,
        sorted(vars(model.layers[0]).keys() & {"forward", "compile", "_call_impl"}),
    ]


def test_what_compile_added_is_taken_off() -> None:
    assert run_ranks(1, taken_off) == [[0, (0, 2), 0, []]]


def after_memory_was_counted() -> list[int]:
    """Runs of graphs in a step whose memory is counted, and in the one after it: by track_memory(), in the first steps
    of an automatic placement on a CPU."""
    found = []
    for offload in (None, onefold.Offload(optimizer="auto", device_bytes=10_000_000)):
        for made in ({"compile": True}, {}):
            counting = Counting()
            fields = {"compile": {"backend": counting}} if made else {}
            model = onefold.shard(stack(), stage=3, offload=offload, **fields)
            if not made:
                blocks_compile(model, counting)
            optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
            with onefold.track_memory(model):
                for _ in range(2):
                    model(torch.ones(3, DIM)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(counting.runs)
            model(torch.ones(3, DIM)).square().mean().backward()
            found.append(counting.runs)
    return found


def test_compiled_blocks_run_after_steps_whose_memory_was_counted() -> None:
    runs = run_ranks(1, after_memory_was_counted)[0]
    assert runs[::2] == [0] * 4 and min(runs[1::2]) > 0


def after_modes_that_cross() -> int:
    """Runs of a graph after the memory of two models was counted, of which the first ended first."""
    counting = Counting()
    compiled = torch.compile(torch.tanh, backend=counting)
    first, second = (onefold.track_memory(onefold.shard(stack(), stage=3)) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    compiled(torch.ones(1, DIM))
    return counting.runs


def test_compiled_code_runs_after_counts_that_ended_in_another_order() -> None:
    assert run_ranks(1, after_modes_that_cross) == [1]
