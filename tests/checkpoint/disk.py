"""A disk in memory that forgets like a real one: what was not flushed may be there after power loss, or not, or torn.

Bytes last once their file was flushed (`finish`), names once their folder was (`sync_folder`), and neither for the
other. Every operation is logged with the line of code that asked for it; a log can be replayed on another disk.
"""

from __future__ import annotations

import copy
import errno
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from onefold.checkpoint.format.storage import Out, Storage, ends_early


@dataclass
class File:
    now: bytearray = field(default_factory=bytearray)
    kept: bytes = b""  # at the last flush


class Change(NamedTuple):
    """Names that went and one that came, at once."""

    gone: tuple[str, ...]
    name: str | None = None
    node: Node | None = None


@dataclass
class Folder:
    now: dict[str, Node] = field(default_factory=dict)
    kept: dict[str, Node] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)  # since the last flush

    def change(self, change: Change) -> None:
        apply(self.now, change)
        self.pending.append(change)


Node = File | Folder


def apply(names: dict[str, Node], change: Change) -> None:
    for name in change.gone:
        names.pop(name, None)
    if change.name is not None and change.node is not None:
        names[change.name] = change.node


class Site(NamedTuple):
    """A line of the code under test."""

    function: str
    line: int


class Op(NamedTuple):
    kind: str
    path: Path
    more: bytes | Path | None
    site: Site


class Disk(Storage):
    """`skip` is a line whose operation does nothing, as if it were deleted from the code."""

    def __init__(self, root: Folder | None = None, skip: Site | None = None) -> None:
        self.root = root or Folder()
        self.log: list[Op] = []
        self.skip = skip

    def copy(self) -> Disk:
        return Disk(copy.deepcopy(self.root), self.skip)

    # -- what changes it: logged, then done -------------------------------------------------------------------------

    def make_folder(self, path: Path) -> None:
        self._do("make_folder", path)

    def create(self, path: Path, size: int | None = None) -> Out:
        self._do("create", path)
        return DiskOut(self, path)

    def sync_folder(self, path: Path) -> None:
        self._do("sync_folder", path)

    def rename(self, old: Path, new: Path) -> None:
        self._do("rename", old, new)

    def remove(self, path: Path) -> None:
        self._do("remove", path)

    def remove_folder(self, path: Path) -> None:
        self._do("remove_folder", path)

    def _do(self, kind: str, path: Path, more: bytes | Path | None = None) -> None:
        op = Op(kind, path, more, _caller())
        if op.site != self.skip:
            with self._explaining_errors(kind, path):
                self.replay(op)
            self.log.append(op)

    def replay(self, op: Op) -> None:
        parent = self.folder_at(op.path.parent) if op.path.name else self.root
        name = op.path.name
        if op.kind in ("make_folder", "create"):
            if name in parent.now:
                raise OSError(errno.EEXIST, "File exists")
            parent.change(Change((), name, Folder() if op.kind == "make_folder" else File()))
        elif op.kind == "sync_folder":
            folder = self.folder_at(op.path)
            folder.kept, folder.pending = dict(folder.now), []
        elif op.kind == "rename":
            assert isinstance(op.more, Path) and op.more.parent == op.path.parent
            node, target = self._node(op.path), parent.now.get(op.more.name)
            if isinstance(target, File) or (target and target.now):
                raise OSError(errno.ENOTEMPTY, "Directory not empty")
            parent.change(Change((name,), op.more.name, node))
        elif op.kind == "write":
            self.file_at(op.path).now += op.more
        elif op.kind == "finish":
            file = self.file_at(op.path)
            file.kept = bytes(file.now)
        else:
            node = self._node(op.path)
            if isinstance(node, Folder) and node.now:
                raise OSError(errno.ENOTEMPTY, "Directory not empty")
            parent.change(Change((name,)))

    # -- what looks at it -------------------------------------------------------------------------------------------

    def names(self, path: Path) -> list[str]:
        with self._explaining_errors("names", path):
            return sorted(self.folder_at(path).now)

    def exists(self, path: Path) -> bool:
        try:
            self._node(path)
        except OSError:
            return False
        return True

    def is_link(self, path: Path) -> bool:
        return False

    def is_folder(self, path: Path) -> bool:
        return self.exists(path) and isinstance(self._node(path), Folder)

    def size(self, path: Path) -> int:
        with self._explaining_errors("size", path):
            return len(self.file_at(path).now)

    def read(self, path: Path, offset: int, into: memoryview) -> None:
        with self._explaining_errors("read", path):
            data = self.file_at(path).now
            if offset + len(into) > len(data):
                raise ends_early(path, len(data), offset + len(into))
            into[:] = bytes(data[offset : offset + len(into)])

    def _node(self, path: Path) -> Node:
        node: Node = self.root
        for name in path.parts[1:]:
            if not isinstance(node, Folder) or name not in node.now:
                raise OSError(errno.ENOENT, "No such file or directory")
            node = node.now[name]
        return node

    def folder_at(self, path: Path) -> Folder:
        node = self._node(path)
        if not isinstance(node, Folder):
            raise OSError(errno.ENOTDIR, "Not a directory")
        return node

    def file_at(self, path: Path) -> File:
        node = self._node(path)
        if not isinstance(node, File):
            raise OSError(errno.EISDIR, "Is a directory")
        return node


