"""Optimizers that need whole tensors, as users write them in plain torch, and a run that trains with one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh

import onefold
from tests.harness import device
from tests.models import MODELS
from tests.parity.training import Run, Trained, loop


class Written(optim.Optimizer):
    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(self.direction(param, param.grad, self.state[param]), alpha=group["lr"])


class LAMB(Written):
    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state |= {"steps": 0, "mean": torch.zeros_like(param), "square": torch.zeros_like(param)}
        state["steps"] += 1
        state["mean"].lerp_(grad, 0.1)
        state["square"].lerp_(grad.square(), 0.01)
        update = state["mean"] / (state["square"].sqrt() + 1e-6) / (1 - 0.9 ** state["steps"])
        norm = param.norm()
        return update * (norm / update.norm() if norm > 0 else 1.0)


class Shampoo(Written):
    """Its state is a matrix of rows and one of columns, neither of the parameter's shape."""

    def direction(self, param: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        matrix = grad.flatten(1) if grad.ndim > 1 else grad.reshape(1, -1)
        if not state:
            state |= {"left": 1e-3 * torch.eye(matrix.shape[0]), "right": 1e-3 * torch.eye(matrix.shape[1])}
        state["left"] += matrix @ matrix.T
        state["right"] += matrix.T @ matrix
        return (_root(state["left"]) @ matrix @ _root(state["right"])).reshape(grad.shape)


def _root(matrix: Tensor) -> Tensor:
    """The inverse fourth root of a positive matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** -0.25) @ vectors.T


NS_STEPS = 2  # of Newton-Schulz, which at five takes near half of a run where the processor has no bf16
CLASSES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "muon": (optim.Muon, {"lr": 1e-2, "weight_decay": 0.1, "ns_steps": NS_STEPS}),
    "lamb": (LAMB, {}),
    "shampoo": (Shampoo, {}),
    "adafactor": (optim.Adafactor, {}),
}


MUON = "onefold.Muon"  # as the name of a run's optimizer
SPLITS: dict[str, dict[str, Any]] = {"gpt": {"*.in_proj_weight": 3}, "experts": {"*.mix.weight": (24, 8, 8, 8)}}


def muon(model: nn.Module, name: str, **fields: Any) -> onefold.Muon:
    """onefold.Muon for one of MODELS."""
    split = SPLITS.get(name) if dist.get_world_size() > 1 else None  # one rank compares with torch's own, without
    return onefold.Muon(model, lr=1e-2, adamw={"lr": 1e-2}, split=split, ns_steps=NS_STEPS, **fields)


def takes(cls: type[optim.Optimizer], param: nn.Parameter) -> bool:
    return param.ndim == 2 or cls is not optim.Muon


@dataclass
class Pair:
    """An Optimizer of whole tensors, and one for what it does not take, as one."""

    both: list[Any]

    @classmethod
    def torchs_muon(cls, model: nn.Module) -> Pair:
        """What onefold.Muon is for the GPT without splits, in torch's own classes."""
        named = dict(model.named_parameters())
        hidden = {name for name, param in named.items() if param.ndim == 2} - {"tokens.weight", "head.weight"}
        tables = [named["tokens.weight"], named["head.weight"]]
        vectors = {"params": [param for param in named.values() if param.ndim < 2], "weight_decay": 0.0}
        matrices = optim.Muon([named[name] for name in named if name in hidden], lr=1e-2, ns_steps=NS_STEPS)
        return cls([matrices, optim.AdamW([{"params": tables}, vectors], lr=1e-2, fused=True)])

    @classmethod
    def of(cls, model: nn.Module, name: str, make: Any) -> Pair:
        whole, settings = CLASSES[name]
        params = [param for param in model.parameters() if param.requires_grad]
        matrices, others = ([p for p in params if takes(whole, p) is wanted] for wanted in (True, False))
        both = [make(whole, [{"params": matrices}], **settings)] if matrices else []
        return cls(both + ([make(optim.AdamW, [{"params": others}], lr=1e-2)] if others else []))

    def step(self) -> None:
        for one in self.both:
            one.step()

    def zero_grad(self) -> None:
        for one in self.both:
            one.zero_grad()


def one_for_all(model: nn.Module, name: str) -> onefold.Optimizer:
    """One Optimizer of two classes."""
    whole, settings = CLASSES[name]
    params = [param for param in model.parameters() if param.requires_grad]
    matrices, others = ([p for p in params if (p.ndim == 2) is wanted] for wanted in (True, False))
    groups = [{"params": others, "cls": optim.AdamW, "lr": 1e-2}, {"params": matrices}]
    return onefold.Optimizer(model, whole, groups=groups, **settings)


def train_whole(run: Run, mesh: DeviceMesh | None = None) -> Trained:
    """On every rank: `run.optimizer` names one of CLASSES."""
    onefold.init()
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    case = MODELS[run.model]
    model = case.build().to(device())
    onefold.shard(model, stage=run.stage, bucket_bytes=run.bucket_bytes, mesh=mesh, **dict(run.fields))
    if run.optimizer == MUON:
        pair = Pair([muon(model, run.model, step_in_backward=run.step_in_backward)])
    elif run.grouped:
        pair = Pair([one_for_all(model, run.optimizer)])
    else:
        make = partial(onefold.Optimizer, model)
        pair = Pair.of(model, run.optimizer, lambda cls, groups, **kw: make(cls, groups=groups, **kw))

    def clip() -> list[Tensor]:
        return [one.clip_grad_norm(run.clip) for one in pair.both] if run.clip is not None else []

    trained = loop(run, model, case.loss, pair, clip, lambda: onefold.accumulate(model, reduce=run.reduce))  # type: ignore[arg-type]
    trained.traffic = onefold.traffic(model).by_purpose
    return trained


def train_plain(run: Run) -> Trained:
    """On one rank: the same with torch alone."""
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    case = MODELS[run.model]
    model = case.build()
    pair = (
        Pair.torchs_muon(model)
        if run.optimizer == MUON
        else Pair.of(model, run.optimizer, lambda cls, groups, **kw: cls(groups, **kw))
    )
    wrapped = nn.parallel.DistributedDataParallel(model)  # for the loop, which asks for full parameters of ours
    return loop(run, wrapped, case.loss, pair, list, wrapped.no_sync)  # type: ignore[arg-type]
