"""Reads committed checkpoints: any elements of any state, from the files that hold them, checked by their digests."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from onefold.checkpoint.format.folder import committed, find, read_manifest, step_name, step_of
from onefold.checkpoint.format.manifest import VALUE, Entry, FileRecord, ParamRecord, block_of
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import TensorFile
from onefold.cost.layout import Span
from onefold.errors import CheckpointDamaged, CheckpointError, CheckpointRemoved
from onefold.model.element_order import Order

T = TypeVar("T")
P = TypeVar("P")
TRIES = 20  # to read the newest checkpoint while a run removes older ones


class Source(Protocol):
    """Tensors read by name and element range: a Checkpoint, or safetensors files of other programs."""

    records: Mapping[str, ParamRecord]

    def read(self, name: str, span: Span, out: Tensor, state: str = VALUE) -> None: ...


class Checkpoint:
    """A checkpoint to read from. A file is opened when some of its elements are needed, and only those are read. Raises
    CheckpointRemoved if the run that wrote the checkpoint removes it meanwhile."""

    def __init__(self, storage: Storage, folder: Path) -> None:
        self.folder, self._storage = folder, storage
        with removal_noticed(storage, folder):
            self.manifest = read_manifest(storage, folder)
        self.records: Mapping[str, ParamRecord] = {name: r for r in self.manifest.records for name in (r.name, *r.also)}
        self._records = {record.name: record for record in self.manifest.records}
        self._files = {file.name: file for file in self.manifest.files}
        self._open: dict[str, TensorFile] = {}
        self._entries: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        self._of_file: dict[str, list[Entry]] = defaultdict(list)
        for entry in sorted(self.manifest.entries, key=lambda entry: entry[:4]):
            self._entries[entry.name, entry.state].append(entry)
            self._of_file[entry.file].append(entry)

    def read(self, name: str, span: Span, out: Tensor, state: str = VALUE) -> None:
        """Reads these elements of one state, numbered in the stored order, into a 1-D host tensor of the same dtype."""
        entries = self._entries[self.records[name].name, state]
        assert span.clip(Span(0, self.records[name].numel)) == span and out.numel() == span.numel
        first = max(bisect_right(entries, span.start, key=lambda entry: entry.start) - 1, 0)
        for entry in entries[first:]:
            part = entry.span.clip(span)
            if not part.numel:
                break
            self.read_entry(entry, part, out[part.start - span.start : part.stop - span.start])

    def whole(self, name: str, out: Tensor, state: str = VALUE) -> None:
        self.read(name, Span(0, self.records[name].numel), out, state)

    def read_entry(self, entry: Entry, part: Span, out: Tensor) -> None:
        """Reads some elements of one entry."""
        with removal_noticed(self._storage, self.folder):
            self.file(entry.file).read(entry.key, part.shift(-entry.start), out, entry.sha256)

    def entries_of(self, file: str) -> list[Entry]:
        return self._of_file[file]

    def record_of(self, entry: Entry) -> ParamRecord:
        return self._records[entry.name]

    def file(self, name: str) -> TensorFile:
        """A file of the checkpoint, open, after its header was compared with the manifest."""
        if name not in self._open:
            with removal_noticed(self._storage, self.folder):
                self._open[name] = self._checked(self._files[name])
        return self._open[name]

    def _checked(self, record: FileRecord) -> TensorFile:
        path = self.folder / record.name
        entries = self._of_file[record.name]
        if record.name not in self._storage.names(self.folder):
            raise CheckpointDamaged(f"{path} is missing; it holds {_some(entries)}")
        try:
            file = TensorFile(self._storage, path)
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{error}; it holds {_some(entries)}") from error
        if file.bytes != record.bytes:
            raise CheckpointDamaged(
                f"{path} has {file.bytes:,} bytes, but {record.bytes:,} were written; it holds {_some(entries)}"
            )
        wanted = {entry.key: block_of(entry, self.record_of(entry)) for entry in entries}
        if file.blocks != wanted or file.header_sha256 != record.header_sha256:
            raise CheckpointDamaged(
                f"{path} has a header that is not the one written (SHA-256 differs); it holds {_some(entries)}"
            )
        return file


@contextmanager
def removal_noticed(storage: Storage, folder: Path) -> Iterator[None]:
    """Turns an error into CheckpointRemoved if the run has deleted this checkpoint."""
    try:
        yield
    except CheckpointRemoved:
        raise
    except CheckpointError as error:
        if (removed := removal(storage, folder)) is not None:
            raise removed from error
        raise


def removal(storage: Storage, folder: Path) -> CheckpointRemoved | None:
    """The error to raise if a committed checkpoint no longer exists under its name; None while it does."""
    if step_of(folder.name) is None:
        return None
    try:
        steps = committed(storage, folder.parent)
    except CheckpointError:
        return None
    if step_of(folder.name) in steps:
        return None
    newest = f"newest is now {step_name(steps[-1])}" if steps else "none is left there"
    return CheckpointRemoved(f"{folder} was removed by its run while it was being read; {newest}")


def with_newest(storage: Storage, path: Path, act: Callable[[Path], T]) -> T:
    """What `act` returns for the newest checkpoint that a path names."""

    def newest(found: list[Path]) -> T:
        with removal_noticed(storage, found[0]):
            return act(found[0])

    return with_checkpoints(storage, path, newest)


def with_checkpoints(storage: Storage, path: Path, act: Callable[[list[Path]], T]) -> T:
    """What `act` returns for the checkpoints that a path names, newest first. If one is removed meanwhile, `act` is
    called again with those that exist then; a path to one checkpoint names no other."""
    found = find(storage, path)
    return retry_if_removed(act, found, lambda: [] if found == [path] else find(storage, path))


def retry_if_removed(act: Callable[[list[P]], T], found: list[P], find_again: Callable[[], list[P]]) -> T:
    """What `act` returns for the checkpoints found. After CheckpointRemoved it is called with those found again, until
    there are none, at most TRIES times."""
    for attempt in range(TRIES):
        try:
            return act(found)
        except CheckpointRemoved:
            found = find_again()
            if not found or attempt == TRIES - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def read_in_order(source: Source, name: str, order: Order, span: Span, out: Tensor, state: str = VALUE) -> None:
    """Like `source.read`, for elements numbered in another order; reads the rows that contain them."""
    stored = source.records[name].order
    if stored.same(order):
        source.read(name, span, out, state)
        return
    wanted = order.around_elements(span)
    alike = stored.dim == order.dim
    found = stored.around_rows(wanted if alike else Span(0, stored.shape[stored.dim]))
    elements = stored.elements(found)
    flat = torch.empty(elements.numel, dtype=out.dtype)
    source.read(name, elements, flat, state)
    rows = stored.tensor(flat, found).narrow(order.dim, wanted.start - alike * found.start, wanted.numel)
    start = order.elements(wanted).start
    out.copy_(order.flat(rows, wanted)[span.start - start : span.stop - start])


def _some(entries: list[Entry]) -> str:
    names = list(dict.fromkeys(entry.name for entry in entries))
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "nothing"
