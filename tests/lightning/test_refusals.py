"""What a strategy does not do ends in one message, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import AsyncCheckpointIO, DoublePrecision, MixedPrecision
from lightning.pytorch.utilities import grad_norm

import onefold
from onefold.lightning import FabricZeroStrategy, ZeroStrategy
from tests.harness import run_ranks_raises
from tests.lightning.lit import Gan, Lit, data, trainer


class Overlapping(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.net[1])]


class OfPath(Lit):
    def __init__(self, corpus: Path = Path("corpus")) -> None:
        super().__init__()
        self.save_hyperparameters()


class Thawing(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[0])


class ReadsGradients(Lit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.losses.clear()
        grad_norm(self, 2)


class OfWhole(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NoOptimizer(Lit):
    def configure_optimizers(self) -> None:
        return None


class Foreign(Lit):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)


def uneven() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", backoff_factor=0.9)


def refused(case: str) -> None:
    """On a rank: what must raise before the first training step."""
    make, zero, settings = CASES[case][0]()
    module = make()
    try:
        trainer(ZeroStrategy(**zero), **settings).fit(module, data())
    finally:
        assert module.losses == []


CASES: dict[str, Any] = {
    "a parameter of two optimizers": (
        lambda: (Overlapping, {}, {}), "OptimizerError", "optimizer 1 of configure_optimizers (SGD) has parameters",
    ),
    "two optimizers in fp16": (lambda: (Gan, {"precision": "fp16"}, {}), "OptimizerError", "fp16 needs one Optimizer"),
    "gradients read": (lambda: (ReadsGradients, {"stage": 1}, {}), "StateError", "onefold.grad_norms(model)"),
    "moving average": (
        lambda: (Lit, {"stage": 0}, {"callbacks": [EMAWeightAveraging()]}), "ConfigError", "use onefold.EMA, which",
    ),
    "SWA": (
        lambda: (Lit, {"stage": 3}, {"callbacks": [StochasticWeightAveraging(1e-3)]}), "ConfigError", "use stage 2, or",
    ),
    "pruning": (
        lambda: (Lit, {}, {"callbacks": [ModelPruning("l1_unstructured")]}), "ConfigError", "ModelPruning replaces",
    ),
    "finetuning": (
        lambda: (Lit, {"stage": 3}, {"callbacks": [Thawing()]}), "ConfigError", "optimizer.add_param_group",
    ),
    "a class among hyperparameters": (
        lambda: (OfPath, {}, {"enable_checkpointing": True, "default_root_dir": "/nowhere"}),
        "ConfigError",
        "or leave it out by save_hyperparameters(ignore=['corpus'])",
    ),
    "an object store": (
        lambda: (Lit, {}, {"enable_checkpointing": True, "callbacks": [ModelCheckpoint("memory://run")]}),
        "CheckpointError",
        "mount the store",
    ),
    "no optimizer": (lambda: (NoOptimizer, {}, {}), "ConfigError", "returned no optimizer"),
    "LBFGS": (lambda: (OfWhole, {}, {}), "OptimizerError", "LBFGS"),
    "foreign parameters": (lambda: (Foreign, {}, {}), "OptimizerError", "not a trained parameter"),
    "sync_batchnorm": (lambda: (Lit, {}, {"sync_batchnorm": True}), "ConfigError", "sync_batchnorm=True"),
    "double": (lambda: (Lit, {}, {"precision": "64-true"}), "ConfigError", "'64-true' (DoublePrecision)"),
    "half": (lambda: (Lit, {}, {"precision": "16-true"}), "ConfigError", "use one of 32-true, bf16-mixed, 16-mixed"),
    "plugin": (lambda: (Lit, {}, {"plugins": DoublePrecision()}), "ConfigError", "DoublePrecision"),
    "two precisions": (
        lambda: (Lit, {"precision": "bf16"}, {"precision": "16-mixed", "plugins": None}),
        "ConfigError",
        "to the strategy; give one of them",
    ),
    "checkpoint plugin": (lambda: (Lit, {}, {"plugins": AsyncCheckpointIO()}), "ConfigError", "AsyncCheckpointIO"),
    "scaler": (
        lambda: (Lit, {}, {"plugins": MixedPrecision("16-mixed", "cpu", uneven())}),
        "ConfigError",
        "loss_scale=onefold.LossScale(factor=2.0)",
    ),
    "value in fp16": (
        lambda: (
            Lit,
            {"precision": "fp16"},
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        ),
        "ConfigError",
        "use 'norm'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_combination_raises_before_training(case):
    _, kind, text = CASES[case]
    for error in run_ranks_raises(2, refused, case):
        assert error.type_name == kind and text in error.message and "\n" not in error.message


@pytest.mark.parametrize("strategy", [ZeroStrategy, FabricZeroStrategy])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"zero": onefold.Zero(stage=1), "stage": 2}, "zero= and stage were given"),
        ({"zero": 3}, "zero=3 is no onefold.Zero"),
        ({"stages": 3}, "stages: no setting"),
        ({"stage": 4}, "stage=4"),
        ({"accumulate": "twice"}, "accumulate='twice' is unknown; use 'once' or 'each'"),
    ],
)
def test_settings_that_are_none_are_refused_at_once(strategy, given, text):
    with pytest.raises(onefold.ConfigError, match=text):
        strategy(**given)
