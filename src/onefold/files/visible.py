r"""Text from files as it may be shown: nothing in a name can move the cursor, change colours or turn text around."""

from __future__ import annotations


def visible(text: object, also: str = "") -> str:
    r"""What is not printable, by its number: control characters, line ends, bidirectional overrides, bytes that are no
    text. Characters in `also` stay as they are.

    >>> visible("w\x1b[2J\n\u202e")
    'w\\x1b[2J\\n\\u202e'
    """
    return "".join(c if c.isprintable() or c in also else c.encode("unicode_escape").decode("ascii") for c in str(text))
