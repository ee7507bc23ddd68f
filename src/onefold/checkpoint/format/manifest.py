"""The manifest: one JSON file that says what a checkpoint holds in which file; written last, and checked when read.

A record describes a tensor; an entry says which file holds which elements of one of its states. Elements are numbered
in memory order, which the strides give; those of a tensor split over "tp" part by part. The first line of the manifest
has the SHA-256 of the rest.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from onefold.checkpoint.format.tensorfile import CHUNK_BYTES, DTYPES, Block, Written, sizes, unique
from onefold.cost.layout import Span
from onefold.errors import CheckpointDamaged, CheckpointError
from onefold.model.element_order import Order, dense

VERSION = 1
FORMAT = {"format": "onefold checkpoint", "version": VERSION, "chunk_bytes": CHUNK_BYTES}
MANIFEST_BYTES_LIMIT = 256 << 20  # some 10 TB of state
DEPTH_LIMIT = 100  # of nesting in what users save: Python's own limit is not far above
SCALAR_LIMIT = 1 << 63  # of integers in optimizer state
VALUE = "value"  # the state that is the tensor itself; other states are the optimizer's
KINDS = ("trained", "frozen", "buffer", "extra")  # extra: tensors that belong to no module

HEAD = '{"sha256": "%s",\n'
HEX = re.compile(r"[0-9a-f]{64}")
FILE_NAME = re.compile(r"rank-[0-9]{5,9}(-[0-9a-f]{8})?\.safetensors")


def file_name(rank: int, attempt: str = "") -> str:
    """The name of a rank's file. In object stores it also has the number of the save, which no other save has."""
    return f"rank-{rank:05}{attempt and '-'}{attempt}.safetensors"


class FileRecord(NamedTuple):
    """One rank's file."""

    name: str
    bytes: int
    header_sha256: str


class Entry(NamedTuple):
    """Some elements of one state of one tensor, which are one tensor in one file."""

    name: str
    state: str
    start: int
    stop: int
    file: str
    sha256: tuple[str, ...] = ()  # of each CHUNK_BYTES

    @property
    def span(self) -> Span:
        return Span(self.start, self.stop)

    @property
    def key(self) -> str:
        return f"{self.name}|{self.state}|{self.start}-{self.stop}"


@dataclass(frozen=True)
class ParamRecord:
    """Describes one tensor: a parameter, a buffer, or another tensor that was saved."""

    name: str
    kind: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # of a dense tensor: the order in which its elements are stored
    states: Mapping[str, str]  # state -> its dtype's name in safetensors
    scalars: Mapping[str, Any] = field(default_factory=dict)  # single values of the optimizer: step counts
    also: tuple[str, ...] = ()  # other names of the same tensor
    dim: int = 0  # along which it was split over "tp"; the parts are stored one after the other
    bounds: tuple[int, ...] = ()  # where parts begin along that dim, and its size; empty if it was not split

    @property
    def order(self) -> Order:
        return Order(self.shape, self.stride, self.dim, self.bounds)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def dtype(self, state: str = VALUE) -> torch.dtype:
        return DTYPES[self.states[state]]


