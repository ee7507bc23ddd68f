"""Bytes as people read them."""

from __future__ import annotations


def text_of(nbytes: float) -> str:
    """Bytes for people: three digits or so."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        amount = nbytes / size
        if amount >= 1 or unit == "kB":
            return f"{amount:,.0f} {unit}" if amount >= 100 else f"{amount:.1f} {unit}"
    raise AssertionError
