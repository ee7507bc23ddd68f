"""Processes and file systems of a test's own: a child forked from a clean process, and small disks only it can see.

Mounts live in a namespace of the child and go with it, however it ends. Root may make them; others may where the kernel
lets them have a user namespace; where neither is so the test is skipped.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import tests.harness  # noqa: F401  tells the fork server what to import beforehand
from onefold.offload.host_memory import host_bytes

LATEST_S = 240
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REC, MS_PRIVATE = 1, 1 << 14, 1 << 18


class Refused(Exception):
    """The kernel allows no namespace, or no such mount."""


def in_child(work: Callable[..., Any], *args: Any) -> Any:
    """Run `work(*args)` in a new process that shares nothing with this one, and return what it returns."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(theirs, work, args))
    child.start()
    theirs.close()
    try:
        if not ours.poll(LATEST_S):
            raise AssertionError(f"the process did not answer in {LATEST_S} s")
        kind, value = ours.recv()
    except EOFError:
        raise AssertionError("the process ended before it answered") from None
    finally:
        child.kill()
        child.join()
    if kind == "refused":
        pytest.skip(f"not possible here: {value}")
    assert kind == "returned", value
    return value


def on_tmpfs(work: Callable[..., Any], folder: Path, options: str, *args: Any, kind: str = "tmpfs") -> Any:
    """Run `work(folder, *args)` in a process where a file system in memory is mounted on `folder`."""
    return in_child(_mounted, work, kind, folder, options, args)


def on_ext2(work: Callable[..., Any], folder: Path, image: Path, size_kib: int, *args: Any) -> Any:
    """The same on a small disk without extents: it takes O_DIRECT, and cannot reserve space."""
    return in_child(_on_ext2, work, folder, image, size_kib, args)


def filled(nbytes: int, value: int) -> Any:
    return host_bytes(nbytes, pinned=False).fill_(value)


def _answer(conn: Connection, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        conn.send(("returned", work(*args)))
    except Refused as refused:
        conn.send(("refused", str(refused)))
    except BaseException:
        conn.send(("raised", traceback.format_exc()))


def _mounted(work: Callable[..., Any], kind: str, folder: Path, options: str, args: tuple[Any, ...]) -> Any:
    enter_namespace()
    flags = MS_RDONLY if "ro" in options.split(",") else 0
    _call("mount", b"none", bytes(folder), kind.encode(), flags, options.removeprefix("ro").encode())
    return work(folder, *args)


def _on_ext2(work: Callable[..., Any], folder: Path, image: Path, size_kib: int, args: tuple[Any, ...]) -> Any:
    enter_namespace()
    for command in (
        ["mkfs.ext2", "-q", "-F", "-b", "4096", str(image), f"{size_kib}k"],
        ["mount", "-o", "loop", str(image), str(folder)],
    ):
        try:
            ended = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise Refused(str(error)) from error
        if ended.returncode:
            raise Refused(ended.stderr.strip())
    return work(folder, *args)


def enter_namespace() -> None:
    """Mounts of this process are seen by nobody else from here on."""
    user, group = os.getuid(), os.getgid()
    try:
        _call("unshare", CLONE_NEWNS)
    except Refused:
        _call("unshare", CLONE_NEWNS | CLONE_NEWUSER)
        try:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        except OSError as error:
            raise Refused(str(error)) from error
    _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def _call(name: str, *args: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*args):
        raise Refused(f"{name}: {os.strerror(ctypes.get_errno())}")
