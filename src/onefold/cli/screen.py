"""Progress of a run: a live line on a terminal, one line per logged step elsewhere."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from onefold.cost.text import format_bytes, format_seconds
from onefold.errors import visible
from onefold.train.run.metrics import Listener, Row

BAR, WIDE = 20, 120  # columns of the bar, and of the terminal from which there is one


class PipeConsole(Console):
    """A console that stops printing when the reader of its pipe has gone (… | head), which must not end a run."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  what is left in its buffer goes there


class Screen(Listener):
    """What rank 0 prints about a run."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._console = PipeConsole(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None

    def began(self, facts: dict[str, Any], step: int) -> None:
        model, base = facts["model"], facts["baseline"]["bigram_val_loss"]
        ranks = f"{facts['ranks']} rank{'s' * (facts['ranks'] > 1)}"
        self._say(
            f"{model['name']}: {model['parameters']:,} parameters at stage {facts['stage']} on {ranks} "
            f"({facts['device']}, {facts['precision']}), {facts['tokens_per_step']:,} tokens a step"
        )
        self._say(
            f"{facts['data']['source']}: {facts['data']['train_tokens']:,} tokens to train on, "
            f"{facts['data']['val_tokens']:,} to validate" + (f"; bigram loss {base:.4f}" if base else "")
        )
        if left_out := facts["data"]["left_out"]:
            self._say(f"left out of {facts['data']['source']}: {left_out}")
        if step:
            self._say(f"resumes after step {step}")
        if self._console.is_terminal:
            columns: list[ProgressColumn] = [TextColumn("step"), MofNCompleteColumn(), TimeRemainingColumn()]
            columns += [BarColumn(BAR)] if self._console.width >= WIDE else []
            columns.append(TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task("", total=self._steps, completed=step)
            self._progress.start()

    def stepped(self, step: int) -> None:
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def row(self, row: Row) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=shortened(figures(row, memory=True), self._room()))
        if self._progress is None or row.val_loss is not None:
            left = format_seconds(math.ceil((self._steps - row.step) * row.step_s))
            left = f"{left} left" if row.step < self._steps else "done"
            self._say(f"step {row.step:>6}/{self._steps}  {figures(row, memory=False)}  {left}")

    def _room(self) -> int:
        """Columns of the live line that are left for figures, beside step, time and bar."""
        taken = len("step ") + 2 * len(str(self._steps)) + 2 + len("0:00:00 ")
        return self._console.width - taken - (BAR + 1 if self._console.width >= WIDE else 0)

    def warned(self, ranks: list[int], kind: str, message: str) -> None:
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        self._say(f"warning ({kind}, {who}): {message}")

    def ended(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _say(self, text: str) -> None:
        self._console.print(visible(text), markup=False)
        try:
            sys.stdout.flush()
        except OSError:
            self._console.on_broken_pipe()


def shortened(text: str, room: int) -> str:
    """As many of the figures, which two spaces part, as there is room for.

    >>> shortened("loss 2.0000  lr 1.00e-03  10 tok/s", 24)
    'loss 2.0000  lr 1.00e-03'
    """
    while len(text) > room and "  " in text:
        text = text.rpartition("  ")[0]
    return text


def figures(row: Row, *, memory: bool) -> str:
    parts = [f"loss {row.loss:.4f}"]
    if row.val_loss is not None and row.val_ppl is not None:
        parts.append(f"val {row.val_loss:.4f} (ppl {row.val_ppl:.2f})")
    parts += [f"{row.tokens_per_s:,.0f} tok/s", f"lr {row.lr:.2e}"]
    if not math.isnan(row.grad_norm):  # updated in backward: there is no global norm
        parts.append(f"norm {row.grad_norm:.3f}")
    if row.mfu is not None:
        parts.append(f"MFU {row.mfu:.1%}")
    if row.loss_scale is not None:
        parts.append(f"scale {row.loss_scale:g}")
    if memory:
        short = {"parameters": "par", "gradients": "grad", "optimizer": "opt", "communication": "comm"}
        parts.append(" ".join(f"{name} {format_bytes(row.memory[key] or 0)}" for key, name in short.items()))
    elif row.memory["peak"]:
        parts.append(f"peak {format_bytes(row.memory['peak'])}")
    return "  ".join(parts)
