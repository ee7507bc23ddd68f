"""What a sharded model cannot do raises a StateError with its remedy, and training goes on unharmed."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn, optim

import onefold
from onefold import StateError
from tests.harness import run_ranks
from tests.models import FrozenMiddle

STAGES = (0, 1, 2)
SHARDED = (1, 2)  # where gradients are spread over ranks when the optimizer wants them
STEPS = 4


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
    return torch.randn(8, 4, generator=generator)


class Training:
    """Four steps, with room for a mistake between them."""

    def __init__(self, stage: int) -> None:
        self.model = onefold.shard(FrozenMiddle(4, 16, 2), stage=stage, bucket_bytes=300)  # several units
        self.optimizer = onefold.Optimizer(self.model, optim.AdamW, lr=1e-2)
        self.step = 0

    def forward(self) -> Tensor:
        return self.model(batch(self.step)).square().mean()

    def backward(self) -> None:
        self.forward().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def finish(self) -> list[Tensor]:
        while self.step < STEPS:
            self.backward()
            self.update()
        return self.values()

    def values(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


class Ended(NamedTuple):
    message: str
    changed: bool  # some parameter, by the mistake
    values: list[Tensor]


def train(stage: int) -> list[Tensor]:
    return Training(stage).finish()


@pytest.fixture(scope="module")
def undisturbed() -> list[Tensor]:
    return run_ranks(2, train, 0)[0]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


# -- refused at once: between backward and step, nothing is changed ----------------------------------------------------


def scaled(t: Training, use: Callable[[torch.amp.GradScaler], Any]) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    use(scaler)


def plain_step(t: Training, cls: type[optim.Optimizer], **kwargs: Any) -> None:
    cls([param for param in t.model.parameters() if param.requires_grad], lr=0.1, **kwargs).step()


def some_grad(t: Training) -> Tensor:
    return t.model.first.weight.grad


class Mistake(NamedTuple):
    act: Callable[[Training], Any]
    says: str
    stages: tuple[int, ...] = STAGES


COPIED = "cannot be copied or pickled"
BEFORE = "before onefold.shard()"
SPREAD = "spread over ranks"

AT_ONCE = {
    "deepcopy": Mistake(lambda t: copy.deepcopy(t.model), COPIED),
    "deepcopy of a parent": Mistake(lambda t: copy.deepcopy(nn.Sequential(nn.Linear(1, 1), t.model)), COPIED),
    "deepcopy of a list": Mistake(lambda t: copy.deepcopy({"model": [t.model]}), COPIED),
    "pickle": Mistake(lambda t: pickle.dumps(t.model), "save onefold.full_state_dict(model)"),
    "pickle of a parent": Mistake(lambda t: pickle.dumps(nn.Sequential(t.model)), "onefold.full_state_dict(model)"),
    "torch.save": Mistake(lambda t: torch.save(t.model, io.BytesIO()), "save onefold.full_state_dict(model)"),
    "deepcopy of the optimizer": Mistake(lambda t: copy.deepcopy(t.optimizer), "state_dict()"),
    "pickle of the optimizer": Mistake(lambda t: pickle.dumps(t.optimizer), "state_dict()"),
    "half": Mistake(lambda t: t.model.half(), BEFORE),
    "double": Mistake(lambda t: t.model.to(torch.float64), BEFORE),
    "bfloat16": Mistake(lambda t: t.model.bfloat16(), BEFORE),
    "to meta": Mistake(lambda t: t.model.to("meta"), BEFORE),
    "to_empty": Mistake(lambda t: t.model.to_empty(device="meta"), BEFORE),
    "half of a parent": Mistake(lambda t: nn.Sequential(t.model).half(), BEFORE),
    "scaler.step": Mistake(lambda t: scaled(t, lambda s: s.step(t.optimizer)), "torch.amp.GradScaler"),
    "scaler.unscale_": Mistake(lambda t: scaled(t, lambda s: s.unscale_(t.optimizer)), "no GradScaler", SHARDED),
    "unscale_, then step": Mistake(
        lambda t: scaled(t, lambda s: (s.unscale_(t.optimizer), s.step(t.optimizer))), "GradScaler"
    ),
    "clip_grad_norm_": Mistake(
        lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), 1.0), "use optimizer.clip_grad_norm()", SHARDED
    ),
    "clip_grad_norm_ by foreach": Mistake(
        lambda t: nn.utils.clip_grad_norm_(t.model.parameters(), 1.0, foreach=True), "optimizer.clip_grad_norm", SHARDED
    ),
    "clip_grad_value_": Mistake(lambda t: nn.utils.clip_grad_value_(t.model.parameters(), 1.0), SPREAD, SHARDED),
    "SGD": Mistake(lambda t: plain_step(t, optim.SGD), SPREAD, SHARDED),
    "SGD by foreach": Mistake(lambda t: plain_step(t, optim.SGD, foreach=True), SPREAD, SHARDED),
    "SGD by fused": Mistake(lambda t: plain_step(t, optim.SGD, fused=True), SPREAD, SHARDED),
    "SGD with momentum": Mistake(lambda t: plain_step(t, optim.SGD, momentum=0.9), SPREAD, SHARDED),
    "Adam": Mistake(lambda t: plain_step(t, optim.Adam), SPREAD, SHARDED),
    "Adam by fused": Mistake(lambda t: plain_step(t, optim.Adam, fused=True), SPREAD, SHARDED),
    "grad.norm": Mistake(lambda t: some_grad(t).norm(), SPREAD, SHARDED),
    "grad.mul_": Mistake(lambda t: some_grad(t).mul_(2), SPREAD, SHARDED),
    "grad[0]": Mistake(lambda t: some_grad(t)[0], SPREAD, SHARDED),
    "deepcopy of grad": Mistake(lambda t: copy.deepcopy(some_grad(t)), SPREAD, SHARDED),
    "state of another optimizer": Mistake(
        lambda t: t.optimizer.load_state_dict({"param_groups": [], "state": {}}), "this optimizer state belongs to"
    ),
}


def make_at_once(name: str, stage: int) -> Ended:
    t = Training(stage)
    t.backward()
    t.update()
    t.backward()
    before = t.values()
    with pytest.raises(StateError) as caught:
        AT_ONCE[name].act(t)
    changed = not same(t.values(), before)
    t.update()
    return Ended(str(caught.value), changed, t.finish())


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_mistake_is_refused_at_once_and_training_goes_on_to_the_same_bits(
    name: str, undisturbed: list[Tensor]
) -> None:
    for stage in AT_ONCE[name].stages:
        for ended in run_ranks(2, make_at_once, name, stage):
            assert AT_ONCE[name].says in ended.message
            assert not ended.changed
            assert same(ended.values, undisturbed), f"stage {stage}"


# -- what stays allowed ------------------------------------------------------------------------------------------------

ALLOWED: dict[str, Callable[[Training], Any]] = {
    "nothing": lambda t: None,
    "float": lambda t: t.model.float(),
    "to cpu": lambda t: t.model.to("cpu"),
    "to float32 on cpu": lambda t: t.model.to("cpu", torch.float32),
    "train and eval": lambda t: t.model.eval().train(),
    "state_dict there and back": lambda t: t.model.load_state_dict(copy.deepcopy(t.model.state_dict())),
    "deepcopy of a part": lambda t: copy.deepcopy(t.model.first).half(),
    "optimizer state there and back": lambda t: t.optimizer.load_state_dict(t.optimizer.state_dict()),
    "values in place": lambda t: [param.data.copy_(param.data.clone()) for param in t.model.parameters()],
    "print a gradient": lambda t: repr(t.model.first.weight.grad),
}


def do_allowed(name: str, stage: int) -> list[Tensor]:
    t = Training(stage)
    t.backward()
    t.update()
    ALLOWED[name](t)
    t.backward()
    ALLOWED[name](t)
    t.update()
    return t.finish()


@pytest.mark.parametrize("name", ALLOWED)
def test_what_changes_nothing_is_allowed_and_training_gives_the_same_bits(name: str, undisturbed: list[Tensor]) -> None:
    for stage in STAGES:
        for values in run_ranks(2, do_allowed, name, stage):
            assert same(values, undisturbed), f"stage {stage}"
