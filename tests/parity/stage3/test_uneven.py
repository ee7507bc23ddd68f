"""With schedule="negotiate", ranks may run unequal numbers of forwards, and in any order of blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold.runtime.engine import engine_of
from tests.harness import RankFailure, run_ranks
from tests.models import DIM, Adapter, blocks
from tests.parity.stage3.compare import Case, assert_equal, batch, differences, equal
from tests.parity.stage3.test_branches import chain

NEGOTIATED: dict[str, Any] = {"schedule": "negotiate", "bucket_bytes": 1 << 12}


def generate(model: nn.Module, tokens: int) -> Tensor:
    """A loop whose length only this rank knows."""
    x = batch(0)
    with torch.no_grad():
        for _ in range(tokens):
            x = torch.tanh(model(x))
    return x


def generate_unevenly(patience_s: float = 8.0, **fields: Any) -> tuple[bool, int]:
    """Whether the result is that of the plain model; and bytes this rank sent for others' and its own forwards."""
    torch.manual_seed(0)
    plain = nn.Sequential(*blocks(3))
    torch.manual_seed(0)
    model = onefold.shard(nn.Sequential(*blocks(3)), stage=3, timeout_s=patience_s, **fields)
    meter = engine_of(model).comm.meter
    meter.cut()
    tokens = 2 + 3 * dist.get_rank()
    found = generate(model, tokens)
    onefold.catch_up(model)
    dist.barrier()  # a collective of the user's own
    sent = sum(flow.sent_bytes for (purpose, _), flow in meter.running.items() if purpose == "gather-forward")
    return equal(found, generate(plain, tokens)), sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_rank_may_generate_as_long_as_it_likes(ranks: int) -> None:
    found = run_ranks(ranks, generate_unevenly, **NEGOTIATED)
    assert all(right for right, _ in found)
    if ranks == 2:  # each rank's shard of the model goes to the peer once for every forward of the peer
        assert found[0][1] * 2 == found[1][1] * 5


def test_without_it_a_forward_more_on_one_rank_is_a_named_error() -> None:
    with pytest.raises(RankFailure, match=r"CommError: rank 1: gather-forward of .*negotiate"):
        run_ranks(2, generate_unevenly, 1.0, bucket_bytes=1 << 12)


def several(model: nn.Module, step: int) -> Tensor:
    """One loss of more forwards on higher ranks."""
    loss = torch.zeros(())
    for micro in range(1 + (dist.get_rank() + step) % 3):
        loss = loss + model(batch(step, micro=micro)).square().mean()
    loss.backward()
    return loss


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_uneven_forwards_under_one_loss_train_to_the_bits_of_stage_0(ranks: int) -> None:
    assert_equal(ranks, uneven)


def uneven() -> list[str]:
    return differences(
        Case(lambda: nn.Sequential(nn.Linear(DIM, DIM), *blocks(3), nn.Linear(DIM, 2)), several), **NEGOTIATED
    )


def chosen(step: int, rank: int) -> list[int]:
    return torch.randint(0, 4, (1 + 2 * rank,), generator=torch.Generator().manual_seed(10 * step + rank)).tolist()


def routed(model: nn.Module, step: int) -> Tensor:
    model.step = step
    return several(model, step)


def wandering() -> list[str]:
    return differences(Case(lambda: chain(chosen), routed), **NEGOTIATED)


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_forwards_may_take_blocks_in_any_order_and_number(ranks: int) -> None:
    assert_equal(ranks, wandering)


def read_after_uneven() -> bool:
    """full_parameters and full_state_dict wait for those that still run."""
    torch.manual_seed(0)
    model = onefold.shard(nn.Sequential(*blocks(3)), stage=3, **NEGOTIATED)
    generate(model, 1 + dist.get_rank())
    state = onefold.full_state_dict(model)
    generate(model, 3 - dist.get_rank())
    with onefold.full_parameters(model):
        whole = {name: p.detach().clone() for name, p in model.named_parameters()}
    return all(equal(state[name], value) for name, value in whole.items()) if dist.get_rank() == 0 else not state


def test_whole_parameters_wait_for_ranks_that_still_run() -> None:
    assert run_ranks(2, read_after_uneven) == [True, True]


def adapted() -> list[str]:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, DIM), Adapter(), Adapter(), Adapter(), nn.Linear(DIM, 2))

    return differences(Case(build, several), **NEGOTIATED)


@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_forwards_work_with_frozen_layers(ranks: int) -> None:
    assert_equal(ranks, adapted)


def step_waits() -> bool:
    model = onefold.shard(nn.Sequential(*blocks(3)), stage=3, timeout_s=8.0, **NEGOTIATED)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)
    model(batch(0)).square().mean().backward()
    generate(model, 2 - dist.get_rank())
    adam.clip_grad_norm(1.0)
    generate(model, 1 + dist.get_rank())
    adam.step()
    return adam.stepped


def test_clipping_and_step_wait_for_ranks_that_still_run() -> None:
    assert run_ranks(2, step_waits) == [True, True]
