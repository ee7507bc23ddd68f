"""Models and optimizers inside the folders that accelerate and the Trainer write: onefold checkpoints, beside the rest.

A folder of theirs gets a folder `onefold` (for further models `onefold_1` …), which any number of ranks loads.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from onefold import CheckpointError, OnefoldError, Optimizer, import_checkpoint, load, save
from onefold.checkpoint.protocol.quiesce import background_comm
from onefold.checkpoint.protocol.together import attempt
from onefold.hf.adapters import has_adapters
from onefold.runtime.engine import engine_of

FOLDER = "onefold"
PLAIN_OPTIMIZER = ("optimizer.pt", "optimizer.bin")
Trained = Sequence[tuple[nn.Module, Sequence[Optimizer]]]  # models with their optimizers


def save_state(folder: str | Path, trained: Trained) -> None:
    """Saves each model with its optimizers, of a model with PEFT's adapters what trains. A checkpoint that is there
    already is replaced. Collective."""
    for path, model, optimizers in _places(folder, trained):
        only = "trainable" if has_adapters(model) else None
        save(path, model, optimizers, step=_steps(optimizers), overwrite=True, keep=1, only=only)


def load_state(folder: str | Path, trained: Trained) -> None:
    """Loads each model with its optimizers, and sets the random states. Collective."""
    for path, model, optimizers in _places(folder, trained):
        if not path.is_dir():
            raise CheckpointError(
                f"{folder} holds no folder {path.name}/, which save_state() of onefold.hf.Accelerator writes; to load "
                f"weights alone call onefold.load(folder, model)"
            )
        load(path, model, optimizers or None)


def load_plain(folder: str | Path, scratch: str | Path, model: nn.Module, optimizer: Optimizer) -> Any:
    """Loads the checkpoint of a Trainer without Onefold: rank 0 imports it into a folder in `scratch`, which all ranks
    see, load and remove. Returns the state of its scheduler, if it has one. Collective."""
    names = {id(param): name for name, param in model.named_parameters()}
    ordered = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    comm = background_comm(engine_of(model))
    with ExitStack() as stack:

        def imported() -> str | None:
            if comm.rank:
                return None
            try:
                Path(scratch).mkdir(parents=True, exist_ok=True)
                made = stack.enter_context(tempfile.TemporaryDirectory(prefix=".imported-", dir=scratch))
                return str(import_checkpoint(folder, Path(made) / "run", names=ordered).folder)
            except (OnefoldError, OSError) as error:
                raise CheckpointError(
                    f"{folder} holds the optimizer state of a Trainer without Onefold, which was not imported: "
                    f"{error}; to go on with its weights and new moments remove {' and '.join(PLAIN_OPTIMIZER)} there"
                ) from error

        extra = load(attempt(comm, imported)[0], model, optimizer)
        attempt(comm, lambda: None)  # all have loaded the folder, which rank 0 removes now
        return extra.get("scheduler")


def _places(folder: str | Path, trained: Trained) -> Iterator[tuple[Path, nn.Module, list[Optimizer]]]:
    for number, (model, optimizers) in enumerate(trained):
        yield Path(folder) / (f"{FOLDER}_{number}" if number else FOLDER), model, list(optimizers)


def _steps(optimizers: Sequence[Optimizer]) -> int:
    return max((one.steps + one.skipped for one in optimizers), default=0)
