"""What sweep.py found, as one picture: docs/img/sweep.png."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MIB = 1 << 20
BLUE, ORANGE, GREEN, RED, GREY, INK = "#3b6ea5", "#e0913b", "#5f9e6e", "#c95d63", "#9a9a9a", "#333333"
STAGES = {2: BLUE, 3: RED}


def draw(folder: Path, picture: Path) -> None:
    """Panels for what was measured: the GPU's are left out where it was not."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 10, "axes.edgecolor": INK, "axes.labelcolor": INK, "text.color": INK})
    cpu = json.loads((folder / "sweep-cpu.json").read_text())
    gpu = json.loads((folder / "sweep-gpu.json").read_text()) if (folder / "sweep-gpu.json").exists() else None
    figure, panels = pyplot.subplots(2, 3, figsize=(14, 7.6), layout="constrained")
    where = f"two gloo ranks on {cpu['cores']} cores ({cpu['cpu']}), torch {cpu['torch']}"
    figure.suptitle(f"bucket_bytes and prefetch: {where}; the default is 32 MiB", fontsize=12)
    _alone(panels[0, 0], cpu)
    _steps(panels[0, 1], cpu)
    _memory(panels[0, 2], cpu)
    _waits(panels[1, 0], cpu)
    _ahead(panels[1, 1], cpu)
    if gpu:
        _copies(panels[1, 2], gpu)
    else:
        panels[1, 2].set_axis_off()
    for axes in panels.flat:
        axes.grid(axis="y", alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def _alone(axes: Any, found: dict[str, Any]) -> None:
    sizes = [row["unit_bytes"] / MIB for row in found["alone"]]
    for name, colour in (("gather", BLUE), ("reduce", ORANGE)):
        axes.plot(sizes, [row[f"{name}_bytes_per_s"] / 1e9 for row in found["alone"]], "o-", color=colour, label=name)
    _sizes(axes, found, "unit", "GB/s sent by each rank", "A unit alone: bandwidth")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")


def _steps(axes: Any, found: dict[str, Any]) -> None:
    for stage, colour in STAGES.items():
        rows = [row for row in found["buckets"] if row["stage"] == stage]
        sizes, ratios = [row["bucket_bytes"] / MIB for row in rows], [row["to_default"] for row in rows]
        low, high = ([row["quartiles"][end] for row in rows] for end in (0, 1))
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(sizes, ratios, "o-", color=colour, label=f"stage {stage}")
    axes.axhline(1, color=GREY, linewidth=1)
    _sizes(axes, found, "bucket_bytes", "step, to that of the default", "A step: time (band: quartiles)")
    axes.legend(frameon=False, loc="upper right")


def _memory(axes: Any, found: dict[str, Any]) -> None:
    for stage, colour in STAGES.items():
        rows = [row for row in found["buckets"] if row["stage"] == stage]
        sizes = [row["bucket_bytes"] / MIB for row in rows]
        for field, style, label in (("beyond_states_bytes", "o-", "at the peak"), ("buffers_bytes", "o:", "buffers")):
            amounts = [row[field] / 1e6 for row in rows]
            axes.plot(sizes, amounts, style, color=colour, markersize=4, label=f"stage {stage}, {label}")
    _sizes(axes, found, "bucket_bytes", "MB per rank, states not counted", "A step: memory")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left", fontsize=8.5)


def _waits(axes: Any, found: dict[str, Any]) -> None:
    for stage, colour in STAGES.items():
        rows = [row for row in found["buckets"] if row["stage"] == stage]
        rates = [row["sent_per_waited_s"] / 1e9 for row in rows]
        axes.plot([row["bucket_bytes"] / MIB for row in rows], rates, "o-", color=colour, label=f"stage {stage}")
    _sizes(axes, found, "bucket_bytes", "GB/s: bytes sent over time waited", "A step: bandwidth, with what is hidden")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")


def _ahead(axes: Any, found: dict[str, Any]) -> None:
    rows = found["prefetch"]
    places, ratios = [row["prefetch"] for row in rows], [row["to_default"] for row in rows]
    errors = [[abs(row["to_default"] - row["quartiles"][end]) for row in rows] for end in (0, 1)]
    colours = [RED if place == 1 else GREY for place in places]
    axes.bar(places, ratios, 0.55, color=colours, yerr=errors, error_kw={"ecolor": INK, "linewidth": 1})
    for row in rows:
        axes.annotate(f"{row['beyond_states_bytes'] / 1e6:.0f} MB", (row["prefetch"], 0), (0, 5), ha="center",
                      textcoords="offset points", color="white", fontsize=9)  # fmt: skip
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_xticks(places)
    axes.set(xlabel="prefetch (1 is the default); inside: memory beyond states", ylabel="step, to that of the default",
             title=f"Stage 3, units of {rows[0]['bucket_bytes'] // MIB} MiB: look-ahead")  # fmt: skip


def _copies(axes: Any, found: dict[str, Any]) -> None:
    sizes = [row["piece_bytes"] / MIB for row in found["copies"]]
    for name, colour, label in (
        ("across", GREEN, "device to device"), ("up", BLUE, "host to device"), ("down", ORANGE, "device to host"),
    ):  # fmt: skip
        rates = [row[f"{name}_bytes_per_s"] / 1e9 for row in found["copies"]]
        axes.plot(sizes, rates, "o-", color=colour, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    _sizes(axes, found, "piece", "GB/s copied", f"Copies on a GPU ({found['gpu']})")
    axes.legend(frameon=False, loc="lower right")


def _sizes(axes: Any, found: dict[str, Any], what: str, label: str, title: str) -> None:
    """Sizes along x, with the default marked."""
    axes.set_xscale("log", base=4)
    ticks = [size for size in (1 / 16, 1 / 4, 1, 4, 16, 64, 256) if size >= axes.get_xlim()[0]]
    axes.set_xticks(ticks, [f"{size * 1024:.0f} Ki" if size < 1 else f"{size:.0f} Mi" for size in ticks])
    axes.minorticks_off()
    axes.axvline(found["default_bucket_bytes"] / MIB, color=INK, linewidth=1, linestyle="--")
    axes.set(xlabel=f"{what} (bytes; dashed: the default)", ylabel=label, title=title)
