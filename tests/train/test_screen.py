"""What a line on the screen says of a step, and what it leaves out."""

import io
import math

import pytest
from rich.progress import Progress

from onefold.cli.screen import PipeConsole, Screen, figures, shortened
from onefold.train.run.metrics import Row


def row(**fields):
    known = dict.fromkeys(Row._fields) | {
        "step": 1, "loss": 2.0, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_s": 10.0, "memory": {"peak": None},
    }  # fmt: skip
    return Row(**{**known, **fields})


def test_a_norm_that_nobody_could_know_is_left_out():
    assert "norm 0.500" in figures(row(), memory=False)
    assert "nan" not in figures(row(grad_norm=math.nan), memory=False)
    assert "norm inf" in figures(row(grad_norm=math.inf), memory=False), "a step of fp16 that was skipped"


FACTS = {
    "model": {"name": "gpt-tiny", "parameters": 10}, "baseline": {"bigram_val_loss": None}, "ranks": 2, "stage": 3,
    "device": "cpu", "precision": "fp32", "tokens_per_step": 8,
    "data": {"source": "text", "train_tokens": 5, "val_tokens": 5, "left_out": ""},
}  # fmt: skip
BYTES = dict.fromkeys(("parameters", "gradients", "optimizer", "communication", "peak"), 123456789)


class Terminal(Screen):
    """A screen of a given width whose output can be read."""

    def __init__(self, columns: int, *, terminal: bool = True) -> None:
        super().__init__(steps=1000)
        self.out = io.StringIO()
        self._console = PipeConsole(
            file=self.out, width=columns, force_terminal=terminal, highlight=False, color_system=None, soft_wrap=True
        )

    def live(self) -> str:
        """The live line as it is drawn now."""
        progress = self._progress
        assert isinstance(progress, Progress)
        lines = self._console.render_lines(progress.get_renderable(), pad=False)
        return "\n".join("".join(segment.text for segment in line) for line in lines)


@pytest.mark.parametrize("columns", [60, 80, 180])
def test_the_live_line_keeps_step_and_time_left_whatever_the_width(columns):
    screen = Terminal(columns)
    screen.began(FACTS, 0)
    screen.row(row(step=500, step_s=0.5, mfu=0.4, loss_scale=1024.0, val_loss=None, memory=BYTES))
    screen.stepped(500)
    line = screen.live().rstrip()
    screen.ended()
    assert "\n" not in line and len(line) <= columns
    assert line.startswith("step  500/1000") and ":" in line and "loss 2.0000" in line and "…" not in line
    assert ("par 123 MB" in line) == (columns == 180)


def test_figures_are_left_out_from_the_end_and_never_cut():
    text = "loss 2.0000  10 tok/s  lr 1.00e-03"
    assert [shortened(text, room) for room in (99, 25, 12, 3)] == [
        text, "loss 2.0000  10 tok/s", "loss 2.0000", "loss 2.0000",
    ]  # fmt: skip


def test_the_time_left_is_told_in_minutes():
    screen = Terminal(80, terminal=False)
    screen.began(FACTS, 0)
    screen.row(row(step=460, step_s=0.5))
    screen.row(row(step=1000, step_s=0.5))
    said = screen.out.getvalue()
    assert "  4 min 30 s left\n" in said and said.endswith("  done\n")
