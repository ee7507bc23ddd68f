"""The picture of the rooms and the lists of their files, read from the source: `python -m tools.rooms [--check]`.

Writes docs/img/rooms.svg, and in each page of docs/rooms/ the table of the files of its room, between two marks. With
`--check` nothing is written, and what is not current is named.
"""

from __future__ import annotations

import argparse
import ast
import html
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE, PAGES, PICTURE = ROOT / "src/onefold", ROOT / "docs/rooms", ROOT / "docs/img/rooms.svg"
BEGIN, END = "<!-- files -->", "<!-- end -->"
OUTSIDE = {"__init__", "errors", "version"}  # every room may use errors, and __init__ shows the public names only

BOX_W, BOX_H, GAP_X, GAP_Y, MARGIN = 224, 58, 22, 40, 16
LINE = 36  # characters that fit into a box


class Room(NamedTuple):
    """A folder of the package that holds Python files, or a module of its root."""

    name: str
    idea: str
    files: tuple[Path, ...]


def rooms() -> dict[str, Room]:
    folders = sorted({path.parent for path in SOURCE.rglob("*.py")} - {SOURCE})
    found = {}
    for folder in folders:
        files = tuple(sorted(path for path in folder.glob("*.py") if path.name != "__init__.py"))
        if files:
            name = ".".join(folder.relative_to(SOURCE).parts)
            found[name] = Room(name, idea_of(folder / "__init__.py"), files)
    for path in SOURCE.glob("*.py"):
        if path.stem not in OUTSIDE:
            found[path.stem] = Room(path.stem, idea_of(path), (path,))
    return found


def idea_of(path: Path) -> str:
    """The first sentence of a file's docstring, in one line."""
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    first = said.split("\n\n")[0].replace("\n", " ")
    return first.split(". ")[0].rstrip(".")


def imported(path: Path) -> Iterator[str]:
    """Modules of the package that a file imports, without the package's name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("onefold."):
            base = (node.module or "").removeprefix("onefold.")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def below(found: dict[str, Room]) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    arrows: dict[str, set[str]] = {}
    for room in found.values():
        targets = {home(name, found) for path in room.files for name in imported(path)}
        arrows[room.name] = {target for target in targets if target} - {room.name}
    return arrows


def home(module: str, found: Iterable[str]) -> str:
    """The room of a module: the longest of the rooms' names that the module's name begins with."""
    return max((name for name in found if f"{module}.".startswith(f"{name}.")), key=len, default="")


def levels(arrows: dict[str, set[str]]) -> dict[str, int]:
    """How many rooms stand on top of each other below a room, at most."""
    found: dict[str, int] = {}
    for name in TopologicalSorter(arrows).static_order():
        found[name] = 1 + max((found[other] for other in arrows[name]), default=-1)
    return found


def reduced(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows that do not follow from two others."""
    reach: dict[str, set[str]] = {}
    for name in TopologicalSorter(arrows).static_order():
        reach[name] = arrows[name].union(*(reach[other] for other in arrows[name]))
    return {name: {o for o in arrows[name] if not any(o in reach[p] for p in arrows[name])} for name in arrows}


def picture(found: dict[str, Room]) -> str:
    arrows = below(found)
    level = levels(arrows)
    rows = [[name for name in found if level[name] == row] for row in range(max(level.values()), -1, -1)]
    width = max(len(row) for row in rows) * (BOX_W + GAP_X) - GAP_X + 2 * MARGIN
    height = len(rows) * (BOX_H + GAP_Y) - GAP_Y + 2 * MARGIN
    at: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        row.sort(key=lambda name: (sum(at[up][0] for up in at if name in arrows[up]) / (1 + len(at)), name))
        start = (width - len(row) * (BOX_W + GAP_X) + GAP_X) / 2
        for place, name in enumerate(row):
            at[name] = start + place * (BOX_W + GAP_X), MARGIN + number * (BOX_H + GAP_Y)
    lines = [line(at[name], at[other]) for name, others in reduced(arrows).items() for other in sorted(others)]
    boxes = [box(room, *at[room.name]) for room in found.values()]
    return "\n".join([HEAD.format(width=round(width), height=round(height)), *lines, *boxes, "</svg>\n"])


HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" \
font-family="system-ui, sans-serif" role="img" aria-label="The rooms of Onefold, each importing only rooms below it">
<style>rect {{ fill: #fff; stroke: #4a6fa5; stroke-width: 1.2; rx: 6; }} path {{ fill: none; stroke: #b8c4d6; }}
.name {{ font-size: 14px; font-weight: 600; fill: #1c2b45; }} .idea {{ font-size: 10px; fill: #44546f; }}</style>
<rect x="0" y="0" width="100%" height="100%" style="stroke: none; rx: 0"/>"""


def line(start: tuple[float, float], end: tuple[float, float]) -> str:
    x, y, to_x, to_y = start[0] + BOX_W / 2, start[1] + BOX_H, end[0] + BOX_W / 2, end[1]
    bend = min(GAP_Y, (to_y - y) / 2)
    return f'<path d="M{x:.0f} {y:.0f} C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}"/>'


def box(room: Room, x: float, y: float) -> str:
    words, lines = room.idea.split(), [""]
    for word in words:
        if len(lines[-1]) + len(word) > LINE - 1:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    if len(lines) > 2:
        lines = [lines[0], f"{lines[1].rsplit(' ', 1)[0].rstrip(',:;')} …"]
    said = "".join(
        f'<text class="idea" x="{x + 10:.0f}" y="{y + 35 + 13 * number:.0f}">{html.escape(text)}</text>'
        for number, text in enumerate(lines)
    )
    name = room.name.replace(".", "/") + ("/" if room.files[0].stem != room.name else ".py")
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_W}" height="{BOX_H}"/>'
        f'<text class="name" x="{x + 10:.0f}" y="{y + 19:.0f}">{name}</text>{said}'
    )


def listed(room: Room) -> str:
    rows = [f"| `{path.name}` | {idea_of(path).replace('|', chr(92) + '|')} |" for path in room.files]
    return "\n".join([BEGIN, "| File | Idea |", "|---|---|", *rows, END])


def page(path: Path, found: dict[str, Room]) -> str:
    """A page with the tables of its room: one for the room itself, one for each room inside it, in their order."""
    text = path.read_text()
    mine = [room for name, room in found.items() if name.split(".")[0] == path.stem]
    pieces = text.split(BEGIN)
    if len(pieces) != len(mine) + 1:
        wanted = ", ".join(room.name for room in mine)
        raise SystemExit(f"{path.name} has {len(pieces) - 1} places for tables of files, wanted one each for {wanted}")
    return pieces[0] + "".join(
        listed(room) + rest.split(END, 1)[1] for room, rest in zip(mine, pieces[1:], strict=True)
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.rooms", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is not current")
    check = parser.parse_args(arguments).check
    found = rooms()
    wanted = {PICTURE: picture(found)} | {path: page(path, found) for path in sorted(PAGES.glob("*.md"))}
    without = {name.split(".")[0] for name in found} - {path.stem for path in PAGES.glob("*.md")}
    if without:
        print(f"rooms without a page in docs/rooms: {', '.join(sorted(without))}", file=sys.stderr)
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} is not current: python -m tools.rooms", file=sys.stderr)
        else:
            path.write_text(wanted[path])
    return int(bool(without) or (check and bool(stale)))


if __name__ == "__main__":
    sys.exit(main())
