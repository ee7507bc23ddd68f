"""`onefold import-checkpoint`: a checkpoint of DeepSpeed, DCP or torch.save as one of Onefold's."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from onefold.errors import ConfigError, visible
from onefold.integrations.checkpoints.imported import import_checkpoint
from onefold.settings.limited import LINE_BYTES_LIMIT, read_text


@dataclass(frozen=True)
class ImportCheckpoint:
    """Import a DeepSpeed folder, a DCP folder or a file of torch.save, optimizer state included.

    Pickle is read by a process of its own that may only read tensors.
    """

    source: tyro.conf.Positional[Path]
    """A DeepSpeed folder (with `latest`, or one global_step…), a DCP folder, a checkpoint of transformers' Trainer
    (which needs --names), or a file of torch.save."""
    out: tyro.conf.Positional[Path]
    """The folder of checkpoints to write into, or an address of a store; load it with onefold.load."""
    optimizer_source: Path | None = None
    """The file or DCP folder of the optimizer, if that was saved on its own."""
    optimizer: str | None = None
    """The torch class that was trained (AdamW …), if the source does not tell it."""
    names: Path | None = None
    """A file with the optimizer's parameters by name, in its order, one on each line, if shapes do not tell them."""
    step: int | None = None
    """The number of the checkpoint, by default that of the source."""
    weights_only: bool = False
    """Leave the optimizer behind."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        done = import_checkpoint(
            self.source, self.out, optimizer_source=self.optimizer_source, optimizer=self.optimizer,
            names=None if self.names is None else _lines(self.names), step=self.step, weights_only=self.weights_only,
        )  # fmt: skip
        if self.json:
            sys.stdout.write(json.dumps({**done._asdict(), "folder": str(done.folder)}, indent=2) + "\n")
        else:
            state = f"the state of {done.optimizer}" if done.optimizer else "no optimizer state"
            said = f"{visible(done.origin)}\nstep {done.step}: {done.parameters} tensors, {state}"
            sys.stdout.write(f"{said} → {visible(done.folder)}\n")
        return 0


def _lines(path: Path) -> list[str]:
    try:
        return read_text(path, LINE_BYTES_LIMIT).split()
    except FileNotFoundError as error:
        raise ConfigError(f"--names {path} does not exist") from error