class DiskOut(Out):
    def __init__(self, disk: Disk, path: Path) -> None:
        super().__init__(disk, path, -1)
        self._disk = disk

    def write(self, data: memoryview) -> None:
        self._disk._do("write", self._path, bytes(data))

    def finish(self) -> None:
        self._disk._do("finish", self._path)


def _caller() -> Site:
    """The first line outside this file."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__:
        assert frame.f_back is not None
        frame = frame.f_back
    return Site(frame.f_code.co_name, frame.f_lineno)


# -- power loss -----------------------------------------------------------------------------------------------------

Bytes = Callable[[File], bytes]
Names = Callable[[list[Change]], list[Change]]


def without_power(disk: Disk, rng: random.Random, samples: int) -> Iterator[Disk]:
    """Disks that power loss may leave, each as it is found at the next start."""
    pending = max((len(folder.pending) for folder in _folders(disk.root)), default=0)
    names: list[Names] = [lambda _: [], lambda changes: changes]
    names += [lambda changes, i=i: changes[i : i + 1] for i in range(pending)]  # type: ignore[misc]
    names += [lambda changes, i=i: changes[:i] + changes[i + 1 :] for i in range(pending)]  # type: ignore[misc]
    torn: list[Bytes] = [lambda file: file.kept, lambda file: bytes(file.now), half, holes]
    for keep_bytes in torn:
        for keep_names in names:
            yield Disk(_left(disk.root, keep_bytes, keep_names, {}), disk.skip)
    for _ in range(samples):
        root = _left(
            disk.root,
            lambda file: rng.choice(torn)(file),
            lambda changes: [change for change in changes if rng.random() < 0.5],
            {},
        )
        yield Disk(root, disk.skip)


def half(file: File) -> bytes:
    """Of what was not flushed, the first half."""
    return file.kept + bytes(file.now[len(file.kept) :][: (len(file.now) - len(file.kept)) // 2])


def holes(file: File) -> bytes:
    """The length arrived, the bytes did not."""
    return file.kept + bytes(len(file.now) - len(file.kept))


def _left(node: Folder, keep_bytes: Bytes, keep_names: Names, done: dict[int, Node]) -> Folder:
    left = Folder()
    done[id(node)] = left
    names = dict(node.kept)
    for change in keep_names(node.pending):
        apply(names, change)
    for name, child in names.items():
        if id(child) not in done:
            if isinstance(child, Folder):
                _left(child, keep_bytes, keep_names, done)
            else:
                data = keep_bytes(child)
                done[id(child)] = File(bytearray(data), data)
        left.now[name] = done[id(child)]
    left.kept = dict(left.now)
    return left


def _folders(node: Node) -> Iterator[Folder]:
    if isinstance(node, Folder):
        yield node
        for child in {id(child): child for child in [*node.kept.values(), *node.now.values()]}.values():
            yield from _folders(child)


def picture(node: Node) -> object:
    """To tell whether two disks are found alike."""
    if isinstance(node, File):
        return bytes(node.now)
    return tuple((name, picture(child)) for name, child in sorted(node.now.items()))
