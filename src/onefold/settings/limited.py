"""Small files that anyone may have written: read only if they are plain files of a size that can be right.

A pipe, socket or device in the place of a file is refused and not waited for. Each error is one line that names the
file. Nothing reads more than its limit, whatever a file's size says or becomes.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from onefold.errors import OnefoldError

JSON_BYTES_LIMIT = 64 << 20
LINES_BYTES_LIMIT = 512 << 20  # of all lines of a .jsonl file: some 800,000 logged steps
LINE_BYTES_LIMIT = 4 << 20
CHUNK_BYTES = 1 << 18


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """All of a plain file. FileNotFoundError if it is not there."""
    content = bytearray()
    with opened(path, limit_bytes) as file:
        while part := file.read(CHUNK_BYTES):
            content += part
            if len(content) > limit_bytes:
                raise OnefoldError(f"{path} grew beyond {limit_bytes:,} bytes while it was read")
    return bytes(content)


def read_text(path: Path, limit_bytes: int) -> str:
    return _decoded(path, read_bytes(path, limit_bytes))


def read_json(path: Path, limit_bytes: int = JSON_BYTES_LIMIT) -> Any:
    return _parsed(path, read_bytes(path, limit_bytes))


def read_json_lines(path: Path, limit_bytes: int = LINES_BYTES_LIMIT) -> Iterator[Any]:
    """What each line says, without a last one that is torn."""
    with opened(path, limit_bytes) as file:
        number, left = 0, limit_bytes
        while (line := file.readline(LINE_BYTES_LIMIT + 1)).endswith(b"\n"):
            number, left = number + 1, left - len(line)
            if left < 0:
                raise OnefoldError(f"{path} grew beyond {limit_bytes:,} bytes while it was read")
            yield _parsed(f"line {number} of {path}", line)
        if len(line) > LINE_BYTES_LIMIT:
            raise OnefoldError(f"line {number + 1} of {path} has more than {LINE_BYTES_LIMIT:,} bytes; it is no record")


@contextmanager
def opened(path: Path, limit_bytes: int | None) -> Iterator[BinaryIO]:
    """A plain file, of at most so many bytes if there is a limit. FileNotFoundError if it does not exist; any other
    failure is an OnefoldError of one line."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
        with os.fdopen(file, "rb") as found:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise OnefoldError(f"{path} is a folder, pipe, socket or device; wanted is a plain file")
            if limit_bytes is not None and status.st_size > limit_bytes:
                raise OnefoldError(f"{path} has {status.st_size:,} bytes; at most {limit_bytes:,} are read")
            yield found
    except FileNotFoundError:
        raise
    except OSError as error:
        raise OnefoldError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, OnefoldError):
            raise
        raise OnefoldError(f"{path} cannot be read: {error}") from error  # a NUL in the name


def _decoded(what: Path | str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise OnefoldError(f"{what} is no text: byte {error.start:,} is no UTF-8") from error


def _parsed(what: Path | str, content: bytes) -> Any:
    try:
        return json.loads(_decoded(what, content))
    except ValueError as error:
        if isinstance(error, OnefoldError):
            raise
        raise OnefoldError(f"{what} is no JSON: {error}") from error
    except RecursionError as error:
        raise OnefoldError(f"{what} is no JSON that can be read: it is nested too deeply") from error
