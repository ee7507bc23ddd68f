"""An optimizer that cannot work on shards, or a call it cannot serve, is refused on every rank and changes nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.lr_scheduler import LambdaLR

import onefold
from tests.faults.test_bad_input import Case, assert_named, frozen, net
from tests.harness import run_ranks, run_ranks_raises

NAN = float("nan")


class ByNorm(optim.Optimizer):
    """SGD whose step is scaled by the norm of the gradients of all tensors it was given."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(param.grad / norm, alpha=self.param_groups[0]["lr"])


def sharded() -> nn.Module:
    return onefold.shard(net(), bucket_bytes=64)  # several units


def built(cls: Any = optim.SGD, **kwargs: Any) -> onefold.Optimizer:
    return onefold.Optimizer(sharded(), cls, **kwargs)


def grouped(choose: Callable[[nn.Module], list[Any]]) -> onefold.Optimizer:
    model = onefold.shard(nn.Sequential(nn.Linear(4, 4), frozen(nn.Linear(4, 4)), nn.Linear(4, 4)))
    return onefold.Optimizer(model, optim.SGD, groups=choose(model), lr=0.1)


def beside_muon(*classes: Any, **settings: Any) -> onefold.Optimizer:
    model = sharded()
    vectors = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": [param], "cls": cls, **settings} for param, cls in zip(vectors, classes, strict=False)]
    return onefold.Optimizer(model, optim.Muon, groups=groups)


def resettled_muon(**settings: Any) -> None:
    """One matrix, so that one rank alone reads its settings."""
    model = onefold.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    optimizer = onefold.Muon(model)
    [group] = [group for group in optimizer.param_groups if "matrices" in group]
    group.update(settings)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


