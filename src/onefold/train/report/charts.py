"""Charts of runs: drawn once, kept as a PNG in light colours and as an SVG whose colours follow the page.

An SVG goes into the page as it is, so it names no other file, has ids of its own, keeps its text as text (in the
page's font) and takes each colour from the CSS variable of the same name, which has a second value for the dark.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from onefold.errors import OnefoldError
from onefold.train.report.figures import LASTING, NAMES, Run, formula_memory, once_bytes, smooth, states_of, thin
from onefold.train.report.words import nbytes

# By day; page.py has each by night. Every colour is its own key in an SVG, so no two may be the same.
COLOURS = {
    "ink": "#1f2933", "soft": "#5b6773", "line": "#dde3ea",
    "parameters": "#3b6ea5", "gradients": "#d9822b", "optimizer": "#5f9e6e", "buffers": "#9a9a9b",
    "communication": "#8e6bb0", "activations": "#c95d63", "peak": "#7b8794",
    "train": "#3b6ea6", "val": "#c95d64", "base": "#8a94a0", "bar": "#3b6ea4",
    "run0": "#9aa5b1", "run1": "#3b6ea3", "run2": "#5f9e6f", "run3": "#c95d65", "run4": "#8e6bb1", "run5": "#d9822c",
}  # fmt: skip
RUNS = [name for name in COLOURS if name.startswith("run")]
WIDE, NARROW, SMALL, TALL = (9.4, 3.5), (4.7, 3.0), (3.4, 2.5), (3.4, 3.1)  # inches; a page enlarges them a little
STYLE: dict[Any, Any] = {
    "font.size": 8.5, "font.family": "DejaVu Sans", "svg.fonttype": "none", "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": COLOURS["line"], "axes.labelcolor": COLOURS["soft"],
    "text.color": COLOURS["ink"], "xtick.color": COLOURS["line"], "ytick.color": COLOURS["line"],
    "xtick.labelcolor": COLOURS["soft"], "ytick.labelcolor": COLOURS["soft"], "axes.grid": True,
    "grid.color": COLOURS["line"], "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
    "lines.solid_capstyle": "round", "lines.solid_joinstyle": "round", "lines.dash_capstyle": "butt",
    "axes.linewidth": 0.8, "text.parse_math": False,
}  # fmt: skip


class Chart(NamedTuple):
    """One picture in both forms, with what it shows in words."""

    name: str
    alt: str
    svg: str
    png: bytes


def chart(name: str, alt: str, draw: Callable[[Any], None], size: tuple[float, float] = NARROW) -> Chart:
    """Draw on one pair of axes."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OnefoldError("a report needs matplotlib: pip install 'onefold[report]'") from error
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": f"onefold-{name}"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run may have any figures and names: infinite, alike, in letters no font has
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.subplots())
        if (layout := figure.get_layout_engine()) is not None:
            layout.execute(figure)
        figure.set_layout_engine("none")  # once is enough for both forms
        vector, pixels = io.StringIO(), io.BytesIO()
        figure.savefig(vector, format="svg", transparent=True, metadata={"Date": None})
        figure.savefig(pixels, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return Chart(name, alt, for_page(vector.getvalue(), name, alt), pixels.getvalue())


def for_page(svg: str, name: str, alt: str) -> str:
    """An SVG file of matplotlib's as a part of a page."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    view = re.search(r'viewBox="([^"]*)"', body)
    inner = body[body.index(">") + 1 :]
    inner = inner.replace("xlink:href", "href")
    inner = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", inner)
    inner = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", inner)
    inner = re.sub(r"font-family: [^;\"]*;?", "", inner)
    for key, colour in COLOURS.items():
        inner = inner.replace(colour, f"var(--{key})")
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return f'<svg role="img" aria-label="{label}" viewBox="{view[1] if view else ""}">{inner}'


# -- one run -----------------------------------------------------------------------------------------------------------


def loss(run: Run, size: tuple[float, float] = NARROW) -> Chart:
    """Training, validation and the baseline."""
    train, val = run.series("loss"), run.series("val_loss")
    base = run.number("baseline", "bigram_val_loss")

    def draw(axes: Any) -> None:
        if train[0]:
            _curve(axes, *train, "train", "training")
        if val[0]:
            dots = "o" if len(val[0]) <= 40 else ""
            axes.plot(*thin(*val), color=COLOURS["val"], marker=dots, markersize=3, linewidth=1.6, label="validation")
        if base is not None:
            label = f"bigram baseline, {base:.3f}"
            axes.axhline(base, color=COLOURS["base"], linestyle=(0, (4, 3)), linewidth=1.2, label=label)
        _steps(axes)
        axes.set_ylabel("loss, nats per token")
        if axes.lines:
            axes.legend(loc="upper right")

    said = [f"training loss from {train[1][0]:.3f} to {train[1][-1]:.3f}"] if train[0] else ["no loss yet"]
    said += [f"validation loss from {val[1][0]:.3f} to {val[1][-1]:.3f}"] if val[0] else []
    said += [f"bigram baseline at {base:.3f}"] if base is not None else []
    return chart(f"loss{'-wide' if size == WIDE else ''}", f"Loss by step: {', '.join(said)}.", draw, size)


def trace(run: Run, key: str, title: str, unit: str, *, log: bool = False, noisy: bool = True) -> Chart | None:
    """One metric by step; None where it was not logged. What is noisy also gets a trend."""
    steps, values = run.series(key)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None

    def draw(axes: Any) -> None:
        _curve(axes, steps, values, "train", title, noisy=noisy)
        _steps(axes, 4)
        _thousands(axes, max(finite))
        axes.set_ylabel(unit)
        if log and min(finite) > 0:
            axes.set_yscale("log")
        elif min(finite) >= 0:
            axes.set_ylim(0, max(finite) * 1.08 or 1)

    said = f"{title} by step: from {finite[0]:.4g} to {finite[-1]:.4g}, at most {max(finite):.4g} {unit}."
    return chart(key.replace("_", "-"), said, draw, SMALL)


def clock(runs: Sequence[Run], size: tuple[float, float] = SMALL) -> Chart | None:
    """Training loss against the time on the clock; None for runs that did not write it down."""
    found = [(run, *thin(*run.clock("loss"))) for run in runs]
    if not any(len(minutes) > 1 and minutes[-1] > 0 for _, minutes, _ in found):
        return None
    scale, unit = _clock(max(minutes[-1] for _, minutes, _ in found if minutes))

    def draw(axes: Any) -> None:
        for place, (run, minutes, losses) in enumerate(found):
            colour = COLOURS["train"] if len(runs) == 1 else COLOURS[RUNS[place % len(RUNS)]]
            axes.plot([minute / scale for minute in minutes], losses, color=colour, linewidth=1.6, label=run.label)
        axes.set_xlabel(unit)
        axes.set_ylabel("nats per token")
        if len(runs) > 1:
            axes.legend(loc="upper right")

    ends = [f"{run.label} ends after {minutes[-1] / scale:.3g} {unit}" for run, minutes, _ in found if minutes]
    return chart("loss-clock", f"Training loss against the clock: {', '.join(ends)}.", draw, size)


def _clock(minutes: float) -> tuple[float, str]:
    """Minutes of a unit that suits so many, and its name."""
    units = ((1440.0, "days"), (60.0, "hours"), (1.0, "minutes"), (1 / 60, "seconds"))
    return next((unit for unit in units if minutes >= 2 * unit[0]), units[-1])


def against(name: str, found: dict[str, float], planned: dict[str, float], what: str, plan: str) -> Chart:
    """Measured bars with a mark where the plan is."""
    keys = [key for key in dict.fromkeys([*found, *planned]) if found.get(key) or planned.get(key)]
    scale, unit = _scale(max([*found.values(), *planned.values()], default=0))

    def draw(axes: Any) -> None:
        for place, key in enumerate(keys):
            size = found.get(key, 0)
            axes.barh(place, size / scale, height=0.56, color=COLOURS.get(key, COLOURS["bar"]), linewidth=0)
            ends = [size / scale]
            if key in planned:
                at = planned[key] / scale
                axes.plot([at, at], [place - 0.4, place + 0.4], color=COLOURS["ink"], linewidth=1.6)
                ends.append(at)
            axes.annotate(nbytes(size), (max(ends), place), (5, 0), textcoords="offset points", va="center")
        axes.plot([], [], color=COLOURS["ink"], linewidth=1.6, marker="", label=plan)
        axes.set_yticks(range(len(keys)), [NAMES.get(key, key) for key in keys])
        axes.tick_params(axis="y", length=0, labelcolor=COLOURS["ink"])
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.25)
        axes.set_xlim(left=0)
        axes.invert_yaxis()
        axes.set_xlabel(unit)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2)

    said = [f"{NAMES.get(key, key)} {nbytes(found.get(key, 0))}" for key in keys]
    marks = [f"{key} {nbytes(planned[key])}" for key in keys if key in planned]
    alt = f"{what}: {', '.join(said)}. {plan.capitalize()}: {', '.join(marks) or 'unknown'}."
    return chart(name, alt, draw, (NARROW[0], max(1.6, 0.75 + 0.34 * len(keys))))


# -- several runs ------------------------------------------------------------------------------------------------------


def curves(runs: Sequence[Run], size: tuple[float, float] = NARROW) -> Chart:
    """Losses on top of each other, each in dashes that fill the gaps of the others: where they coincide, one striped
    line."""

    def draw(axes: Any) -> None:
        dash = 3.0
        for place, run in enumerate(runs):
            style = (-place * dash, (dash, dash * (len(runs) - 1))) if len(runs) > 1 else "-"
            colour = COLOURS[RUNS[place % len(RUNS)]]
            axes.plot(*thin(*run.series("loss")), color=colour, linestyle=style, linewidth=2.2, label=run.label)
        _steps(axes)
        axes.set_ylabel("training loss, nats per token")
        for line in axes.legend(loc="upper right").get_lines():
            line.set_linestyle("-")

    said = [f"{run.label} ends at {run.last('loss'):.6g}" for run in runs if run.last("loss") is not None]
    return chart(f"curves{'-wide' if size == WIDE else ''}", f"Loss by step: {', '.join(said)}.", draw, size)


def stacks(runs: Sequence[Run]) -> Chart:
    """What each run holds between steps, with a mark where the formula puts its states."""
    scale, unit = _scale(max(sum(_parts(run).values()) for run in runs))

    def draw(axes: Any) -> None:
        tops = [0.0] * len(runs)
        for category in [c for c in LASTING if any(_parts(run).get(c) for run in runs)]:
            heights = [_parts(run).get(category, 0) / scale for run in runs]
            axes.bar(
                range(len(runs)),
                heights,
                0.62,
                bottom=tops,
                color=COLOURS[category],
                label=NAMES.get(category, category),
                linewidth=0,
            )
            tops = [top + height for top, height in zip(tops, heights, strict=True)]
        for place, run in enumerate(runs):
            if formula := sum(formula_memory(run).values()):
                line = [place - 0.39, place + 0.39]
                label = "states by formula" if place == 0 else None
                axes.plot(line, [formula / scale] * 2, color=COLOURS["ink"], linewidth=1.6, label=label)
        _columns(axes, runs, tops, unit)

    said = [f"{run.label} {nbytes(sum(_parts(run).values()))}, states {nbytes(states_of(_parts(run)))}" for run in runs]
    return chart("memory", f"Memory per rank between steps: {'; '.join(said)}.", draw, TALL)


def bars(runs: Sequence[Run], name: str, what: str, measure: Callable[[Run], float | None], unit: str) -> Chart | None:
    """One figure of each run."""
    values = [measure(run) for run in runs]
    if not any(values):
        return None
    scale, unit = _scale(max(value or 0 for value in values)) if unit == "bytes" else (1.0, unit)

    def draw(axes: Any) -> None:
        tops = [(value or 0) / scale for value in values]
        colours = [COLOURS[RUNS[place % len(RUNS)]] for place in range(len(runs))]
        axes.bar(range(len(runs)), tops, 0.62, color=colours, linewidth=0)
        _columns(axes, runs, tops, unit)
        once = once_bytes(runs[0])
        if name == "traffic" and once:
            _multiples(axes, once / scale)

    said = [f"{run.label} {(value or 0) / scale:.4g}" for run, value in zip(runs, values, strict=True)]
    return chart(name, f"{what}, in {unit}: {'; '.join(said)}.", draw, TALL)


# -- parts of charts ---------------------------------------------------------------------------------------------------


def _curve(axes: Any, steps: list[int], values: list[float], colour: str, label: str, *, noisy: bool = True) -> None:
    """Every point, and over a long and noisy run the trend on top of them."""
    finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if len(finite) < 100 or not noisy:
        axes.plot(*thin(steps, values), color=COLOURS[colour], linewidth=1.6, label=label)
        return
    axes.plot(*thin(steps, values), color=COLOURS[colour], linewidth=0.8, alpha=0.35)
    trend = smooth([value for _, value in finite])
    axes.plot(*thin([step for step, _ in finite], trend), color=COLOURS[colour], linewidth=1.6, label=label)


def _steps(axes: Any, ticks: int = 6) -> None:
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.tick_params(length=0)


def _thousands(axes: Any, largest: float) -> None:
    from matplotlib.ticker import StrMethodFormatter

    if largest >= 2000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _columns(axes: Any, runs: Sequence[Run], tops: Sequence[float], unit: str) -> None:
    for place, top in enumerate(tops):
        axes.annotate(f"{top:.3g}", (place, top), (0, 3), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(runs)), [run.label for run in runs])
    axes.tick_params(length=0, axis="both")
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, max(tops) * 1.14 or 1)
    axes.set_ylabel(unit)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="lower right", bbox_to_anchor=(1, 1.02), ncols=2, borderaxespad=0, columnspacing=1.2, fontsize=7.5
        )


def _multiples(axes: Any, once: float) -> None:
    """A second scale: how often all parameters moved."""
    from matplotlib.ticker import MultipleLocator

    axes.set_ylim(0, max(axes.get_ylim()[1], 3.2 * once))
    right = axes.secondary_yaxis("right", functions=(lambda y: y / once, lambda y: y * once))
    right.yaxis.set_major_locator(MultipleLocator(1))
    right.tick_params(length=0)
    right.set_ylabel("in Ψ(N-1)/N")
    right.spines["right"].set_visible(False)
    for count in (1, 2, 3):
        axes.axhline(count * once, color=COLOURS["soft"], linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
    axes.grid(visible=False)


def _parts(run: Run) -> dict[str, float]:
    return {key: size for key, size in run.held().items() if key in LASTING}


def _scale(largest: float) -> tuple[float, str]:
    """So that the largest has one to three digits before the point."""
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB"), (3, "kB")):
        if largest >= 10**power:
            return 10.0**power, unit
    return 1.0, "bytes"
