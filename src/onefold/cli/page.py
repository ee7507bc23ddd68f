"""`onefold plan --serve` and `--page`: the plan as a page in a browser, or as a file."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from onefold.cost.text import format_bytes
from onefold.errors import ConfigError, visible
from onefold.planner.page.document import alone
from onefold.planner.page.form import FORM, Value, read
from onefold.planner.page.server import Server
from onefold.planner.page.view import View

EXAMPLE = "llama-3-8b"  # where no model is given


def write(path: Path, found: View) -> None:
    """Writes the page, and says on stderr what was written: stdout may be JSON."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(alone(found), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--page {path} cannot be written: {error.strerror or error}") from error
    sys.stderr.write(f"wrote {visible(path)} ({format_bytes(path.stat().st_size)})\n")


def server_of(settings: object, asked: Callable[[dict[str, Value]], View], port: int) -> Server:
    """The server, not yet serving, whose form begins with these settings."""

    def ask(given: Mapping[str, str]) -> View:
        return asked(read(given))

    return Server(ask, first_values(settings), port)


def serve(settings: object, asked: Callable[[dict[str, Value]], View], port: int) -> int:
    """Serves until the user ends it."""
    with server_of(settings, asked, port) as server:
        sys.stdout.write(f"{server.address}\nOpen it in a browser on this machine; Ctrl-C ends it.\n")
        sys.stdout.flush()
        shown = sys.platform == "darwin" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
        if shown and sys.stdout.isatty():
            webbrowser.open(server.address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0


def first_values(settings: Any) -> dict[str, str]:
    """Settings of the command line as values of the form."""
    given = {name: getattr(settings, name) for name in FORM}
    by = "count" if given["params"] is not None else "shape" if given["layers"] is not None else "name"
    if by == "name" and given["model"] is None:
        given["model"] = EXAMPLE
    return {"by": by} | {
        name: _said(value) for name, value in given.items() if value is not None and value is not False
    }


def _said(value: object) -> str:
    if value is True:
        return "yes"
    return f"{value:g}" if isinstance(value, float) else str(value)
