"""Addresses of object stores, as `s3://bucket/run`, as paths: they are joined and named like those of files."""

from __future__ import annotations

import os
import re
from pathlib import Path, PosixPath

from onefold.errors import ConfigError

ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)
LOCAL = ("file", "local")


class Address(PosixPath):
    """A place in an object store. Its first part is the scheme with its colon; no method that asks the file system is
    of any use here."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    def absolute(self) -> Address:
        return self

    @property
    def scheme(self) -> str:
        return self.parts[0].removesuffix(":")

    @property
    def key(self) -> str:
        """The place without its scheme, as stores name it."""
        return "/".join(self.parts[1:])


def local(path: str | Path, what: str) -> Path:
    """The absolute path of a folder or file. Raises for the address of a store; `what` says what belongs in folders."""
    found = place(path)
    if isinstance(found, Address):
        raise ConfigError(f"{found} is the address of a store; {what} needs a folder of a file system")
    return found.absolute()


def place(path: str | Path) -> Path:
    """The path of a folder, or the Address that a text or a Path has; `file://` is a path like any other."""
    if isinstance(path, Address):
        return path
    found = ADDRESS.fullmatch(os.fspath(path))
    if found is None:
        return Path(path)
    return Path("/" + found[2]) if found[1] in LOCAL else Address(f"{found[1]}:/{found[2]}")
