"""The ZeRO paper's figures 2 to 4 in kind, from the planner: a model, not a measurement.

    python benchmarks/scaling.py                              # tables
    python benchmarks/scaling.py --draw docs/img/scaling.png  # and the picture in docs/planning.md

V100s of 32 GB, 16 to a node, as the paper's were; stage 2 (P_os+g), block inputs shared among tensor-parallel ranks
(P_a); the paper's shapes and tensor-parallel degrees. Compute is flops over 33% of the peak whatever the batch, so the
curves say what memory and links do, and not how well small products fill a GPU.

The baseline (tensor parallelism over several nodes, no ZeRO) hangs on how many of a node's eight interfaces one ring
uses: both ends are given.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cost.hardware import Hardware, hardware
from onefold.cost.search import Question
from onefold.cost.shapes import PAPER
from onefold.cost.work import Work
from onefold.optim.elementwise import cost_of
from onefold.planner.throughput import RANKS, STATED, Point, at, expected, scaling
from onefold.settings.widths import Widths

MIXED, ADAM = Widths(compute=2, wire=2, grad=2, master=4), cost_of("adamw")
V100 = hardware("v100-32")
ONE_RING = dataclasses.replace(V100, nics=1)  # one interface of each node
SIZES = ("1.5b", "8b", "40b", "60b", "80b", "100b", "120b", "140b", "170b")
WIDE = {64: "60b-wide-64", 128: "60b-wide-128", 256: "60b-wide-256", 400: "60b-wide"}
ALONE = ("1.5b-dp", "2.5b-dp", "4b-dp", "6b-dp", "8b-dp", "10b-dp", "11b-dp", "12b-dp", "13b-dp")
PLAIN = ("1.16b-ddp", "1.38b-ddp")
BLUE, ORANGE, GREEN, GREY, RED = "#3b6ea5", "#e0913b", "#5f9e6e", "#9a9a9a", "#c95d63"
INK = "#333333"
CROSS = {"linestyle": "", "marker": "x", "color": RED, "markersize": 9, "markeredgewidth": 2}


def asked(name: str, machine: Hardware = V100, *, largest: bool = False) -> Question:
    run = PAPER[name]
    return Question(
        work=Work(widths=MIXED, shape=run.shape), ranks=run.ranks, hardware=machine, cost=ADAM, tp=run.tp,
        batch=None if largest else run.batch, activations=None if run.zero else "checkpoint",
    )  # fmt: skip


class Sized(NamedTuple):
    """One of figure 2's sizes: each rank's TFLOP/s."""

    name: str
    billions: float
    zero: float
    baseline: tuple[float, float]  # with one interface of a node, and with all


class Figures(NamedTuple):
    """What the paper's figures show, as modelled."""

    sizes: list[Sized]  # figure 2
    by_ranks: dict[str, list[Point]]  # the same models over numbers of ranks, at the largest batch that fits
    fitting: list[Point]  # figure 3: 60B at the largest batch that fits
    papers: list[Point]  # and at the paper's batches
    alone: list[tuple[str, Point]]  # figure 4: data parallelism alone
    plain: list[tuple[str, Point]]  # and without ZeRO


def modelled() -> Figures:
    return Figures(
        [_sized(name) for name in SIZES],
        {name: _over_ranks(name) for name in SIZES},
        expected(asked("60b-wide", largest=True), 2, WIDE),
        [_at(name, 2) for name in WIDE.values()],
        [(name, _at(name, 2)) for name in ALONE],
        [(name, _at(name, 0)) for name in PLAIN],
    )


def _at(name: str, stage: int, machine: Hardware = V100) -> Point:
    point = at(asked(name, machine), stage)
    assert point is not None, f"{name} ran in the paper and does not fit here"
    return point


def _sized(name: str) -> Sized:
    low, high = (_at(f"{name}-mp", 0, machine).tflops for machine in (ONE_RING, V100))
    return Sized(name, PAPER[name].shape.numel / 1e9, _at(name, 2).tflops, (low, high))


def _over_ranks(name: str) -> list[Point]:
    question = asked(name, largest=True)
    return expected(question, 2, [ranks for ranks in (*RANKS[:-2], 400, *RANKS[-2:]) if ranks % PAPER[name].tp == 0])


# -- tables -----------------------------------------------------------------------------------------------------------


def show(found: Figures) -> None:
    print(f"TFLOP/s of each GPU ({STATED})")
    print("\nfigure 2, 400 GPUs: size, ZeRO, baseline with 1 and with 8 interfaces, ratio")
    for row in found.sizes:
        low, high = row.baseline
        ratio = f"{row.zero / high:.1f} to {row.zero / low:.1f}x"
        print(f"  {row.name:>5}{row.zero:>8.1f}{low:>8.1f}{high:>8.1f}   {ratio}")
    print("\nfigure 3, 60B: GPUs, batch, TFLOP/s, to linear; then with the paper's batches")
    rows = zip(found.fitting, scaling(found.fitting), found.papers, scaling(found.papers), strict=True)
    for one, ratio, papers, theirs in rows:
        ours = f"{one.ranks:>6}{one.batch:>6}{one.tflops:>8.1f}{ratio:>8.3f}"
        print(f"  {ours}     {papers.batch:>6}{papers.tflops:>8.1f}{theirs:>8.3f}")
    print("\nfigure 4, 128 GPUs, no model parallelism: size, batch, TFLOP/s")
    for name, point in found.alone + found.plain:
        print(f"  {name:>10}{point.batch:>5}{point.tflops:>8.1f}")