@dataclass(frozen=True)
class Manifest:
    step: int
    ranks: int
    files: tuple[FileRecord, ...]
    records: tuple[ParamRecord, ...]
    entries: tuple[Entry, ...]
    about: Mapping[str, Any] = field(default_factory=dict)  # config and versions
    optimizer: Mapping[str, Any] | None = None
    extra: Any = None

    def to_json(self) -> bytes:
        """The manifest as it is written; checked first, so that nothing is committed that could not be read."""
        Check("the manifest to be written").all(self)
        rows = {
            **FORMAT,
            "step": self.step,
            "ranks": self.ranks,
            "files": [list(file) for file in self.files],
            "records": [vars(record) for record in self.records],
            "entries": [list(entry) for entry in self.entries],
            "about": self.about,
            "optimizer": self.optimizer,
            "extra": self.extra,
        }
        body = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in rows.items()) + "\n}\n"
        return (HEAD % hashlib.sha256(body.encode()).hexdigest() + body).encode()

    @staticmethod
    def from_json(text: bytes, where: str) -> Manifest:
        """Parses and checks a manifest; `where` names it in errors."""
        check = Check(where)
        head, body = text[: len(HEAD % "") + 64], text[len(HEAD % "") + 64 :]
        check.that(head == (HEAD % hashlib.sha256(body).hexdigest()).encode(), "was changed after it was written")
        try:
            rows = json.loads(text, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise check.failed(f"is no JSON: {error}") from error
        found = {key: rows.pop(key, None) for key in FORMAT}
        version = found["version"]
        # Not damaged, so load(fallback=True) must not skip it.
        if found["format"] == FORMAT["format"] and type(version) is int and version > VERSION:
            raise CheckpointError(f"{where} has format {version}, this onefold reads {VERSION}; upgrade onefold")
        check.that(found == FORMAT, f"is {found}; this version of onefold reads {FORMAT}")
        rows.pop("sha256")
        manifest = check.parse(rows)
        check.all(manifest)
        return manifest


def rank_part_to_json(written: Written, entries: Iterable[Entry], records: Iterable[ParamRecord]) -> str:
    """What one rank wrote, as JSON for rank 0, which merges the parts of all ranks."""
    file = FileRecord(written.name, written.bytes, written.header_sha256)
    filled = [entry._replace(file=written.name, sha256=written.sha256[entry.key]) for entry in entries]
    return json.dumps([list(file), [list(entry) for entry in filled], [vars(record) for record in records]])


class RankPart(NamedTuple):
    """What one rank wrote."""

    file: FileRecord
    entries: list[Entry]
    records: list[Any]  # as JSON


def rank_part_from_json(part: str) -> RankPart:
    check = Check("what a rank wrote")
    file, rows, records = json.loads(part)
    return RankPart(check.file(file), [check.entry(row) for row in rows], records)


def merge_rank_parts(parts: Sequence[str], bare: Manifest) -> Manifest:
    """The manifest of what all ranks wrote; `bare` has its other fields. Records from several ranks must agree, but for
    optimizer state that only some of them have."""
    files: list[FileRecord] = []
    entries: list[Entry] = []
    records: dict[str, ParamRecord] = {}
    check = Check("what the ranks wrote")
    for part in map(rank_part_from_json, parts):
        files.append(part.file)
        entries += part.entries
        for record in map(check.record, part.records):
            known = records.setdefault(record.name, record)
            if known is record:
                continue
            both = _united(known, record)
            check.that(both == _united(record, known), f"tells of {record.name!r} in two ways: {known} and {record}")
            records[record.name] = both
    entries.sort(key=lambda entry: entry[:4])
    return replace(bare, files=tuple(files), entries=tuple(entries), records=bare.records + tuple(records.values()))


def _united(one: ParamRecord, other: ParamRecord) -> ParamRecord:
    """The first record, with the states and scalars of both."""
    return replace(one, states={**one.states, **other.states}, scalars={**one.scalars, **other.scalars})


def block_of(entry: Entry, record: ParamRecord) -> Block:
    """The tensor of an entry in its file."""
    return Block(entry.key, record.dtype(entry.state), (entry.span.numel,))


class Check:
    """Parses and checks a manifest, which may be damaged or hostile."""

    def __init__(self, where: str) -> None:
        self._where = where

    def failed(self, why: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"{self._where} {why}; the checkpoint is damaged or was not written by onefold")

    def that(self, right: bool, why: str) -> None:
        """Raises unless `right`. In loops over many rows use `if …: raise failed(…)`, which builds no message."""
        if not right:
            raise self.failed(why)

    # -- from JSON --------------------------------------------------------------------------------------------------

    def parse(self, rows: Any) -> Manifest:
        names = {"step", "ranks", "files", "records", "entries", "about", "optimizer", "extra"}
        self.that(rows.keys() == names, f"has the fields {sorted(rows)}; wanted are {sorted(names)}")
        self.that(sizes([rows["step"], rows["ranks"]]), "has no step and number of ranks")
        self.that(isinstance(rows["about"], dict), "says nothing about itself")
        self.that(isinstance(rows["optimizer"], dict | None), "has an optimizer that is no object")
        return Manifest(
            **{key: rows[key] for key in ("step", "ranks", "about", "optimizer", "extra")},
            files=self._each(rows["files"], self.file),
            records=self._each(rows["records"], self.record),
            entries=self._each(rows["entries"], self.entry),
        )

    def _each(self, rows: Any, parse: Callable[[Any], Any]) -> tuple[Any, ...]:
        self.that(isinstance(rows, list), "has an object where a list belongs")
        return tuple(parse(row) for row in rows)

    def file(self, row: Any) -> FileRecord:
        self._row(row, str, int, str)
        return FileRecord(*row)

    def entry(self, row: Any) -> Entry:
        self._row(row, str, str, int, int, str, list)
        name, state, start, stop, file, sha256 = row
        if set(map(type, sha256)) - {str}:
            raise self.failed(f"has odd digests for {name!r}")
        return Entry(name, state, start, stop, file, tuple(sha256))

    def record(self, row: Any) -> ParamRecord:
        wanted = {"name", "kind", "shape", "stride", "states", "scalars", "also", "dim", "bounds"}
        self.that(isinstance(row, dict) and row.keys() == wanted, f"has a record that is not {sorted(wanted)}")
        kinds = {"name": str, "kind": str, "states": dict, "scalars": dict, "also": list, "dim": int}
        self._row([row[key] for key in kinds], *kinds.values())
        for key in ("shape", "stride", "bounds"):
            self.that(sizes(row[key]), f"has odd {key} for {row['name']!r}")
        self._row(row["also"], *[str] * len(row["also"]))
        lists: dict[str, Any] = {key: tuple(row[key]) for key in ("shape", "stride", "also", "bounds")}
        return ParamRecord(**(row | lists))

    def _row(self, row: Any, *types: type) -> None:
        if not isinstance(row, list) or tuple(map(type, row)) != types:
            raise self.failed(f"has {str(row)[:200]} where {[kind.__name__ for kind in types]} belong")

    # -- contents ---------------------------------------------------------------------------------------------------

    def all(self, manifest: Manifest) -> None:
        for what, value in (("about", manifest.about), ("optimizer", manifest.optimizer), ("extra", manifest.extra)):
            self.that(shallow(value), f"has {what!r} nested more than {DEPTH_LIMIT} deep")
        files = {file.name for file in manifest.files}
        self.that(len(files) == len(manifest.files), "names a file twice")
        for file in manifest.files:
            self.that(bool(FILE_NAME.fullmatch(file.name)), f"names the file {file.name!r}; wanted is {file_name(0)}")
            self.that(file.bytes >= 0 and bool(HEX.fullmatch(file.header_sha256)), f"has an odd size of {file.name}")
        records: dict[str, ParamRecord] = {}
        for record in manifest.records:
            self._check_record(record)
            for name in (record.name, *record.also):
                self.that(name.isprintable(), f"has the name {name!r}")
                self.that(name not in records, f"names {name!r} twice")
                records[name] = record
        spans: dict[tuple[str, str], list[Span]] = {(r.name, s): [] for r in manifest.records for s in r.states}
        for entry in manifest.entries:
            if (entry.name, entry.state) not in spans:
                raise self.failed(f"has an entry {entry.key!r} without a record")
            if entry.file not in files:
                raise self.failed(f"finds {entry.key!r} in {entry.file!r}, which it does not list")
            self._check_digests(entry, records[entry.name])
            spans[entry.name, entry.state].append(entry.span)
        for (name, state), parts in spans.items():
            self._check_cover(name, state, parts, records[name].numel)

    def _check_record(self, record: ParamRecord) -> None:
        who = repr(record.name)
        self.that(record.kind in KINDS, f"says {who} is {record.kind!r}; wanted is one of {KINDS}")
        self.that(VALUE in record.states, f"has no value of {who}")
        for state, dtype in record.states.items():
            self.that(str(dtype) in DTYPES and state.isprintable(), f"says {state!r} of {who} is {dtype!r}")
        for key, value in record.scalars.items():
            small = not isinstance(value, int) or -SCALAR_LIMIT <= value < SCALAR_LIMIT
            self.that(isinstance(value, str | int | float | None) and small, f"has an odd {key!r} of {who}")
        self.that(dense(record.shape, record.stride), f"has {who} with shape {record.shape}, stride {record.stride}")
        bounds = record.bounds
        cut = 0 <= record.dim < len(record.shape) and len(bounds) > 1 and list(bounds) == sorted(bounds)
        fits = cut and bounds[0] == 0 and bounds[-1] == record.shape[record.dim]
        self.that(fits if bounds else record.dim == 0, f"cuts {who} along {record.dim} at {bounds}")

    def _check_digests(self, entry: Entry, record: ParamRecord) -> None:
        if not 0 <= entry.start < entry.stop <= record.numel:
            raise self.failed(f"has {entry.key!r} outside {record.numel:,} elements")
        chunks = -(-(entry.stop - entry.start) * record.dtype(entry.state).itemsize // CHUNK_BYTES)
        if len(entry.sha256) != chunks or not all(map(HEX.fullmatch, entry.sha256)):
            raise self.failed(f"has {len(entry.sha256)} digests of {entry.key!r}; wanted are {chunks}")

    def _check_cover(self, name: str, state: str, parts: list[Span], numel: int) -> None:
        end = 0
        for part in sorted(parts):
            if part.start != end:
                how = "twice" if part.start < end else "nowhere"
                raise self.failed(f"has element {min(part.start, end):,} of {name!r} ({state}) {how}")
            end = part.stop
        self.that(end == numel, f"has {end:,} of {numel:,} elements of {name!r} ({state})")


def shallow(value: Any) -> bool:
    """Whether lists and objects are nested at most DEPTH_LIMIT deep, which every JSON reader and writer supports."""
    layer = [value]
    for _ in range(DEPTH_LIMIT):
        layer = [
            inner
            for node in layer
            if isinstance(node, Mapping | list | tuple)
            for inner in (node.values() if isinstance(node, Mapping) else node)
        ]
        if not layer:
            return True
    return False


def _lines(value: Any) -> str:
    """JSON with one line per row, readable for people and diff."""
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
    return json.dumps(value)
