"""`onefold plan --scaling`: expected throughput against the number of ranks, as a table or JSON.

A model, not a measurement, and everything here says so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from onefold.cli.tables import console, print_table, seconds
from onefold.cost.search import Question, check_question
from onefold.errors import ConfigError
from onefold.planner.throughput import STATED, Point, expected, rank_counts, scaling

STAGES = (1, 2, 3)
HEADS = ("stage, ranks", "batch", "in all", "activations", "a step", "compute", "waits for links", "tp, sequence",
         "update", "TFLOP/s per rank", "samples/s", "to linear")  # fmt: skip


class Curve(NamedTuple):
    """One stage, over numbers of ranks."""

    stage: int
    points: list[Point]


def curves(question: Question, tp: int) -> list[Curve]:
    if question.work.shape is None:
        raise ConfigError("--scaling needs a shape: give --model, or --layers with --hidden and --heads")
    if not tp:
        raise ConfigError("--scaling is for one grid, and --tp 0 may mean several; give a --tp")
    check_question(question)
    numbers = rank_counts(question)
    return [Curve(stage, expected(question, stage, numbers)) for stage in STAGES]


def as_dict(name: str, question: Question, found: list[Curve]) -> dict[str, Any]:
    return {
        "note": STATED,
        "model": name,
        "parameters": question.work.parameters,
        "hardware": question.hardware.name,
        "tp": question.tp,
        "pp": question.pp,
        "curves": [{"stage": curve.stage, "points": _rows(curve)} for curve in found],
    }


def _rows(curve: Curve) -> list[dict[str, Any]]:
    return [
        {**point._asdict(), "step": point.step._asdict(), "step_s": point.step.total, "tflops": point.tflops,
         "to_linear": ratio}
        for point, ratio in zip(curve.points, scaling(curve.points), strict=True)
    ]  # fmt: skip


def show(name: str, question: Question, found: list[Curve]) -> None:
    screen, body = console(), []
    for curve in found:
        for point, ratio in zip(curve.points, scaling(curve.points), strict=True):
            step = point.step
            times = (step.total, step.compute, step.exposed, step.tensor, step.update + step.transfer + step.bubble)
            body.append(
                [f"{curve.stage}, {point.ranks}", point.batch, point.global_batch, point.activations,
                 *map(seconds, times), f"{point.tflops:.1f}", f"{point.samples_per_s:.4g}", f"{ratio:.3f}×"]
            )  # fmt: skip
        if not curve.points:
            body.append([f"{curve.stage}", "does not fit", *[""] * (len(HEADS) - 2)])
    title = f"expected throughput of {name} on {question.hardware.name} ({STATED})"
    print_table(screen, title, HEADS, body)
    screen.print(
        "batch: per replica, the largest that fits unless given; TFLOP/s count what is computed again; to linear: "
        "samples/s over the first row's, in proportion to ranks"
    )