def as_dict(found: Figures) -> dict[str, Any]:
    def rows(points: list[Point]) -> list[dict[str, Any]]:
        return [{"ranks": p.ranks, "batch": p.batch, "tflops": p.tflops, "step_s": p.step.total} for p in points]

    return {
        "note": STATED,
        "sizes": [row._asdict() for row in found.sizes],
        "by_ranks": {name: rows(points) for name, points in found.by_ranks.items()},
        "60b": {"fitting": rows(found.fitting), "papers": rows(found.papers)},
        "alone": {name: rows([point])[0] for name, point in found.alone + found.plain},
    }


# -- the picture ------------------------------------------------------------------------------------------------------


def draw(path: Path, found: Figures) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK})
    figure, panels = pyplot.subplots(2, 2, figsize=(12, 8.6), layout="constrained")
    figure.suptitle(f"Expected throughput on V100s of 32 GB, 16 to a node: {STATED}", fontsize=13)
    _draw_ranks(panels[0, 0], found)
    _draw_sizes(panels[0, 1], found)
    _draw_60b(panels[1, 0], found)
    _draw_alone(panels[1, 1], found)
    for axes in panels.flat:
        axes.grid(axis="y", alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_ranks(axes: Any, found: Figures) -> None:
    import matplotlib

    colours = matplotlib.colormaps["viridis"]
    for index, (name, points) in enumerate(found.by_ranks.items()):
        colour = colours(0.92 - 0.92 * index / (len(found.by_ranks) - 1))
        numbers, rates = [p.ranks for p in points], [p.tflops for p in points]
        axes.plot(numbers, rates, "o-", markersize=3.5, linewidth=1.5, color=colour, label=name.upper())
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(25, 43)
    axes.set(xlabel="GPUs", ylabel="TFLOP/s of each GPU", title="Stage 2 at the largest batch that fits")
    axes.legend(frameon=False, ncols=3, fontsize=8.5, loc="lower left")


def _draw_sizes(axes: Any, found: Figures) -> None:
    places = range(len(found.sizes))
    low, high = ([row.baseline[end] for row in found.sizes] for end in (0, 1))
    axes.bar(places, [b - a for a, b in zip(low, high)], 0.5, bottom=low, color=GREY, alpha=0.55, zorder=2,
             label="without ZeRO: from one interface\nper ring to all eight of a node")  # fmt: skip
    axes.plot(places, [row.zero for row in found.sizes], "D", color=BLUE, markersize=7, label="stage 2", zorder=3)
    axes.plot([SIZES.index("100b"), SIZES.index("40b")], [38, 5], label="measured in the paper", zorder=4, **CROSS)
    axes.set_xticks(list(places), [row.name.upper() for row in found.sizes])
    axes.set_ylim(0, 44)
    axes.set(xlabel="parameters", ylabel="TFLOP/s of each GPU", title="400 GPUs, the paper's batches (figure 2)")
    axes.legend(frameon=False, fontsize=8.5, loc="upper right", bbox_to_anchor=(1, 0.71))


def _draw_60b(axes: Any, found: Figures) -> None:
    curves = ((found.fitting, BLUE, "largest batch that fits"), (found.papers, ORANGE, "the paper's batches"))
    for points, colour, label in curves:
        numbers, ratios = [p.ranks for p in points], scaling(points)
        axes.plot(numbers, ratios, "o-", color=colour, label=label)
        for point, ratio in zip(points, ratios, strict=True):
            if ratio > 1:
                axes.annotate(f"batch {point.batch}", (point.ranks, ratio), (0, 7), textcoords="offset points",
                              ha="center", fontsize=8.5, color=colour)  # fmt: skip
    first = (found.fitting[0].batch, found.papers[0].batch)
    axes.annotate(f"batch {first[0]}, {first[1]}", (64, 1), (-10, -15), textcoords="offset points", ha="left",
                  fontsize=8.5)  # fmt: skip
    axes.axhline(1, color=INK, linewidth=1, linestyle="--")
    axes.annotate("in proportion to GPUs", (400, 1), (0, -13), textcoords="offset points", ha="right", fontsize=8.5)
    axes.set_xlim(40, 425)
    axes.set_ylim(0.985, 1.075)
    axes.set_xticks([point.ranks for point in found.fitting])
    axes.set(xlabel="GPUs", ylabel="throughput over linear", title="60B, stage 2, 16-way tensor parallel (figure 3)")
    axes.legend(frameon=False, loc="upper left")


def _draw_alone(axes: Any, found: Figures) -> None:
    for rows, colour, marker, label in (
        (found.alone, BLUE, "D", "stage 2"),
        (found.plain, GREY, "s", "plain data parallelism"),
    ):
        sizes, rates = [PAPER[name].shape.numel / 1e9 for name, _ in rows], [point.tflops for _, point in rows]
        axes.plot(sizes, rates, marker, color=colour, markersize=7, label=label, zorder=3)
        for (_, point), size, rate in zip(rows, sizes, rates, strict=True):
            axes.annotate(f"{point.batch}", (size, rate), (0, 8), textcoords="offset points", ha="center", fontsize=8.5)
    ends = [PAPER[name].shape.numel / 1e9 for name in ("13b-dp", "1.38b-ddp")]
    axes.plot(ends, [40, 20], label="measured in the paper: above 40, below 20", zorder=4, **CROSS)
    axes.set_ylim(0, 46)
    axes.set_xlim(0, 14)
    axes.annotate("numbers: sequences per GPU, the paper's", (0.3, 1.2), fontsize=8.5)
    axes.set(xlabel="billions of parameters", ylabel="TFLOP/s of each GPU",
             title="128 GPUs, data parallelism alone (figure 4)")  # fmt: skip
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.1), fontsize=8.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = modelled()
    if options.json:
        print(json.dumps(as_dict(found), indent=1))
    else:
        show(found)
    if options.draw:
        draw(options.draw, found)


if __name__ == "__main__":
    main()
