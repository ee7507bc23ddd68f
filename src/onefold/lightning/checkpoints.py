"""Checkpoints of Lightning, as Onefold writes them: a folder that any number of ranks and any stage can load.

What Lightning calls a checkpoint is a dictionary. Here the model and its optimizer are saved by `onefold.save`, and the
rest of the dictionary (loops, callbacks, schedulers, hyperparameters) is its `extra`. The path that Lightning chooses,
such as `epoch=1-step=8.ckpt`, is a folder with one checkpoint `step-…` in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from onefold import CheckpointError, Optimizer, load, save

ANYTHING = "*"  # a pattern that matches every name


def check_path(path: str | Path) -> None:
    """Raises for the address of an object store, which Path would take for a folder of this name."""
    if "://" in str(path):
        raise CheckpointError(
            f"{path} is no folder of a file system, and onefold.save needs one that all ranks see; mount the store, "
            f"or save weights alone (save_weights_only=True)"
        )


def save_folder(
    path: str | Path, model: nn.Module, optimizers: Sequence[Optimizer], extra: dict[str, Any], step: int
) -> None:
    """Saves a checkpoint at `path`, in the place of one that is there: that is removed when the new one is complete.
    Collective."""
    check_path(path)
    if Path(path).is_file():
        raise CheckpointError(
            f"{path} is a file, and a checkpoint of Onefold is a folder; choose another path, or remove the file"
        )
    save(path, model, tuple(optimizers) or None, extra=extra, step=step, keep=1, overwrite=True)


def load_folder(path: str | Path, model: nn.Module, optimizers: Sequence[Optimizer], *, strict: bool) -> dict[str, Any]:
    """Fills the model and its optimizers from what `save_folder` saved, and returns the `extra`. Collective."""
    allowed = () if strict else ANYTHING
    extra = load(path, model, tuple(optimizers) or None, allow_missing=allowed, allow_extra=allowed)
    if not isinstance(extra, dict):
        raise CheckpointError(
            f"{path} has the weights of a model but nothing of Lightning's: no loops and no callbacks; load it by "
            f"onefold.load(path, model), or name a checkpoint that Lightning saved"
        )
    return extra
