"""Bytes and seconds as text."""

from __future__ import annotations


def format_bytes(nbytes: float) -> str:
    """Bytes for people, with two or three digits.

    >>> format_bytes(1_234_567), format_bytes(123_456_789), format_bytes(56)
    ('1.2 MB', '123 MB', '56 B')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        amount = nbytes / size
        if amount >= 1:
            return f"{amount:,.0f} {unit}" if amount >= 100 else f"{amount:.1f} {unit}"
    return f"{nbytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """A time for people, from milliseconds to days.

    >>> [format_seconds(s) for s in (0.0123, 2.345, 42, 270, 7325, 200_000)]
    ['12.3 ms', '2.3 s', '42 s', '4 min 30 s', '2 h 2 min', '2 d 7 h']
    """
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size:,} {name}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"