def with_gradients() -> onefold.Optimizer:
    model = sharded()
    optimizer = onefold.Optimizer(model, optim.SGD, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    return optimizer


def scheduled(**kwargs: Any) -> None:
    model = sharded()
    optimizer = onefold.Optimizer(model, optim.SGD, **kwargs)
    scheduler = LambdaLR(optimizer, lambda step: 1.0 if step < 2 else NAN)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


NO_CLASS = ("OptimizerError", "is not an optimizer class", "torch.optim.AdamW")
ELEMENTWISE = "Use an element-wise class"
ALIEN = "is not a trained parameter of the sharded model"
NO_BACKWARD = ("StateError", "no gradients", "call loss.backward()")

CASES = {
    "unsharded model": Case(lambda: onefold.Optimizer(net(), optim.SGD), "ModelError", "Sequential", "onefold.shard("),
    "not a model": Case(lambda: onefold.Optimizer([], optim.SGD), "ModelError", "list", "onefold.shard("),
    "a function": Case(lambda: built(lambda params: None), *NO_CLASS),
    "a module class": Case(lambda: built(nn.Linear), *NO_CLASS),
    "an instance": Case(lambda: built(optim.SGD([nn.Parameter(torch.ones(1))])), *NO_CLASS),
    "a name": Case(lambda: built("AdamW"), *NO_CLASS),
    "LBFGS": Case(lambda: built(optim.LBFGS), "OptimizerError", "LBFGS", ELEMENTWISE),
    "Muon for vectors": Case(
        lambda: built(optim.Muon), "OptimizerError", "Muon cannot update 0.bias of shape (8,)", "a second Optimizer"
    ),
    "a class beside an element-wise one": Case(
        lambda: grouped(lambda m: [{"params": [m[0].weight], "cls": optim.AdamW}]),
        "OptimizerError", "cls=AdamW", "a second Optimizer",
    ),
    "two classes beside Muon": Case(
        lambda: beside_muon(optim.AdamW, optim.SGD), "OptimizerError", "AdamW, SGD", "name one"
    ),
    "Muon beside Muon": Case(
        lambda: beside_muon(optim.Muon), "OptimizerError", "cls=Muon, which is not element-wise", "such as AdamW"
    ),
    "Muon with another class beside": Case(
        lambda: onefold.Muon(sharded(), adamw={"cls": optim.SGD}), "OptimizerError", "adamw= names 'cls'", "a second"
    ),
    "Muon with parameters of AdamW": Case(
        lambda: onefold.Muon(sharded(), adamw={"params": []}), "OptimizerError", "adamw= names 'params'", "place="
    ),
    "Muon for parameters": Case(
        lambda: onefold.Muon(sharded().parameters()), "ModelError", "found generator", "give the model itself"
    ),
    "Muon half a step": Case(
        lambda: onefold.Muon(sharded(), ns_steps=2.5), "OptimizerError", "ns_steps=2.5", "use 1 to 99"
    ),
    "Muon later without decay": Case(
        lambda: resettled_muon(weight_decay=None), "OptimizerError", "weight_decay=None is out of range", "at least 0"
    ),
    "Muon later in fp16": Case(
        lambda: resettled_muon(ns_dtype="fp16"), "OptimizerError", "ns_dtype='fp16' is unknown", "use 'bf16'"
    ),
    "Muon later with other matrices": Case(
        lambda: resettled_muon(matrices="stack"), "OptimizerError", "'stack' now, but was made with 'whole'", "split="
    ),
    "misspelt setting beside Muon": Case(
        lambda: beside_muon(optim.AdamW, rl=0.1), "OptimizerError", "{'rl': 0.1}", "AdamW refused"
    ),
    "norm of all tensors": Case(
        lambda: built(ByNorm), "OptimizerError", "ByNorm is not element-wise, and needs several tensors", ELEMENTWISE
    ),
    "misspelt setting": Case(lambda: built(optim.AdamW, rl=0.1), "OptimizerError", "{'rl': 0.1}", "AdamW refused"),
    "Adam lr nan": Case(lambda: built(optim.Adam, lr=NAN), "OptimizerError", "nan", "lr"),
    "SGD lr nan": Case(lambda: built(optim.SGD, lr=NAN), "OptimizerError", "lr=nan", "is not finite"),
    "SGD lr inf": Case(lambda: built(optim.SGD, lr=float("inf")), "OptimizerError", "lr=inf", "is not finite"),
    "group lr nan": Case(
        lambda: grouped(lambda m: [{"params": [m[0].weight]}, {"params": [m[2].weight], "lr": NAN}]),
        "OptimizerError", "lr=nan in param group 1", "not finite",
    ),
    "scheduled lr nan": Case(
        lambda: scheduled(lr=0.1), "OptimizerError", "lr=nan in param group 0", "look at the LR schedule"
    ),
    "scheduled tensor lr nan": Case(
        lambda: scheduled(lr=torch.tensor(0.1)), "OptimizerError", "nan", "look at the LR schedule"
    ),
    "parameter of another model": Case(
        lambda: grouped(lambda m: [{"params": [nn.Parameter(torch.ones(3, 5))]}]), "OptimizerError", "(3, 5)", ALIEN
    ),
    "frozen parameter": Case(lambda: grouped(lambda m: list(m[1].parameters())), "OptimizerError", "(4, 4)", ALIEN),
    "the same parameter in two groups": Case(
        lambda: grouped(lambda m: [{"params": [m[0].weight]}, {"params": [m[0].weight]}]),
        "OptimizerError", "0.weight", "group",
    ),
    "the same parameter twice in a group": Case(
        lambda: grouped(lambda m: [{"params": [m[0].weight, m[0].weight]}]), "OptimizerError", "0.weight", "once"
    ),
    "no groups": Case(lambda: grouped(lambda m: []), "OptimizerError", "empty", "groups"),
    "no tensor": Case(lambda: grouped(lambda m: [{"params": ["0.weight"]}]), "OptimizerError", "str", "parameters"),
    "step without backward": Case(lambda: built(lr=0.1).step(), *NO_BACKWARD),
    "clip without backward": Case(lambda: built(lr=0.1).clip_grad_norm(1.0), *NO_BACKWARD),
    "closure": Case(lambda: with_gradients().step(0.5), "OptimizerError", "found 0.5", "runs forward and backward"),
    "clip nan": Case(lambda: with_gradients().clip_grad_norm(NAN), "ConfigError", "max_norm=nan", "at least 0"),
    "clip -1": Case(lambda: with_gradients().clip_grad_norm(-1), "ConfigError", "max_norm=-1", "at least 0"),
    "clip '1'": Case(lambda: with_gradients().clip_grad_norm("1"), "ConfigError", "max_norm='1'", "at least 0"),
    "norm type 0": Case(lambda: with_gradients().clip_grad_norm(1, 0), "ConfigError", "norm_type=0", "positive"),
    "norm type nan": Case(lambda: with_gradients().clip_grad_norm(1, NAN), "ConfigError", "norm_type=nan", "positive"),
}  # fmt: skip


def provoke(name: str) -> None:
    CASES[name].act()


@pytest.mark.parametrize("name", CASES)
def test_a_bad_optimizer_or_call_is_refused_on_every_rank_with_a_named_error(name: str) -> None:
    for caught in run_ranks_raises(2, provoke, name):
        assert_named(caught, CASES[name])
        assert "is not element-wise" not in caught.message or "element-wise" in CASES[name].found


# -- and training goes on ----------------------------------------------------------------------------------------------

MISTAKES = {
    "closure": lambda model, optimizer: optimizer.step(0.5),
    "clip nan": lambda model, optimizer: optimizer.clip_grad_norm(NAN),
    "alien group": lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "known group": lambda model, optimizer: optimizer.add_param_group({"params": [model[0].weight]}),
    "second optimizer": lambda model, optimizer: onefold.Optimizer(model, optim.LBFGS, lr=0.1),
    "second shard": lambda model, optimizer: onefold.shard(model),
    "accumulate sometimes": lambda model, optimizer: onefold.accumulate(model, "sometimes").__enter__(),
}


def train_with_a_mistake(name: str) -> list[Tensor]:
    model = sharded()
    with pytest.raises(onefold.OptimizerError):
        onefold.Optimizer(model, optim.LBFGS)
    optimizer = onefold.Optimizer(model, optim.AdamW, lr=0.1)
    for step in range(3):
        model(torch.full((2, 4), float(step + 1))).square().sum().backward()
        if step == 1 and name != "none":
            with pytest.raises(onefold.OnefoldError):
                MISTAKES[name](model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.fixture(scope="module")
def undisturbed() -> list[Tensor]:
    return run_ranks(2, train_with_a_mistake, "none")[0]


@pytest.mark.parametrize("name", MISTAKES)
def test_training_after_a_refused_call_is_as_if_it_had_not_been_made(name: str, undisturbed: list[Tensor]) -> None:
    for trained in run_ranks(2, train_with_a_mistake, name):
        assert all(map(torch.equal, trained, undisturbed))
