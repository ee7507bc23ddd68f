"""Models of several dtypes, modules kept in fp32, casts of inputs, autocast inside, and what cannot be trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onefold
from onefold import Precision
from tests.harness import run_ranks, run_ranks_raises
from tests.models import ManyDtypes
from tests.parity.stage3.compare import Trained, equal

DIM, STAGES = 16, (0, 1, 2, 3)


def batch(step: int) -> Tensor:
    return torch.randn(3, DIM, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))


def train(stage: int, precision: str | Precision, build: Callable[[], nn.Module] = ManyDtypes) -> tuple[Trained, Any]:
    torch.manual_seed(0)
    model = onefold.shard(build(), stage=stage, precision=precision, bucket_bytes=1 << 10)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)
    losses, norms = [], []
    for step in range(4):
        loss = model(batch(step), shift=torch.ones(DIM))["y"].square().mean()
        adam.backward(loss)
        norms.append(adam.clip_grad_norm(0.5))
        adam.step()
        adam.zero_grad()
        losses.append(loss.detach())
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    with onefold.full_parameters(model):
        params = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Trained(losses, norms, params, {}), (dtypes, model.seen)


def compare(precision: str | Precision) -> list[str]:
    first, (dtypes, seen) = train(0, precision)
    compute = torch.bfloat16 if precision == "bf16" or isinstance(precision, Precision) else torch.float16
    kept = torch.float32 if isinstance(precision, Precision) else compute
    assert seen == [compute, compute, torch.float32, torch.int64, torch.complex64]
    assert dtypes["first.weight"] is compute and dtypes["norm.weight"] is kept and dtypes["exact"] is torch.float64
    found = []
    for stage in STAGES[1:]:
        other, _ = train(stage, precision)
        found += [f"stage {stage}: {n}" for n, p in other.params.items() if not equal(p, first.params[n])]
        found += [f"stage {stage}: norm" for a, b in zip(first.norms, other.norms, strict=True) if not equal(a, b)]
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16", Precision(compute="bf16", keep_fp32=nn.LayerNorm)])
def test_mixed_dtypes_train_to_the_same_bits_at_every_stage(precision: str | Precision) -> None:
    assert run_ranks(2, compare, precision) == [[], []]


def kept_norm() -> tuple[list[torch.dtype], bool]:
    """What a kept module sees and gives, and whether its fp32 parameters are updated in place of a master."""
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, 2))
    model = onefold.shard(model, stage=2, precision=Precision(compute="bf16", keep_fp32=nn.LayerNorm))
    seen: list[torch.dtype] = []
    model[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    model[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-6)
    before = model[1].weight.detach().clone()
    model(batch(0)).float().square().sum().backward()
    adam.step()
    assert str(adam.precision).splitlines()[-2:] == [
        "optimizer state     fp32    as the master",
        "kept modules        fp32    their own master",
    ]
    return seen, bool((model[1].weight != before).all())


def test_a_kept_module_computes_in_fp32_among_16_bits() -> None:
    for seen, moved in run_ranks(2, kept_norm):
        assert seen == [torch.float32, torch.bfloat16] and moved


def lone(dtype: torch.dtype, precision: str) -> None:
    model = nn.Linear(4, 4)
    model.extra = nn.Parameter(torch.ones(4, dtype=dtype))
    onefold.shard(model, stage=2, precision=precision)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.complex64, "bf16"), (torch.bfloat16, "fp32"), (torch.float16, "bf16"), (torch.bfloat16, "fp16")],
)
def test_what_cannot_be_trained_is_refused_by_name(dtype: torch.dtype, precision: str) -> None:
    for error in run_ranks_raises(2, lone, dtype, precision):
        assert error.type_name == "ModelError" and "extra is torch." in error.message


def built_in_16_bits() -> bool:
    """A model that is bf16 already gets an fp32 master of its bf16 values."""
    torch.manual_seed(0)
    model = onefold.shard(nn.Linear(8, 8).bfloat16(), stage=3, precision="bf16")
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-5)
    before = onefold.full_state_dict(model)
    for _ in range(3):
        model(torch.ones(2, 8)).float().sum().backward()
        adam.step()
        adam.zero_grad()
    after = onefold.full_state_dict(model)
    return all(after[n].dtype is torch.float32 and bool((after[n] != before[n]).any()) for n in after)


def test_a_model_built_in_16_bits_is_trained_through_a_master() -> None:
    assert run_ranks(2, built_in_16_bits) == [True, True]
