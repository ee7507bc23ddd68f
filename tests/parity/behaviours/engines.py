"""One scenario, six engines: our four stages, DistributedDataParallel, and plain PyTorch that averages at step().

A scenario is a module-level function that takes an engine, trains, and returns a dict. `check` runs it on every rank
under every engine: the stages must return the same bits, the references the same numbers. What a scenario returns as
"params" must besides be equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._pytree import keystr, tree_flatten_with_path

import onefold
from onefold.runtime.engine import ATTRIBUTE
from tests.harness import run_ranks
from tests.parity.training import same_bits

STAGES = (0, 1, 2, 3)
DIM = 12


class Staged:
    """Our library at one stage; units are small, so that every model has several."""

    def __init__(self, stage: int) -> None:
        self.name: int | str = stage
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def wrap(self, model: nn.Module, **fields: Any) -> nn.Module:
        return onefold.shard(model, stage=self.name, **{"bucket_bytes": 1 << 10, **fields})

    def optimizer(self, model: nn.Module, cls: Any = torch.optim.AdamW, groups: Any = None, **kwargs: Any) -> Any:
        return onefold.Optimizer(model, cls, groups=groups, **settings(cls, kwargs))

    def clip(self, optimizer: Any, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return optimizer.clip_grad_norm(max_norm, norm_type)

    def accumulate(self, model: nn.Module, reduce: str | None = None) -> Any:
        return onefold.accumulate(model, reduce)


class Ddp:
    """torch's DistributedDataParallel."""

    def __init__(self, name: str) -> None:
        self.name: int | str = name
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def wrap(self, model: nn.Module, **fields: Any) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    def optimizer(self, model: nn.Module, cls: Any = torch.optim.AdamW, groups: Any = None, **kwargs: Any) -> Any:
        return cls(groups or list(model.parameters()), **settings(cls, kwargs))

    def clip(self, optimizer: Any, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        return clip_grad_norm_(model.parameters(), max_norm, norm_type)

    def accumulate(self, model: nn.Module, reduce: str | None = None) -> Any:
        return model.no_sync()


class Plain(Ddp):
    """No wrapper: every rank trains alone and averages its gradients with the others' just before they are used."""

    def wrap(self, model: nn.Module, **fields: Any) -> nn.Module:
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), 0)
        return model

    def optimizer(self, model: nn.Module, cls: Any = torch.optim.AdamW, groups: Any = None, **kwargs: Any) -> Any:
        optimizer = super().optimizer(model, cls, groups, **kwargs)
        optimizer.averaged = False
        optimizer.register_step_pre_hook(lambda *_: None if optimizer.averaged else average(model))
        optimizer.register_step_post_hook(lambda *_: setattr(optimizer, "averaged", False))
        return optimizer

    def clip(self, optimizer: Any, model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
        average(model)
        optimizer.averaged = True
        return super().clip(optimizer, model, max_norm, norm_type)

    def accumulate(self, model: nn.Module, reduce: str | None = None) -> Any:
        return nullcontext()


Engine = Staged | Ddp | Plain
Scenario = Callable[..., dict[str, Any]]


def settings(cls: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    defaults = {"lr": 1e-2, "weight_decay": 0.1} if cls is torch.optim.AdamW else {"lr": 0.1}
    return {**defaults, **kwargs}


def average(model: nn.Module) -> None:
    """The mean over ranks, where a rank without a gradient counts as zeros; no gradient where no rank has one."""
    for param in model.parameters():
        if param.requires_grad:
            has = torch.tensor(float(param.grad is not None))
            dist.all_reduce(has)
            if has:
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()


def on_rank(scenario: Scenario, names: Sequence[int | str], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    results = {}
    for name in names:
        torch.manual_seed(7)
        engine = {"ddp": Ddp, "plain": Plain}.get(str(name), Staged)(name)
        results[name] = scenario(engine, **kwargs)
    return results


def check(
    ranks: int, scenario: Scenario, *references: str, exact: bool | None = None, **kwargs: Any
) -> list[dict[int | str, dict[str, Any]]]:
    """Run everywhere and compare; two ranks are compared bit for bit with references unless told otherwise."""
    everyone = run_ranks(ranks, on_rank, scenario, [*STAGES, *references], kwargs)
    for rank, results in enumerate(everyone):
        for stage in STAGES[1:]:
            compare(results[stage], results[0], True, f"rank {rank}: stage {stage} and stage 0")
        for name in references:
            compare(results[0], results[name], ranks <= 2 if exact is None else exact, f"rank {rank}: stage 0, {name}")
        compare(results[0].get("params"), everyone[0][0].get("params"), True, f"rank {rank} and rank 0")
    return everyone


def compare(ours: Any, theirs: Any, exact: bool, what: str) -> None:
    (a, shape_a), (b, shape_b) = tree_flatten_with_path(ours), tree_flatten_with_path(theirs)
    assert shape_a == shape_b, f"{what}: {shape_a} != {shape_b}"
    for (path, x), (_, y) in zip(a, b, strict=True):
        where = f"{what}: {keystr(path)}"
        if not isinstance(x, Tensor):
            assert x == y or (not exact and isinstance(x, float) and abs(x - y) <= 1e-5 * max(1.0, abs(y))), (
                f"{where}: {x} != {y}"
            )
        elif exact:
            assert same_bits(x, y), f"{where}: other bits"
        else:
            torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-5, msg=lambda m, w=where: f"{w}: {m}")


def batch(step: int, rank: int, *shape: int) -> Tensor:
    return torch.randn(*(shape or (3, DIM)), generator=torch.Generator().manual_seed(1000 * step + rank))


def bare(model: nn.Module) -> Any:
    return getattr(model, "module", model)


def whole(model: nn.Module, write: bool = False) -> Any:
    """Around whatever reads or, with `write`, changes values by hand: at stage 3 they are spread over ranks."""
    return onefold.full_parameters(model, write=write) if ATTRIBUTE in model.__dict__ else nullcontext()


def params_of(model: nn.Module) -> dict[str, Tensor]:
    with whole(model):
        return {name: p.detach().clone() for name, p in bare(model).named_parameters()}


def mlp(dim: int = DIM) -> nn.Module:
    return nn.Sequential(nn.Linear(dim, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 4))
