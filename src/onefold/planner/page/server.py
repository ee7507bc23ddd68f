"""Serves the page on this machine alone: loopback, a random token in the address, and no name but its own.

A web site that the user visits meanwhile cannot ask the planner: it does not know the token, it is not named as this
server is (DNS rebinding), and nothing here lets another origin read an answer.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from onefold.errors import ConfigError, OnefoldError
from onefold.planner.page.document import LIVE_POLICY, alone, live, part
from onefold.planner.page.form import FIELDS, FieldError, field_of
from onefold.planner.page.results import results
from onefold.planner.page.view import View

HOST = "127.0.0.1"
TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8",
         "js": "text/javascript; charset=utf-8", "json": "application/json"}  # fmt: skip
HEADERS = {
    "Content-Security-Policy": LIVE_POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store", "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin", "X-Frame-Options": "DENY",
}  # fmt: skip

Ask = Callable[[Mapping[str, str]], View]  # raises ConfigError


class Server(ThreadingHTTPServer):
    """The page of one planner. `ask` answers the fields of the form; `start` are their first values.

    Requests are answered by threads, questions one at a time.
    """

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, ask: Ask, start: Mapping[str, str], port: int = 0) -> None:
        self.ask, self.start = ask, dict(start)
        self.token = secrets.token_urlsafe(24)
        self.asking = threading.Lock()
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"--port {port}: {why}; give another, or none for a free one") from error
        except OverflowError:
            raise ConfigError(f"--port {port} is not a port from 0 to 65535") from None

    @property
    def names(self) -> tuple[str, str]:
        """What a browser that was given this server's address calls it."""
        return f"{HOST}:{self.server_port}", f"localhost:{self.server_port}"

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that goes away in the middle of an answer is no error of ours."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 30  # seconds: a connection that says nothing is closed
    server_version, sys_version = "onefold", ""

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.names:
            return self._say(HTTPStatus.MISDIRECTED_REQUEST, "txt", "This server has another name.\n")
        try:
            asked = urlsplit(self.path)
            given = dict(parse_qsl(asked.query, keep_blank_values=True, max_num_fields=2 * len(FIELDS)))
        except ValueError:
            return self._say(HTTPStatus.BAD_REQUEST, "txt", "This address cannot be read.\n")
        token, _, name = asked.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._say(HTTPStatus.NOT_FOUND, "txt", "Not found: use the address that the terminal shows.\n")
        if name == "":
            return self._page(given or self.server.start)
        if name in ("page.css", "page.js"):
            return self._say(HTTPStatus.OK, name.split(".")[1], part(name))
        if name in ("plan", "page.html"):
            return self._answer(given, as_file=name == "page.html")
        self._say(HTTPStatus.NOT_FOUND, "txt", "Not found.\n")

    do_HEAD = do_GET

    def _page(self, given: Mapping[str, str]) -> None:
        found, message = None, ""
        try:
            found = self._ask(given)
        except OnefoldError as error:
            message = str(error)
        self._say(HTTPStatus.OK, "html", live(given, found, message))

    def _answer(self, given: Mapping[str, str], *, as_file: bool) -> None:
        try:
            found = self._ask(given)
        except OnefoldError as error:
            field = error.field if isinstance(error, FieldError) else field_of(str(error))
            said = json.dumps({"error": str(error), "field": field})
            return self._say(HTTPStatus.UNPROCESSABLE_ENTITY, "json", said)
        if as_file:
            return self._say(HTTPStatus.OK, "html", alone(found))
        said = json.dumps({**found.to_dict(), "html": results(found, live=True)})
        self._say(HTTPStatus.OK, "json", said)

    def _ask(self, given: Mapping[str, str]) -> View:
        with self.server.asking:
            return self.server.ask(given)

    def _say(self, status: HTTPStatus, kind: str, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", TYPES.get(kind, "text/plain; charset=utf-8"))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the address holds the token."""
