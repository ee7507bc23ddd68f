"""A plan as pictures: bytes by category, memory against traffic, memory and throughput against the number of ranks."""

from __future__ import annotations

import dataclasses
import html
import io
from pathlib import Path
from typing import Any

from onefold.cost.estimate import Choice
from onefold.cost.search import Question
from onefold.errors import ConfigError
from onefold.planner.plan import Plan
from onefold.planner.throughput import expected
from onefold.settings.placement import STAGES

GB = 1e9
PARTS = (
    ("parameters", "params_bytes", "#3b6ea5"), ("gradients", "peak_grads_bytes", "#e0913b"),
    ("optimizer", "optimizer_bytes", "#5f9e6e"), ("buffers", "buffers_bytes", "#9a9a9a"),
    ("gathered", "gathered_bytes", "#8e6bb0"), ("activations", "activations_bytes", "#c95d63"),
)  # fmt: skip
STAGE_COLOURS = ("#9a9a9a", "#3b6ea5", "#5f9e6e", "#c95d63")


def check_plot(path: Path) -> None:
    if path.suffix not in (".png", ".html"):
        raise ConfigError(f"--plot {path} is neither a .png nor an .html file")


def plotter() -> Any:
    """matplotlib, drawing into files."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'onefold[report]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(path: Path, plan: Plan, question: Question | None) -> None:
    """One picture, as .png or in an .html page of its own."""
    pyplot = plotter()
    figure, panels = pyplot.subplots(2, 2, figsize=(13, 9), layout="constrained")
    figure.suptitle(f"{plan.model} on {plan.ranks} × {plan.hardware.name}")
    _bars(panels[0, 0], plan)
    _against_traffic(panels[0, 1], plan)
    _against_ranks(panels[1, 0], plan, question)
    _throughput(panels[1, 1], question)
    save(path, figure, plan.model, str(plan))
    pyplot.close(figure)


def _bars(axes: Any, plan: Plan) -> None:
    bottoms = [0.0] * len(plan.stages)
    labels = [f"stage {row.stage}" for row in plan.stages]
    for name, field, colour in PARTS:
        heights = [getattr(row, field) / GB for row in plan.stages]
        axes.bar(labels, heights, bottom=bottoms, label=name, color=colour)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for index, top in enumerate(bottoms):
        axes.annotate(f"{top:.3g}", (index, top), ha="center", va="bottom")
    axes.axhline(plan.hardware.memory_bytes / GB, color="black", linestyle="--", linewidth=1, label="device memory")
    axes.set_ylim(0, max(bottoms) * 1.12)
    axes.set_ylabel("GB per device at the peak")
    axes.set_title("what fills memory")
    axes.legend(fontsize=8)


def _against_traffic(axes: Any, plan: Plan) -> None:
    rows = [*plan.stages, *plan.variants]
    for row in rows:
        axes.scatter(row.traffic_bytes / GB, row.peak_bytes / GB, color=STAGE_COLOURS[row.stage], s=50)
    for row in plan.stages:
        place = (row.traffic_bytes / GB, row.peak_bytes / GB)
        axes.annotate(f" stage {row.stage}", place, va="bottom")
    axes.axhline(plan.hardware.memory_bytes / GB, color="black", linestyle="--", linewidth=1)
    axes.set_yscale("log")
    axes.margins(x=0.2, y=0.15)
    axes.set_xlabel("GB sent by each rank in a step")
    axes.set_ylabel("GB per device at the peak")
    axes.set_title("memory against traffic")


def _against_ranks(axes: Any, plan: Plan, question: Question | None) -> None:
    axes.set_title("states against the number of ranks")
    if question is None:
        _nothing(axes, "for shapes and parameter counts")
        return
    step = (question.tp or 1) * question.pp * question.replica
    numbers = [step * 2**power for power in range(11)]
    for stage in STAGES:
        sizes = []
        for ranks in numbers:
            asked = dataclasses.replace(question, ranks=ranks)
            sizes.append(asked.price(Choice(stage), asked.grid(), 1).states.total / GB)
        axes.plot(numbers, sizes, marker="o", markersize=3, color=STAGE_COLOURS[stage], label=f"stage {stage}")
    axes.axhline(plan.hardware.memory_bytes / GB, color="black", linestyle="--", linewidth=1, label="device memory")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.set_ylabel("GB of states per device")
    axes.legend(fontsize=8)


def _throughput(axes: Any, question: Question | None) -> None:
    """Plots throughput per rank: more ranks leave more memory for the batch, and a larger batch waits less."""
    axes.set_title("throughput of each rank at its largest batch, as modelled")
    if question is None or not question.work.knows_activations:
        _nothing(axes, "needs a shape")
        return
    step = (question.tp or 1) * question.pp * question.replica
    for stage in (1, 2, 3):
        points = expected(question, stage, [step * 2**power for power in range(1, 10)])
        numbers, rates = [point.ranks for point in points], [point.tflops for point in points]
        axes.plot(numbers, rates, marker="o", markersize=3, color=STAGE_COLOURS[stage], label=f"stage {stage}")
    axes.set_xscale("log", base=2)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.9 * high), high * 1.02)  # a difference of a hair should look like one
    axes.set_xlabel("ranks")
    axes.set_ylabel("TFLOP/s per rank")
    axes.legend(fontsize=8)


def _nothing(axes: Any, why: str) -> None:
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes)
    axes.set_axis_off()


def save(path: Path, figure: Any, title: str, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            figure.savefig(path, dpi=110)
            return
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg")
        svg = drawn.getvalue()
        svg = svg[svg.index("<svg") :]
        path.write_text(
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
            f"<style>body{{font:15px sans-serif;margin:2em auto;max-width:1300px}}svg{{width:100%;height:auto}}"
            f"pre{{background:#f5f5f5;padding:1em;overflow:auto}}</style><h1>{html.escape(title)}</h1>{svg}"
            f"<pre>{html.escape(text)}</pre></html>\n"
        )
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror or error}") from error
