"""The charts of a plan's page: bars of stages, memory over a step, throughput against ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from onefold.cost.text import format_bytes, format_seconds
from onefold.planner.page.svg import (
    LINE,
    NARROW,
    Box,
    bytes_axis,
    circle,
    drawing,
    line,
    nice,
    polygon,
    polyline,
    rect,
    seconds_axis,
    short,
    words,
)
from onefold.planner.page.timeline import Moment, Timeline
from onefold.planner.page.view import PARTS, Bar, Curve, Speed

OVER_TIME = (  # field of a Moment, name: the lowest first
    ("parameters", "Parameters"), ("optimizer", "Optimizer state"), ("gradients", "Gradients"),
    ("gathered", "Unsharded parameters"), ("buffers", "Buffers"), ("activations", "Activations"),
)  # fmt: skip
LETTER = 7  # width of one, about
CLOSE = 5  # times a device's memory: longer bars end in an arrow, or the others would be lines


def bars(found: Sequence[Bar], memory_bytes: int, width: int) -> str:
    """A bar for each choice, of what fills a device; the device's memory is a line through all of them, with gaps where
    it would cross words."""
    rows = sorted(found, key=lambda bar: bar.label)
    whole = max(memory_bytes * 1.02, min(max(bar.peak_bytes for bar in rows), CLOSE * memory_bytes))
    left, right, thick, top = 2, width - 4, 22, LINE + 6
    pieces, labels, y = [], [], top
    scale = (right - left) / whole
    limit = left + memory_bytes * scale
    mark, above = [], top - 4
    for bar in rows:
        said = f"{format_bytes(bar.peak_bytes)} at batch {bar.batch}"
        said += "" if bar.fits else ", does not fit"
        kind, label = ("name chosen", f"→ {bar.label}") if bar.chosen else ("name", bar.label)
        labels.append(words(left, y + 13, label, kind))
        labels.append(words(right, y + 13, said, "" if bar.fits else "unfit", "end"))
        if not left + LETTER * len(label) < limit < right - LETTER * len(said):
            mark += [line(limit, above, limit, y - 2, "memory")] * (above < y - 2)
            above = y + LINE + 1
        y += LINE + 3
        x = float(left)
        for name, _, kind in PARTS:
            nbytes = bar.parts[name]
            piece = min(nbytes * scale, right - x)
            if piece > 0:
                pieces.append(rect(x, y, piece, thick, kind, f"{bar.label}: {name} {format_bytes(nbytes)}"))
            x += max(piece, 0)
        if bar.peak_bytes * scale > right - left + 0.5:  # longer than the chart
            labels.append(words(right - 5, y + 16, "»", "beyond", "end"))
        y += thick + 12
    anchor = "end" if limit > width / 2 else "start"
    mark += [
        line(limit, above, limit, y - 8, "memory"),
        words(limit + (-5 if anchor == "end" else 5), 12, f"{format_bytes(memory_bytes)} of a device", "tick", anchor),
    ]
    alt = "; ".join(f"{bar.label}: {format_bytes(bar.peak_bytes)}" for bar in rows)
    return drawing(width, y, f"Memory at the fullest instant of a step. {alt}", [*pieces, *mark, *labels])


def over_time(found: Timeline, memory_bytes: int, width: int) -> str:
    """What is in memory over a step, the parts on top of each other."""
    narrow = width == NARROW
    height = 250 if narrow else 300
    most = max(found.fullest.total, memory_bytes) * 1.04
    box = Box(52 if narrow else 62, 34, width - 10, height - 26, found.seconds, most)
    parts = [*bytes_axis(box), *seconds_axis(box, ticks=4 if narrow else 7)]
    stops = [m.start_s for m in found.moments[1:]] + [found.seconds]
    below = [0] * len(found.moments)
    for field, name in OVER_TIME:
        above = [low + getattr(m, field) for low, m in zip(below, found.moments, strict=True)]
        if above != below:
            title = f"{name}: up to {format_bytes(max(getattr(m, field) for m in found.moments))}"
            edges = [*_steps(box, found.moments, stops, above), *reversed(_steps(box, found.moments, stops, below))]
            parts.append(polygon(edges, field, title))
        below = above
    parts.append(line(box.left, box.y(memory_bytes), box.right, box.y(memory_bytes), "memory"))
    parts += _phases(found, box)
    alt = (
        f"Memory over a step of {format_seconds(found.seconds)}: at most {format_bytes(found.fullest.total)}, in "
        f"{found.fullest.where}"
    )
    return drawing(width, height, alt, parts)


def _steps(
    box: Box, moments: Sequence[Moment], stops: Sequence[float], heights: Sequence[int]
) -> list[tuple[float, float]]:
    found = []
    for moment, stop, height in zip(moments, stops, heights, strict=True):
        found += [(box.x(moment.start_s), box.y(height)), (box.x(stop), box.y(height))]
    return found


def _phases(found: Timeline, box: Box) -> Iterator[str]:
    """Names above the chart, where there is room for them, and lines between."""
    for phase in found.phases:
        start, stop = box.x(phase.start_s), box.x(phase.stop_s)
        if phase.start_s:
            yield line(start, box.top - 16, start, box.bottom, "phase")
        if stop - start > 7.5 * len(phase.name):
            yield words((start + stop) / 2, box.top - 6, phase.name, "name", "middle")


def against_ranks(found: Sequence[Curve], ranks: int, width: int, *, each: bool = False) -> str:
    """Tokens per second against the number of ranks: of all, where a straight line is linear, or of `each` rank."""
    narrow = width == NARROW
    height = 230 if narrow else 270
    points = [point for curve in found for point in curve.points]
    least, most = min(p.ranks for p in points), max(p.ranks for p in points)
    speeds = [_speed(p, each=each) for p in points]
    low, high = (0.0, max(speeds) * 1.08) if each else (math.log10(min(speeds)) - 0.1, math.log10(max(speeds)) + 0.1)
    box = Box(50, 12, width - 14, height - 42, math.log2(most) + 0.08, high, math.log2(least) - 0.08, low)
    parts = []
    for value in nice(high, 4) if each else _logarithmic(low, high):
        y = box.y(value if each else math.log10(value))
        parts += [line(box.left, y, box.right, y, "grid"), words(box.left - 6, y + 4, short(value), "tick", "end")]
    counts = sorted({p.ranks for p in points if p.ranks & (p.ranks - 1) == 0} or {least, most})
    for count in counts[:: -(-len(counts) // (5 if narrow else 6))]:
        parts.append(words(box.x(math.log2(count)), box.bottom + LINE, f"{count:,}", "tick", "middle"))
    parts.append(words((box.left + box.right) / 2, height - 6, "GPUs", "tick", "middle"))
    if least <= ranks <= most:
        here = box.x(math.log2(ranks))
        parts.append(line(here, box.top, here, box.bottom, "memory"))
    for curve in sorted(found, key=lambda curve: curve.chosen):  # the others are wide and pale below the choice
        parts += _curve(box, curve, each=each)
    ends = (f"{c.label}: {short(_speed(c.points[-1], each=each))} on {c.points[-1].ranks:,}" for c in found if c.points)
    what = "Tokens per second of each GPU" if each else "Tokens per second of all GPUs"
    return drawing(width, height, f"{what} against their number. {'; '.join(ends)}", parts)


def colour(curve: Curve) -> str:
    """Of stages 1 to 3 the stage's; of a choice with offload, one of its own."""
    return f"c{curve.label[-1]}" if curve.label in ("stage 1", "stage 2", "stage 3") else "c4"


def _curve(box: Box, curve: Curve, *, each: bool) -> Iterator[str]:
    speeds = [_speed(p, each=each) for p in curve.points]
    heights = [box.y(speed if each else math.log10(speed)) for speed in speeds]
    places = [(box.x(math.log2(p.ranks)), y) for p, y in zip(curve.points, heights, strict=True)]
    yield polyline(places, f"curve {colour(curve)}" + " chosen" * curve.chosen)
    for (x, y), point, speed in zip(places, curve.points, speeds, strict=True):
        title = f"{curve.label}: {speed:,.0f} tokens/s on {point.ranks:,} GPUs, batch {point.batch}"
        yield circle(x, y, 3.5, f"dot {colour(curve)}" + " chosen" * curve.chosen, title)


def _speed(point: Speed, *, each: bool) -> float:
    return point.tokens_per_s / point.ranks if each else point.tokens_per_s


def _logarithmic(low: float, high: float) -> list[float]:
    """Round numbers between two powers of ten, the more of them the closer these are."""
    powers = range(math.floor(low), math.ceil(high) + 1)
    factors = (1, 2, 5) if high - low < 1.5 else (1, 3) if high - low < 3.5 else (1,)
    found = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in found if low <= math.log10(value) <= high]
