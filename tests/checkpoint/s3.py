"""An S3 server of its own (moto), and a proxy before it that injures single requests as networks do."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest.mock import patch

SERVE = """
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""
KEYS = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "nothing", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def s3_server() -> Iterator[int]:
    """The port of a server on this machine."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


@contextmanager
def store(port: int, deadline_s: float = 60.0, **more: str) -> Iterator[None]:
    """The environment by which s3fs finds the server; changed for this block alone."""
    about = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "ONEFOLD_REMOTE_DEADLINE_S": str(deadline_s)}
    with patch.dict(os.environ, {**KEYS, **about, **more}):
        yield


def make_bucket(port: int, name: str) -> str:
    with store(port):
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    return f"s3://{name}"


def keys(port: int, bucket: str) -> list[str]:
    """The keys of all objects in a bucket."""
    with store(port):
        import s3fs

        names = s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False).find(bucket)
    return sorted(name.partition("/")[2] for name in names)


Fault = Callable[["Exchange"], bool]


class Exchange:
    """One request through the proxy, for a fault to look at and to injure."""

    def __init__(self, handler: BaseHTTPRequestHandler, server_port: int, body: bytes, number: int) -> None:
        self.method, self.path, self.body, self.number = handler.command, handler.path, body, number
        self.headers = {name.lower(): value for name, value in handler.headers.items()}
        self._handler, self._port = handler, server_port

    def forward(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """The server's answer."""
        with closing(self._sent(self.body)) as server:
            answer = server.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def forward_half(self) -> None:
        """Gives the server half of the body, and then ends the connection to it."""
        self._sent(self.body[: len(self.body) // 2]).close()

    def _sent(self, body: bytes) -> http.client.HTTPConnection:
        server = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        headers = {name: value for name, value in self._handler.headers.items() if name.lower() != "expect"}
        server.request(self.method, self.path, body, headers)
        return server

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes, sent: int | None = None) -> None:
        """Sends an answer to the client; with `sent`, only so many bytes of its body, and then ends the connection."""
        handler = self._handler
        handler.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                handler.send_header(name, value)
        length = dict((name.lower(), value) for name, value in headers).get("content-length", str(len(body)))
        handler.send_header("Content-Length", length if self.method == "HEAD" else str(len(body)))
        handler.end_headers()
        if self.method != "HEAD":
            handler.wfile.write(body[:sent])
        if sent is not None:
            self.drop()

    def drop(self) -> None:
        """Ends the connection without another byte."""
        self._handler.close_connection = True
        self._handler.wfile.flush()
        self._handler.connection.shutdown(socket.SHUT_RDWR)


class Proxy:
    """Hands requests to the server. `fault` sees each of them first, and may answer in its place: it then returns
    True. `release` ends all waits that faults began."""

    def __init__(self, server_port: int) -> None:
        self.fault: Fault = lambda exchange: False
        self.injured: list[str] = []
        self.released = threading.Event()
        self._count, self._lock = 0, threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_request(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with proxy._lock:
                    proxy._count += 1
                    number = proxy._count
                exchange = Exchange(self, server_port, body, number)
                try:
                    if proxy.fault(exchange):
                        proxy.injured.append(f"{self.command} {self.path}")
                    else:
                        exchange.answer(*exchange.forward())
                except OSError:  # the client is gone
                    self.close_connection = True

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
