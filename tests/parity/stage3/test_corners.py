"""What users do at the edges of stage 3: it works, or an error names what went wrong; nothing is lost silently."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.comm.communicator import Comm
from onefold.comm.endpoint import Pending
from onefold.runtime.engine import engine_of
from tests.harness import fresh_ranks, run_ranks
from tests.harness.patience import PATIENCE_S
from tests.harness.python import start_python
from tests.models import (
    DIM,
    Chain,
    Clamping,
    EachCheckpointed,
    Gained,
    Outer,
    Positions,
    SkippingOne,
    TwoNames,
    Warming,
    blocks,
)
from tests.parity.stage3.compare import Case, assert_equal, batch, differences


def sharded(model: nn.Module, **fields: Any) -> tuple[nn.Module, onefold.Optimizer]:
    model = onefold.shard(model, **{"stage": 3, "bucket_bytes": 1 << 12, "timeout_s": 8.0, **fields})
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)


def learn(model: nn.Module, adam: onefold.Optimizer, step: int = 0) -> float:
    loss = model(batch(step)).square().mean()
    loss.backward()
    adam.step()
    adam.zero_grad()
    return loss.item()


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


# -- parameters ----------------------------------------------------------------------------------------------------


def swap_data() -> list[str]:
    def swap(model: nn.Module) -> None:
        for param in model.parameters():
            param.data = torch.zeros(param.shape)

    found = []
    for use in (lambda m: m(batch(0)), onefold.full_state_dict, lambda m: onefold.full_parameters(m).__enter__()):
        model, _ = sharded(Gained(), timeout_s=0.5)
        swap(model)
        with torch.no_grad():
            found.append(said(lambda use=use, model=model: use(model)))
    return found


def test_data_put_in_place_of_a_released_parameter_is_refused_by_whoever_uses_it_first() -> None:
    for outcome in fresh_ranks(2, swap_data):
        assert all("StateError" in text and "left the flat buffer" in text for text in outcome.value), outcome.value


def write_in_forward() -> list[str]:
    tokens = torch.arange(10)
    shrinking = nn.Sequential(nn.Embedding(20, DIM, max_norm=0.1), nn.Linear(DIM, 3), nn.Linear(3, 3))
    model, _ = sharded(Clamping(blocks(2), nn.Linear(DIM, 2)))
    words, _ = sharded(shrinking, bucket_bytes=1)
    return [said(lambda: model(batch(0))), said(lambda: words(tokens))]


def test_a_write_to_a_gathered_parameter_is_an_error_that_names_it() -> None:
    for outcome in fresh_ranks(2, write_in_forward):
        assert "layers.0.up.weight was written" in outcome.value[0]
        assert "0.weight was written" in outcome.value[1] and "max_norm" in outcome.value[1]


def keep_state() -> float:
    model, _ = sharded(Gained())
    with onefold.full_parameters(model):
        state = model.state_dict()
    return sum(float(value.sum()) for value in state.values())


def test_a_state_dict_taken_inside_full_parameters_outlives_it() -> None:
    first, second = fresh_ranks(2, keep_state)
    assert first.exitcode == second.exitcode == 0 and first.value == second.value, first.error


def step_inside() -> str:
    model, adam = sharded(Gained())

    def inside() -> None:
        with onefold.full_parameters(model):
            learn(model, adam)

    return said(inside)


def test_a_step_inside_full_parameters_is_refused() -> None:
    assert all("StateError" in text and "full_parameters" in text for text in run_ranks(2, step_inside))


def save_all() -> str:
    model, _ = sharded(TwoNames())
    state = onefold.full_state_dict(model)
    return said(lambda: TwoNames().load_state_dict(state)) if dist.get_rank() == 0 else "nothing"


def test_a_full_state_dict_has_every_key() -> None:
    assert run_ranks(2, save_all) == ["nothing", "nothing"]


# -- parts, objects, errors ----------------------------------------------------------------------------------------


def by_part(model: nn.Module, step: int) -> Tensor:
    loss = model.inner(batch(step)).square().mean()
    loss.backward()
    return loss


def part_with_a_parameter() -> list[str]:
    return differences(Case(Outer, by_part))


def boxed() -> list[str]:
    return differences(Case(lambda: Positions(boxed=True)), bucket_bytes=1 << 10)


@pytest.mark.parametrize("case", [part_with_a_parameter, boxed])
def test_parts_by_themselves_and_views_in_unknown_objects_train_to_the_same_bits(case: Any) -> None:
    assert_equal(2, case)


def go_on_after_errors() -> list[str]:
    """The model is as good as before after errors in forward that came before it began."""
    model, adam = sharded(Gained())
    old, model.head.weight = model.head.weight, nn.Parameter(torch.ones(2, DIM))
    found = [said(lambda: model(batch(0)))]
    model.head.weight = old
    handle = model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
    found.append(said(lambda: model(batch(0))))
    handle.remove()
    learn(model, adam)
    return found


def test_training_goes_on_after_a_forward_that_never_began() -> None:
    for first, second in run_ranks(2, go_on_after_errors):
        assert "StateError: head.weight was added" in first and "ZeroDivisionError" in second


def change_saved(stage: int) -> str:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.sigmoid(self.first(x))
            z = self.last(y)
            y.mul_(0)
            return z

    model, adam = sharded(Changing(), stage=stage)
    return said(lambda: learn(model, adam))


def test_a_saved_activation_that_was_changed_is_found_at_every_stage() -> None:
    for stage in (0, 3):
        for outcome in fresh_ranks(2, change_saved, stage):
            assert "modified by an inplace operation" in outcome.value


# -- orders, penalties, memory -------------------------------------------------------------------------------------


def shuffled(step: int, rank: int) -> list[int]:
    return torch.randperm(8, generator=torch.Generator().manual_seed(7 * step + rank)).tolist()


def reorder(model: nn.Module, step: int) -> Tensor:
    model.step = step
    loss = model(batch(step)).square().mean()
    loss.backward()
    return loss


def reordered(prefetch: int) -> list[str]:
    return differences(Case(lambda: Chain(shuffled, blocks(8)), reorder), bucket_bytes=1 << 20, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_every_rank_may_take_blocks_in_an_order_of_its_own(prefetch: int) -> None:
    assert_equal(2, reordered, prefetch)


def penalise(model: nn.Module, step: int) -> Tensor:
    x = batch(step).requires_grad_()
    y = model(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    loss = y.square().mean() + slope.square().sum()
    loss.backward()
    return loss


def warm_up(model: nn.Module, step: int) -> Tensor:
    """The blocks learn from the second step on."""
    with torch.no_grad() if step == 0 else torch.enable_grad():
        x = batch(step)
    model.frozen_now = step == 0
    loss = model(x).square().mean()
    loss.backward()
    return loss


def skipped(which: str) -> list[str]:
    return differences(Case(SkippingOne, penalise) if which == "penalty" else Case(Warming, warm_up))


@pytest.mark.parametrize("which", ["penalty", "warm-up"])
def test_skips_that_differ_by_rank_work_with_penalties_and_warm_ups(which: str) -> None:
    assert_equal(2, skipped, which)


def peak(mode: bool | None) -> tuple[float, int]:
    """Whole parameters at the fullest instant, in units; and what is left of them after backward."""
    model, adam = sharded(EachCheckpointed(blocks(12, 64), mode), bucket_bytes=1 << 20)
    unit = max(u.layout.numel * 4 for u in engine_of(model).units)
    for _ in range(3):
        with onefold.track_memory(model) as tracker:
            model(torch.randn(2, 64, requires_grad=True)).sum().backward()
            report = onefold.memory(model).parameters
            adam.step()
            adam.zero_grad()
    return (tracker.peak()["parameters"] - report.planned) / unit, report.measured - report.planned


@pytest.mark.parametrize("mode", [None, False, True])
def test_recomputed_units_are_released_as_backward_leaves_them(mode: bool | None) -> None:
    for units, left in run_ranks(2, peak, mode):
        assert units <= 3 and left == 0


SLOW_PEER = """
import sys, torch, torch.distributed as dist, onefold
from torch import nn
onefold.init()
def run():
    model = onefold.shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), stage=3, bucket_bytes=1, prefetch=0)
    if dist.get_rank() == 1:  # does not go on before its peer has come to the end of its script
        model[1].register_forward_pre_hook(lambda *_: sys.stdin.readline() and None)
    with torch.no_grad():
        model(torch.ones(1, 8))
    return model if "hold" in sys.argv else None
