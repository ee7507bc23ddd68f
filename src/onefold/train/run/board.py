"""The rows of a run as TensorBoard files, for those who have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onefold.errors import ConfigError
from onefold.train.run.metrics import Listener, Row


def check_board() -> None:
    try:
        import tensorboard  # noqa: F401
    except ImportError as error:
        raise ConfigError("--tensorboard needs one more package: pip install tensorboard") from error


class Board(Listener):
    """Passes all on to another listener, and writes rows."""

    def __init__(self, folder: Path, listener: Listener) -> None:
        self._folder, self._listener = folder, listener
        self._writer: Any = None

    def began(self, facts: dict[str, Any], step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1)
        self._listener.began(facts, step)

    def stepped(self, step: int) -> None:
        self._listener.stepped(step)

    def row(self, row: Row) -> None:
        for name, value in row._asdict().items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(name, value, row.step)
        self._listener.row(row)

    def warned(self, ranks: list[int], kind: str, message: str) -> None:
        self._listener.warned(ranks, kind, message)

    def ended(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._listener.ended()
