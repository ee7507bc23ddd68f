"""A real browser without a window, driven over the pipe of its DevTools protocol: no port, no other package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.harness.patience import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason=f"needs one of {', '.join(NAMES)}")

# The browser reads from its descriptor 3 and writes to its descriptor 4.
START = """import os, sys
ends = [os.dup(int(end)) for end in sys.argv[1:3]]
while min(ends) < 5:
    ends = [os.dup(end) for end in ends]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Chromium:
    """One page of a browser. `complaints` are what it refused or failed to load, and errors of scripts."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_there, self.write_here = os.pipe()
        self.read_here, write_there = os.pipe()
        command = [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-extensions", "--disable-background-networking", f"--user-data-dir={self.folder.name}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-ISc", START, str(read_there), str(write_there), *command],
            pass_fds=(read_there, write_there),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_there)
        os.close(write_there)
        self.heard, self.number, self.session = b"", 0, ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """One call, and what it returned; events that come before are noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_here, json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self.number:
                assert "error" not in found, found
                return found["result"]
            self._note(found)

    def _next(self) -> Any:
        while b"\0" not in self.heard:
            assert select.select([self.read_here], [], [], PATIENCE_S)[0], "the browser says nothing"
            more = os.read(self.read_here, 1 << 16)
            assert more, "the browser has ended"
            self.heard += more
        message, _, self.heard = self.heard.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        kind, about = event.get("method"), event.get("params", {})
        if kind == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.complaints.append(about["entry"]["text"])
        elif kind == "Runtime.exceptionThrown":
            self.complaints.append(about["exceptionDetails"].get("text", "exception"))
        elif kind == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """As a screen of this size, by day or by night."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, address: str) -> None:
        """Goes to an address and waits until it is loaded."""
        self.call("Page.navigate", url=address)
        while True:
            event = self._next()
            self._note(event)
            if event.get("method") == "Page.loadEventFired":
                return

    def ask(self, script: str) -> Any:
        """The value of an expression, or of the promise that it gives."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        os.close(self.write_here)
        self.process.terminate()
        self.process.wait()
        os.close(self.read_here)
        self.folder.cleanup()

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
