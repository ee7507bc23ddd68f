"""Figures as a reader wants to see them: three digits, a unit, and a dash where nothing was measured."""

from __future__ import annotations

import math

NOTHING = "–"
GAP = "\u00a0"  # a line never breaks between a number and its unit


def nbytes(size: float | None) -> str:
    r"""
    >>> nbytes(1_234_567), nbytes(800), nbytes(None)
    ('1.23\xa0MB', '800\xa0B', '–')
    """
    return NOTHING if size is None else f"{size:,.0f}{GAP}B" if size < 1000 else f"{scaled(size)}B"


def count(value: float | None) -> str:
    r"""
    >>> count(854_000), count(1_557_611_200), count(12)
    ('854\xa0k', '1.56\xa0B', '12')
    """
    return NOTHING if value is None else f"{value:,.0f}" if value < 10_000 else scaled(value, "TBMk")


def scaled(value: float, letters: str = "TGMk") -> str:
    """Three digits and the letter of a power of a thousand."""
    for power, letter in zip((12, 9, 6, 3), letters, strict=True):
        if value >= 0.9995 * 10**power:
            return f"{digits(value / 10**power)}{GAP}{letter}"
    return f"{digits(value)}{GAP}"


def digits(value: float, many: int = 3) -> str:
    """
    >>> digits(1.234), digits(123.4), digits(12345.6), digits(float("nan"))
    ('1.23', '123', '12,346', 'NaN')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if value == 0 or not 1e-3 <= abs(value) < 1e15:
        return f"{value:.{many}g}"
    return f"{value:,.{max(many - 1 - math.floor(math.log10(abs(value))), 0)}f}"


def nats(value: float | None, many: int = 4) -> str:
    return NOTHING if value is None else digits(value, many)


def seconds(value: float | None) -> str:
    r"""
    >>> seconds(0.0314), seconds(2.5)
    ('31.4\xa0ms', '2.50\xa0s')
    """
    return NOTHING if value is None else f"{digits(value)}{GAP}s" if value >= 1 else f"{digits(value * 1e3)}{GAP}ms"


def off(measured: float, planned: float) -> str:
    """How far a figure is from its plan.

    >>> off(101, 100), off(100, 100), off(0, 100), off(10_001, 10_000)
    ('+1.0%', 'exact', '-100.0%', '< 0.1%')
    """
    if measured == planned:
        return "exact"
    if not planned:
        return "not planned"
    return "< 0.1%" if abs(measured - planned) < 1e-3 * planned else f"{(measured - planned) / planned:+.1%}"


def listed(names: list[str]) -> str:
    """
    >>> listed(["0", "1", "2"])
    '0, 1 and 2'
    """
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1] if names else ""]))
