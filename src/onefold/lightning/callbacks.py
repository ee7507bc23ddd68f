"""What is asked of callbacks and hyperparameters before training, so that nothing fails in mid-training."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)

from onefold import CheckpointError, ConfigError
from onefold.checkpoint.format.notes import encode
from onefold.lightning.checkpoints import check_path

AVERAGE = "use onefold.EMA, which averages the shards (docs/lightning.md has a callback of five lines)"


class Unsupported(NamedTuple):
    """A callback of Lightning's that does not work from a stage on."""

    cls: type[Callback]
    stage: int
    why: str
    remedy: str


UNSUPPORTED = (
    Unsupported(WeightAveraging, 0, "exchanges the weights of the model and of the checkpoint", AVERAGE),
    Unsupported(StochasticWeightAveraging, 3, "reads all parameters", f"use stage 2, or {AVERAGE}"),
    Unsupported(ModelPruning, 0, "replaces parameters of the sharded model", "prune before or after training"),
    Unsupported(
        BaseFinetuning, 3, "compares the values of parameters",
        "use stage 2, or call requires_grad_ and optimizer.add_param_group in a hook",
    ),
)  # fmt: skip


def check_callbacks(trainer: Trainer, stage: int) -> None:
    found = [(one, given) for given in trainer.callbacks for one in UNSUPPORTED if isinstance(given, one.cls)]
    for one, given in found:
        if stage >= one.stage:
            at = f" at stage {stage}" if one.stage else ""
            raise ConfigError(
                f"the callback {type(given).__name__} {one.why}, which does not work under Onefold{at}; {one.remedy}"
            )


def check_saving(trainer: Trainer) -> None:
    """Raises for hyperparameters and paths that onefold.save cannot take, if callbacks will save."""
    saving = [one for one in trainer.checkpoint_callbacks if not getattr(one, "save_weights_only", False)]
    for one in saving:
        check_path(getattr(one, "dirpath", None) or "")
    if not saving:
        return
    owners: tuple[Any, ...] = (trainer.lightning_module, trainer.datamodule)
    for owner in (one for one in owners if one is not None):
        for name, value in owner.hparams.items():
            try:
                encode(value, f"{type(owner).__name__}.hparams.{name}", {})
            except CheckpointError as error:
                raise ConfigError(f"{error}; or leave it out by save_hyperparameters(ignore=[{name!r}])") from error
