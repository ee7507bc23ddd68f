"""What a line on the screen says of a step, and what it leaves out."""

import math

from onefold.cli.screen import figures
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
