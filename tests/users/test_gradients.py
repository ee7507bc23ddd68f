"""Reduced gradients for those who read or change them: value clipping, noise, norms by layer, hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import run_ranks
from tests.models import Stack, blocks

DIM, RANKS, LIMIT = 16, 2, 0.02
Training = tuple[nn.Module, onefold.Optimizer]


def built() -> Stack:
    torch.manual_seed(5)
    return Stack(blocks(2, DIM), nn.Linear(DIM, 4))


def sharded(stage: int, precision: str = "fp32", offload: str | None = None) -> Training:
    tier = onefold.Offload(optimizer=offload) if offload else None
    model = onefold.shard(built(), stage=stage, precision=precision, offload=tier)
    return model, onefold.Optimizer(model, torch.optim.SGD, lr=0.5, momentum=0.9)


def batch(step: int) -> Tensor:
    seed = 10 * step + torch.distributed.get_rank()
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(seed))


def clip_values(model: nn.Module, optimizer: onefold.Optimizer) -> None:
    for _, piece in optimizer.gradients():
        piece.clamp_(-LIMIT, LIMIT)


def noisy(model: nn.Module, optimizer: onefold.Optimizer) -> None:
    """Every rank draws for itself: replicas must not drift apart."""
    for _, piece in optimizer.gradients():
        piece.add_(torch.randn(piece.shape, dtype=piece.dtype) * 0.01)


def clipped_twice(model: nn.Module, optimizer: onefold.Optimizer) -> None:
    optimizer.clip_grad_norm(0.3)
    clip_values(model, optimizer)


def clipped_by_hand(model: nn.Module, optimizer: onefold.Optimizer) -> None:
    clip_values(model, optimizer)
    optimizer.clip_grad_norm(0.05)


def clipped_after(model: nn.Module, optimizer: onefold.Optimizer) -> None:
    optimizer.clip_grad_norm(0.05)


def trained(start: Training, change: Callable[[nn.Module, onefold.Optimizer], None]) -> dict[str, Tensor]:
    model, optimizer = start
    torch.manual_seed(torch.distributed.get_rank())
    for step in range(3):
        model(batch(step)).float().square().sum().backward()
        change(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with onefold.full_parameters(model):
        values = torch.cat([param.detach().float().flatten() for param in model.parameters()])
    every = [torch.empty_like(values) for _ in range(RANKS)]
    torch.distributed.all_gather(every, values)
    assert torch.equal(every[0], every[1])
    return onefold.full_state_dict(model)


def ddp() -> dict[str, Tensor]:
    model = nn.parallel.DistributedDataParallel(built())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(3):
        model(batch(step)).square().sum().backward()
        nn.utils.clip_grad_value_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.module.state_dict().items()}


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, theirs[name]) for name, value in ours.items())


def written_gradients() -> None:
    for stage in range(4):
        assert same(trained(sharded(stage), clip_values), ddp()), stage
    for precision in ("fp32", "bf16"):
        for change in (noisy, clipped_twice):
            wanted = trained(sharded(0, precision), change)
            for stage, tier in ((1, None), (2, None), (3, None), (3, "host")):
                assert same(trained(sharded(stage, precision, tier), change), wanted), (stage, precision, change)


def test_what_is_written_to_pieces_of_gradients_is_what_step_uses_to_the_bits_of_ddp() -> None:
    run_ranks(RANKS, written_gradients)


def hooked() -> None:
    for stage in range(4):
        model, optimizer = sharded(stage)
        seen: list[str] = []

        def hook(name: str, piece: Tensor, seen: list[str] = seen) -> None:
            seen.append(name)
            piece.clamp_(-LIMIT, LIMIT)

        handle = optimizer.register_gradient_hook(hook)
        twin = sharded(stage)
        wanted = trained(twin, clipped_by_hand)
        assert same(trained((model, optimizer), clipped_after), wanted)
        named = [name for name, _ in model.named_parameters()]
        assert set(seen) <= set(named) and len(seen) == 3 * len(set(seen))
        model(batch(9)).square().sum().backward()
        norms = onefold.grad_norms(model, norm_type=math.inf)  # of gradients as step() will use them
        assert float(max(norms.values())) <= LIMIT
        optimizer.zero_grad()
        del seen[-len(set(seen)) :]
        handle.remove()
        trained((model, optimizer), lambda m, o: None)
        assert len(seen) == 3 * len(set(seen))


def test_a_hook_sees_each_piece_once_per_step_before_it_is_clipped() -> None:
    run_ranks(RANKS, hooked)


def norms(stage: int, precision: str, clip: float | None) -> list[dict[str, Tensor]]:
    model, optimizer = sharded(stage, precision)
    model(batch(0)).float().square().sum().backward()
    total = optimizer.clip_grad_norm(clip) if clip else None
    found = [onefold.grad_norms(model), onefold.grad_norms(model, by="block"), onefold.grad_norms(model, float("inf"))]
    if total is not None:
        every = torch.stack(list(found[0].values())).double().square().sum().sqrt()
        assert torch.allclose(every, torch.tensor(clip).double(), rtol=1e-3)
    optimizer.step()
    return found


def norms_everywhere() -> None:
    plain = nn.parallel.DistributedDataParallel(built())
    plain(batch(0)).square().sum().backward()
    wanted = {name: param.grad.norm() for name, param in plain.module.named_parameters()}
    for precision, clip in (("fp32", None), ("fp32", 0.1), ("bf16", None), ("bf16", 0.1)):
        first = norms(0, precision, clip)
        every: list[Any] = [None] * RANKS
        torch.distributed.all_gather_object(every, first)
        for row in every + [norms(stage, precision, clip) for stage in (1, 2, 3)]:
            for ours, theirs in zip(row, first, strict=True):
                assert list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
        if precision == "fp32" and clip is None:
            for name, norm in first[0].items():
                assert torch.allclose(norm, wanted[name], rtol=1e-5)
            assert list(first[1]) == ["layers.0", "layers.1", ""]
            inner = torch.stack([norm for name, norm in first[0].items() if name.startswith("layers.1.")])
            assert torch.allclose(first[1]["layers.1"], inner.norm())


def test_norms_by_parameter_and_by_block_have_the_same_bits_on_every_rank_and_at_every_stage() -> None:
    run_ranks(RANKS, norms_everywhere)


def refused() -> None:
    model, optimizer = sharded(2)
    for use in (optimizer.gradients, lambda: onefold.grad_norms(model)):
        with pytest.raises(onefold.StateError, match=r"call loss.backward\(\)"):
            use()
    with pytest.raises(onefold.ConfigError, match="by='layer' is unknown"):
        onefold.grad_norms(model, by="layer")


def test_gradients_before_a_backward_are_refused() -> None:
    run_ranks(RANKS, refused)


class Hand(torch.optim.Optimizer):
    """A user's own optimizer."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad, alpha=group["lr"])


