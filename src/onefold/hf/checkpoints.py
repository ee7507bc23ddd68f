"""Models and optimizers inside the folders that accelerate and the Trainer write: onefold checkpoints, beside the rest.

A folder of theirs gets a folder `onefold` (for further models `onefold_1` …), which any number of ranks loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import nn

from onefold import CheckpointError, Optimizer, load, save

FOLDER = "onefold"
Trained = Sequence[tuple[nn.Module, Sequence[Optimizer]]]  # models with their optimizers


def save_state(folder: str | Path, trained: Trained) -> None:
    """Saves each model with its optimizers. A checkpoint that is there already is replaced. Collective."""
    for path, model, optimizers in _places(folder, trained):
        save(path, model, optimizers, step=_steps(optimizers), overwrite=True, keep=1)


def load_state(folder: str | Path, trained: Trained) -> None:
    """Loads each model with its optimizers, and sets the random states. Collective."""
    for path, model, optimizers in _places(folder, trained):
        if not path.is_dir():
            raise CheckpointError(
                f"{folder} holds no folder {path.name}/, which save_state() of onefold.hf.Accelerator writes; to load "
                f"weights alone call onefold.load(folder, model)"
            )
        load(path, model, optimizers or None)


def _places(folder: str | Path, trained: Trained) -> Iterator[tuple[Path, nn.Module, list[Optimizer]]]:
    for number, (model, optimizers) in enumerate(trained):
        yield Path(folder) / (f"{FOLDER}_{number}" if number else FOLDER), model, list(optimizers)


def _steps(optimizers: Sequence[Optimizer]) -> int:
    return max((one.steps + one.skipped for one in optimizers), default=0)
