"""A checkpoint folder of transformers' Trainer without Onefold: safetensors weights beside a pickled optimizer.

The Trainer's optimizer numbers its parameters, and the weights are in alphabetical order, not in the model's: the names
in the optimizer's order must be given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.weights import open_weights
from onefold.errors import CheckpointError
from onefold.integrations.checkpoints.foreign import Foreign, with_values
from onefold.integrations.checkpoints.pickled import StoredTensor, read_pickled
from onefold.integrations.checkpoints.torch_files import GIVE_NAMES, is_optimizer, plain_checkpoint
from onefold.settings.limited import read_json

OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
SCHEDULER = "scheduler.pt"
STATE = "trainer_state.json"


def is_trainer(path: Path) -> bool:
    return path.is_dir() and (path / STATE).is_file() and _optimizer(path) is not None


def read_trainer(path: Path, names: Sequence[str] | None, scratch: Path) -> Foreign:
    """The state of the schedule is in `extra`, as "scheduler"."""
    file = _optimizer(path)
    weights = open_weights(Storage(), path)
    if file is None or weights is None:
        raise CheckpointError(f"{path} holds no safetensors weights of a whole model beside its optimizer")
    scheduler = [path / SCHEDULER] if (path / SCHEDULER).is_file() else []
    optimizer, *rest = read_pickled([file, *scheduler], scratch)
    if not is_optimizer(optimizer):
        raise CheckpointError(f"{file} holds no state dict of an optimizer: no 'state' and 'param_groups'")
    groups = [group for group in optimizer["param_groups"] if group["params"]]
    if names is None and not all("param_names" in group for group in groups):
        raise CheckpointError(
            f"{path}: the Trainer's optimizer numbers its parameters, and the order of its weights does not tell which "
            f"is which; resume from the folder with onefold.hf.Trainer, which knows the names, or {GIVE_NAMES}"
        )
    model = {
        name: StoredTensor(home, name, home.blocks[name].dtype, home.blocks[name].shape)
        for name, home in weights.homes.items()
    }
    found = plain_checkpoint(
        str(path), model, {**optimizer, "param_groups": groups}, names=names, step=_step(path),
        extra={"scheduler": with_values(rest[0])} if rest else {},
    )  # fmt: skip
    return replace(found, origin=f"transformers' Trainer: {path}")


def _optimizer(path: Path) -> Path | None:
    return next((path / name for name in OPTIMIZERS if (path / name).is_file()), None)


def _step(path: Path) -> int | None:
    state: Any = read_json(path / STATE)
    step = state.get("global_step") if isinstance(state, Mapping) else None
    return step if type(step) is int else None
