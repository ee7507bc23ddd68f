"""A real browser, without a window: what a page measures when it is laid out, and how it looks."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from onefold.train.report.page import POLICY
from tests.harness.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"needs one of {', '.join(NAMES)}")

# Into a copy of the page: what it says of itself once it is laid out.
ASK = """<script>addEventListener("load", () => parent.postMessage({
  width: innerWidth, scroll: document.scrollingElement.scrollWidth, height: document.scrollingElement.scrollHeight,
  titles: [...document.querySelectorAll("h1, h2")].map(h => h.innerText),
  charts: [...document.querySelectorAll("svg")].map(s => s.getBoundingClientRect().width).filter(w => w > 0),
  least: Math.min(...[...document.querySelectorAll("svg text")].map(t => t.getBoundingClientRect().height)
    .filter(h => h > 0)),
  unnamed: document.querySelectorAll("svg:not([aria-label])").length,
  dark: matchMedia("(prefers-color-scheme: dark)").matches,
}, "*"))</script>"""
# A frame of any width: a window of the browser's own is never narrower than 500.
FRAME = """<!doctype html><meta charset="utf-8">
<style>body {{ margin: 0 }} iframe {{ border: 0; display: block }}</style>
<iframe src="page.html" width="{width}" height="{height}"></iframe><pre id="said"></pre>
<script>addEventListener("message", event => {{ said.textContent = JSON.stringify(event.data) }})</script>"""


def look(page: Path, width: int, height: int = 4000, *, dark: bool = False, picture: Path | None = None) -> Any:
    """What the page says of itself at this width; with `picture`, also as a PNG."""
    with tempfile.TemporaryDirectory() as folder:
        copy, frame = Path(folder, "page.html"), Path(folder, "frame.html")
        copy.write_text(page.read_text().replace(POLICY, "").replace("</body>", ASK + "</body>"))
        frame.write_text(FRAME.format(width=width, height=height))
        command = [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            f"--user-data-dir={folder}/profile", f"--window-size={max(width, 500)},{height + 200}",
            "--virtual-time-budget=2000", "--dump-dom", *["--force-dark-mode"] * dark,
        ]  # fmt: skip
        if picture is not None:
            command[-1:] = [command[-1], f"--screenshot={picture}"]
        ran = subprocess.run([*command, frame.as_uri()], capture_output=True, text=True, timeout=PATIENCE_S)
    said = re.search(r'<pre id="said">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert said and said[1], f"the browser said nothing of the page: {ran.stdout[-500:]} {ran.stderr[-2000:]}"
    return json.loads(html.unescape(said[1]))
