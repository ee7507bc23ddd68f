"""The rows of a run for other programs: as TensorBoard files, or for Weights & Biases. Rank 0 writes them.

Their packages are imported when a run with `--log` begins, and never otherwise.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from onefold.errors import ConfigError, OnefoldError
from onefold.train.run.metrics import Listener, Row

PROJECT = "onefold"  # at Weights & Biases, unless WANDB_PROJECT names another


class Log(Protocol):
    """Where rows go."""

    def write(self, step: int, figures: dict[str, float]) -> None: ...

    def close(self) -> None: ...


def figures_of(row: Row) -> dict[str, float]:
    """All numbers of a row, by name; those of a table as `table/name`."""
    found: dict[str, Any] = {}
    for name, value in row._asdict().items():
        found |= {f"{name}/{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and name != "step"}


class TensorBoardLog:
    """Event files in the run folder, of which `tensorboard --logdir` draws curves."""

    def __init__(self, run: Path, facts: dict[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(run), purge_step=step + 1)  # a resumed run takes back later steps

    def write(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLog:
    """A run at Weights & Biases; offline, in the run folder, where nobody is logged in."""

    def __init__(self, run: Path, facts: dict[str, Any], step: int) -> None:
        import wandb

        folder = run / "wandb"
        folder.mkdir(exist_ok=True)
        known = folder / "onefold-run-id"  # a run that is resumed is the same run there
        if not known.exists():
            known.write_text(secrets.token_hex(8))
        kept = {name: value for name, value in facts.items() if name != "placement"}
        try:
            self._run: Any = wandb.init(
                dir=str(run), project=os.environ.get("WANDB_PROJECT", PROJECT), name=run.absolute().name, config=kept,
                id=known.read_text(), resume="allow", mode=_mode(wandb), settings=wandb.Settings(silent=True),
            )  # fmt: skip
        except Exception as error:  # wandb raises many kinds
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise OnefoldError(f"--log wandb cannot begin: {reason}; WANDB_MODE=offline needs no network") from error

    def write(self, step: int, figures: dict[str, float]) -> None:
        self._run.log(figures, step=step)

    def close(self) -> None:
        self._run.finish()


def _mode(wandb: Any) -> Any:
    """As WANDB_MODE says; else online for those who are logged in, and offline for others: a rank cannot be asked."""
    return os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")


LOGS: dict[str, Callable[[Path, dict[str, Any], int], Log]] = {"tensorboard": TensorBoardLog, "wandb": WandbLog}


def check_logs(names: Sequence[str]) -> None:
    """Raises for a program that is unknown, or whose package is not installed; imports none."""
    for name in names:
        if name not in LOGS:
            raise ConfigError(f"--log {name!r} is unknown; use {' or '.join(LOGS)}, or both with a comma")
        found = find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no package
            raise ConfigError(f"--log {name} needs one more package: pip install 'onefold[{name}]'")


class Logged(Listener):
    """Passes all on to another listener, and rows to other programs."""

    def __init__(self, run: Path, names: Sequence[str], listener: Listener) -> None:
        self._run, self._names, self._listener = run, names, listener
        self._logs: list[Log] = []

    def began(self, facts: dict[str, Any], step: int) -> None:
        self._logs = [LOGS[name](self._run, facts, step) for name in self._names]
        self._listener.began(facts, step)

    def stepped(self, step: int) -> None:
        self._listener.stepped(step)

    def row(self, row: Row) -> None:
        for log in self._logs:
            log.write(row.step, figures_of(row))
        self._listener.row(row)

    def warned(self, ranks: list[int], kind: str, message: str) -> None:
        self._listener.warned(ranks, kind, message)

    def ended(self) -> None:
        for log in self._logs:
            log.close()
        self._listener.ended()
