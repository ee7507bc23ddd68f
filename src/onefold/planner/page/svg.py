"""Charts as SVG: text stays text, every colour is a class of the page's style, and nothing has a style of its own."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from onefold.cost.text import format_bytes, format_seconds

WIDE, HALF, NARROW = 760, 420, 340  # units of a drawing, about the pixels of a desk's and of a phone's column
LINE = 17  # height of a line of text


def text(value: object) -> str:
    return html.escape(str(value))


class Box(NamedTuple):
    """Where a chart's curves are drawn, and what its axes span."""

    left: float
    top: float
    right: float
    bottom: float
    most_x: float
    most_y: float
    least_x: float = 0.0
    least_y: float = 0.0

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * (value - self.least_x) / ((self.most_x - self.least_x) or 1)

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * (value - self.least_y) / ((self.most_y - self.least_y) or 1)


def drawing(width: int, height: float, alt: str, parts: Iterable[str]) -> str:
    body = "".join(parts)
    return f'<svg viewBox="0 0 {width} {height:.0f}" class="w{width}" role="img" aria-label="{text(alt)}">{body}</svg>'


def both(draw: Callable[[int], str], wide: int = WIDE) -> str:
    """A drawing for a desk and one for a phone; the page's style shows one of them."""
    return draw(wide) + draw(NARROW)


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    named = f"<title>{text(title)}</title>" if title else ""
    size = f'width="{max(width, 0):.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{kind}">{named}</rect>'


def circle(x: float, y: float, radius: float, kind: str, title: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}"><title>{text(title)}</title></circle>'


def words(x: float, y: float, value: str, kind: str = "", anchor: str = "start") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}"{where} class="{kind}">{text(value)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def polyline(points: Sequence[tuple[float, float]], kind: str) -> str:
    return f'<polyline points="{_points(points)}" class="{kind}"/>'


def polygon(points: Sequence[tuple[float, float]], kind: str, title: str) -> str:
    return f'<polygon points="{_points(points)}" class="{kind}"><title>{text(title)}</title></polygon>'


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def nice(most: float, count: int) -> list[float]:
    """Round numbers from 0 to `most`, about `count` of them.

    >>> nice(141, 4)
    [0.0, 50.0, 100.0]
    """
    if not 0 < most < math.inf:
        return [0.0]
    rough = most / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    return [step * number for number in range(int(most / step * 1.0001) + 1)]


def bytes_axis(box: Box, *, ticks: int = 4) -> Iterable[str]:
    for tick in nice(box.most_y, ticks):
        y = box.y(tick)
        yield line(box.left, y, box.right, y, "grid")
        yield words(box.left - 6, y + 4, format_bytes(tick).replace(".0 ", " ") if tick else "0", "tick", "end")


def seconds_axis(box: Box, *, ticks: int) -> Iterable[str]:
    for tick in nice(box.most_x, ticks):
        yield words(box.x(tick), box.bottom + LINE, format_seconds(tick) if tick else "0", "tick", "middle")


def short(amount: float) -> str:
    """A number with three digits and its thousands as a letter.

    >>> [short(n) for n in (0.5, 12, 4321, 51_217, 1.5e9, 3e12)]
    ['0.5', '12', '4.3k', '51k', '1.5B', '3T']
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if amount >= size:
            scaled = amount / size
            return (f"{scaled:.0f}" if scaled >= 10 else f"{scaled:.1f}".removesuffix(".0")) + letter
    return f"{amount:.3g}"