model = run()
print("done", flush=True)
"""


@pytest.mark.parametrize("argument", ["hold", pytest.param("drop", marks=pytest.mark.soak)])
def test_a_rank_may_end_before_its_peers_have_run_their_last_forward(argument: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        pipe = subprocess.PIPE
        ranks.append(start_python("-c", SLOW_PEER, argument, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
    try:
        assert ranks[0].stdout.readline() == "done\n"
        out, err = ranks[1].communicate("go on\n", timeout=PATIENCE_S)
        assert (ranks[1].returncode, out) == (0, "done\n"), err
        assert ranks[0].wait(timeout=PATIENCE_S) == 0
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


class Posted:
    """A shard that was posted, until somebody has waited for its peers to take it."""

    open = 0

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        Posted.open += 1

    def wait(self) -> None:
        self.pending.wait()
        Posted.open -= 1


def grow() -> list[int]:
    """How many posted shards nobody has waited for, after each of three rounds."""
    model, adam = sharded(Gained())
    counts, post_shard = [], Comm.post_shard
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Comm, "post_shard", lambda *args: Posted(post_shard(*args)))
        patch.setattr(Posted, "open", 0)
        for step in range(3):
            for _ in range(20):
                model.layers[0](batch(0))
                with onefold.full_parameters(model):
                    pass
            learn(model, adam, step) if step == 0 else None
            counts.append(Posted.open)
    return counts


def test_posted_shards_do_not_pile_up_between_steps() -> None:
    for counts in run_ranks(2, grow):
        assert 0 < max(counts) <= 2 * 6, counts
