"""Draws stages.svg: bytes of training state on each rank, by stage, from the formulas.

python docs/img/stages.py [FILE]
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import Patch

RANKS = 8
BYTES = {"parameters": 4, "gradients": 4, "optimizer state": 8}  # per parameter: fp32 Adam
SHARDED_FROM = {"parameters": 3, "gradients": 2, "optimizer state": 1}  # the first stage that shards it
COLOURS = {"parameters": "#2b6cb0", "gradients": "#c76f17", "optimizer state": "#5f8450"}
NAMES = {
    0: "everything on every rank",
    1: "optimizer sharded",
    2: "+ gradients sharded",
    3: "+ parameters sharded",
}
INK, SOFT = "#1f2933", "#66727f"


def per_rank(state: str, stage: int) -> float:
    """Bytes per parameter of the model."""
    return BYTES[state] / (RANKS if stage >= SHARDED_FROM[state] else 1)


def draw(file: Path) -> None:
    plt.rcParams.update({"font.family": "DejaVu Sans", "svg.hashsalt": "onefold", "text.color": INK})
    figure, axes = plt.subplots(figsize=(9.2, 3.9))
    whole = sum(BYTES.values())
    for stage, name in NAMES.items():
        left = 0.0
        for state, colour in COLOURS.items():
            width = per_rank(state, stage)
            axes.barh(stage, width, left=left, height=0.58, color=colour, edgecolor="white", linewidth=1.6)
            if width >= 1:
                axes.text(left + width / 2, stage, f"{width:g}Ψ", ha="center", va="center", color="white", fontsize=10)
            left += width
        total = axes.annotate(
            f"{left:g}Ψ", (left, stage), (9, 0), textcoords="offset points", va="center", fontsize=13, fontweight="bold"
        )
        if stage:
            less = f"{round(whole / left, 1):g}× less"
            axes.annotate(less, (1, 0.5), (9, 0), total, textcoords="offset points", va="center", color=SOFT)
        axes.text(-0.3, stage - 0.13, f"stage {stage}", ha="right", va="center", fontsize=12, fontweight="bold")
        axes.text(-0.3, stage + 0.19, name, ha="right", va="center", fontsize=9, color=SOFT)
    axes.set_xlim(-0.1, whole + 1.6)
    axes.invert_yaxis()
    axes.axis("off")
    figure.suptitle(
        f"Bytes of training state on each of {RANKS} ranks", x=0.03, y=0.965, ha="left", fontsize=15, fontweight="bold"
    )
    figure.text(0.03, 0.855, "Ψ = number of parameters; fp32 with Adam", fontsize=10, color=SOFT)
    figure.legend(
        handles=[Patch(color=colour, label=state) for state, colour in COLOURS.items()],
        loc="upper right", bbox_to_anchor=(0.985, 0.935), ncols=3, frameon=False, fontsize=10, handlelength=1.0,
        columnspacing=1.4, handletextpad=0.5,
    )  # fmt: skip
    figure.subplots_adjust(left=0.22, right=0.985, top=0.80, bottom=0.02)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None, dpi=130, facecolor="white")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
