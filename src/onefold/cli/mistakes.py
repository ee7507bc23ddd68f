"""What is wrong with the words of a command line, in one line: tyro says it in a box, with the help of each setting."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from itertools import takewhile

from onefold.errors import ConfigError

KINDS = {"INT": "a whole number", "FLOAT": "a number, such as 0.5 or 7e9", "PATH": "a path"}
UNBROKEN = "2000"  # columns: no word of a box is cut at its edge


@contextmanager
def said_in_one_line(command: str) -> Iterator[None]:
    """Turns tyro's exit for a mistake into a ConfigError of one line. Help is printed as it is."""
    box, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = UNBROKEN
    try:
        with redirect_stderr(box):
            yield
    except SystemExit as end:
        if end.code in (0, None):
            raise
        raise ConfigError(f"{in_one_line(box.getvalue())}; see onefold {command} --help") from None
    else:
        sys.stderr.write(box.getvalue())
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns


def in_one_line(box: str) -> str:
    """What a box says, without the help that follows it.

    >>> in_one_line("╭─ Unrecognized ─╮\\n│ Unrecognized options: --rank, 2 │\\n│ ─── │\\n│   --ranks INT │")
    'unrecognized options: --rank, 2; perhaps --ranks is meant'
    >>> in_one_line("Value error\\n---\\n Error parsing --ranks: invalid literal: 'x'\\n ---\\n    --ranks INT")
    "--ranks 'x' is not a whole number"
    """
    lines = [line.strip("│ ") for line in box.splitlines() if line[:1] not in ("╭", "╰")]
    if "╭" not in box:  # where a terminal has ASCII alone: the title, a rule, and the same lines without edges
        lines = lines[2:]
    first = " ".join(takewhile(lambda line: line and not set(line) <= {"─", "-"}, lines))
    if not first:
        return " ".join(box.split())
    if parsing := re.match(r"Error parsing (\S+): .*'(.*)'", first):
        flag, given = parsing.groups()
        kind = next((line.rpartition("|")[2].split()[-1] for line in lines if re.match(rf"{flag} \S+$", line)), "")
        return f"{flag} {given!r} is not {KINDS.get(kind, kind or 'understood')}"
    if choice := re.match(r"invalid choice '(.*)' for argument '(.*)'. Expected one of \((.*)\)", first):
        given, flag, choices = choice.groups()
        known = sorted(one for one in re.findall(r"'([^']*)'", choices) if one != "None")
        return f"{flag} {given!r} is unknown; use one of {', '.join(known)}"
    if nothing := re.match(r"Missing value for argument '(.*)'", first):
        return f"{nothing[1]} needs a value"
    if missing := re.match(r"Missing from [^:]*: (\S+) ?(.*)", first):
        return f"{missing[1]} is missing: {missing[2].partition(' (required)')[0].rstrip('.')}"
    meant = next((line.split()[0] for line in lines if re.match(r"--\w", line)), "") if "Unrecognized" in first else ""
    said = first.rstrip(".")
    return said[0].lower() + said[1:] + f"; perhaps {meant} is meant" * bool(meant)
