"""Bytes as text."""

from __future__ import annotations


def format_bytes(nbytes: float) -> str:
    """Bytes for people, with two or three digits.

    >>> format_bytes(1_234_567), format_bytes(123_456_789)
    ('1.2 MB', '123 MB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        amount = nbytes / size
        if amount >= 1 or unit == "kB":
            return f"{amount:,.0f} {unit}" if amount >= 100 else f"{amount:.1f} {unit}"
    raise AssertionError