def plain_optimizer(stage: int) -> list[str]:
    said = []
    model = onefold.shard(nn.Linear(4, 4), stage=stage)
    ours = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    ours.register_step_pre_hook(lambda *_: model.weight.grad.sum())  # an operation of the user's own, and no update
    for make in (torch.optim.SGD, partial(torch.optim.AdamW, foreach=False), partial(Hand, defaults={"lr": 0.1})):
        plain = make(model.parameters()) if make is not torch.optim.SGD else make(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        for optimizer in (plain, ours):
            with pytest.raises(onefold.StateError) as caught:
                optimizer.step()
            said.append(str(caught.value))
        with pytest.raises(onefold.StateError) as caught:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        said.append(str(caught.value))
        model.zero_grad()
    return said


@pytest.mark.parametrize("stage", [1, 2])
def test_a_plain_torch_optimizer_is_named_as_such(stage: int) -> None:
    for said in run_ranks(2, plain_optimizer, stage):
        for name, line in zip(("SGD", "AdamW", "Hand"), said[::3], strict=True):
            found = f"a torch.optim optimizer ({name}) was built on sharded parameters"
            assert line.startswith(found) and f"onefold.Optimizer(model, {name}, …)" in line, line
        assert all("was called on a sharded gradient" in line for line in (*said[1::3], *said[2::3])), said
