"""`onefold export`, `inspect` and `verify-checkpoint`: what can be done with a checkpoint without its model."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from onefold.checkpoint.format.address import Address, place
from onefold.checkpoint.format.export import SHARD_BYTES, Exported
from onefold.checkpoint.format.folder import committed, read_manifest
from onefold.checkpoint.format.manifest import Manifest, ParamRecord
from onefold.checkpoint.format.opening import storage_of
from onefold.checkpoint.format.reading import removal_noticed, with_checkpoints, with_newest
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.verify import Damage, verify
from onefold.errors import CheckpointRemoved, visible
from onefold.integrations.checkpoints.exporting import export
from onefold.train.run.exporting import export_run
from onefold.train.run.folder import RunFolder

WIDEST = 1 << 16  # columns of a table in a pipe


@dataclass(frozen=True)
class Export:
    """Write a checkpoint for other programs: its weights as a Hugging Face folder, or model and optimizer for torch."""

    folder: tyro.conf.Positional[Path]
    """The --out of `onefold train` or a folder of checkpoints (the newest is taken), or one step-… in it; or an
    address of a store, as s3://bucket/run."""
    out: tyro.conf.Positional[Path]
    """The folder to write, with --format torch the file; it must not exist. Weights may go to an address of a store."""
    format: Literal["huggingface", "torch", "dcp"] = "huggingface"
    """huggingface: weights, as safetensors shards and their index. torch: one file of torch.save with "model" and
    "optimizer". dcp: a folder of torch.distributed.checkpoint with "model" and "optim"."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """The dtype of the parameters in a Hugging Face folder, by default that of the checkpoint. Buffers keep theirs."""
    shard_bytes: int = SHARD_BYTES
    """The most bytes in one file."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        done = self._export()
        if self.json:
            _write_json({**done._asdict(), "folder": str(done.folder)})
        else:
            said = f"step {done.step}: {_many(done.tensors, 'tensor')}, {decimal(done.bytes)}"
            said += f" in {_many(len(done.files), 'file')}"
            sys.stdout.write(f"{said} → {visible(done.folder)}\n")
        return 0

    def _export(self) -> Exported:
        """The run of `onefold train` for from_pretrained; any other checkpoint under the names that it has."""
        folder = place(self.folder)
        run = RunFolder(folder)
        is_local = not isinstance(folder, Address) and run.facts.is_file() and run.checkpoints.is_dir()
        if self.format == "huggingface" and is_local:
            return export_run(folder, self.out, self.dtype, self.shard_bytes)
        return export(checkpoints_in(folder), self.out, self.dtype, self.shard_bytes, format=self.format)


@dataclass(frozen=True)
class Inspect:
    """Say what is inside a checkpoint. Reads the manifest only."""

    folder: tyro.conf.Positional[Path]
    """The --out of `onefold train` or a folder of checkpoints (the newest is taken), or one step-… in it; or an
    address of a store, as s3://bucket/run."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        folder = checkpoints_in(place(self.folder))
        storage = storage_of(folder)
        path, manifest = with_newest(storage, folder, lambda path: (path, read_manifest(storage, path)))
        others = [] if path == folder else committed(storage, folder)
        if self.json:
            _write_json(contents(path, manifest, others))
        else:
            _show(path, manifest, others)
        return 0


@dataclass(frozen=True)
class VerifyCheckpoint:
    """Read every byte of a checkpoint, or of all in a folder, and check every digest. Exit code 1 at damage.

    A checkpoint that its run removes meanwhile is no damage: of a folder of checkpoints the others are read.
    """

    folder: tyro.conf.Positional[Path]
    """The --out of `onefold train` or a folder of checkpoints, or one step-… in it; or an address of a store,
    as s3://bucket/run."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        folder = checkpoints_in(place(self.folder))
        storage = storage_of(folder)
        with _progress(not self.json) as progress:
            found = with_checkpoints(storage, folder, partial(self._verified, storage, folder, progress))
        if self.json:
            _write_json({str(path): [damage._asdict() for damage in damages] for path, damages in found.items()})
        else:
            for path, damages in found.items():
                lines = [f"DAMAGED  {visible(damage.what)}\n" for damage in damages]
                sys.stdout.write("".join(lines) or f"ok       {visible(path)}\n")
        return 1 if any(found.values()) else 0

    @staticmethod
    def _verified(storage: Storage, folder: Path, progress: Progress, paths: list[Path]) -> dict[Path, list[Damage]]:
        """The damage of each checkpoint that its run did not remove meanwhile; raises if the given one, or all, were
        removed."""
        found = {}
        for path in paths:
            task = progress.add_task(visible(path.name), total=None)
            try:
                with removal_noticed(storage, path):
                    progress.update(task, total=_bytes(storage, path))
                    found[path] = verify(storage, path, partial(progress.advance, task))
            except CheckpointRemoved:
                if path == folder:
                    raise
        if not found:
            raise CheckpointRemoved(f"every checkpoint in {folder} was removed by its run while it was being read")
        return found


def checkpoints_in(folder: Path) -> Path:
    """The folder of checkpoints: this one, or the subfolder of a run that `onefold train` made here."""
    inner, storage = RunFolder(folder).checkpoints, storage_of(folder)
    return inner if storage.is_folder(inner) and not committed(storage, folder) else folder


def contents(path: Path, manifest: Manifest, others: Sequence[int]) -> dict[str, Any]:
    """The output of `onefold inspect` as a dict for JSON."""
    return {
        "path": str(path),
        "step": manifest.step,
        "ranks": manifest.ranks,
        "committed_steps": list(others) or [manifest.step],
        "about": manifest.about,
        "bytes": sum(file.bytes for file in manifest.files),
        "bytes_by_state": _by_state(manifest),
        "files": [file._asdict() for file in manifest.files],
        "tensors": [
            {
                "name": record.name, "also": record.also, "kind": record.kind, "shape": record.shape,
                "states": record.states, "scalars": record.scalars, "bytes": _record_bytes(record),
            }
            for record in manifest.records
        ],
        "extra": manifest.extra,
    }  # fmt: skip


def _show(path: Path, manifest: Manifest, others: Sequence[int]) -> None:
    console = Console(highlight=False)
    total = sum(file.bytes for file in manifest.files)
    facts = {visible(key): str(value) for key, value in manifest.about.items() if isinstance(value, str | int)}
    lines = [f"{visible(path)}: step {manifest.step}, {_many(manifest.ranks, 'rank')}, {decimal(total)}"]
    lines += [", ".join(f"{key} {visible(value)}" for key, value in facts.items() if "\n" not in value)]
    lines += [f"  {visible(row)}" for value in facts.values() if "\n" in value for row in value.splitlines()]  # a table
    lines += [f"{state}: {decimal(size)}" for state, size in _by_state(manifest).items()]
    lines += ["committed: " + ", ".join(map(str, others))] * (len(others) > 1)
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    table = Table(*(Column(head, overflow="fold") for head in ("tensor", "kind", "shape", "states")))
    table.add_column("bytes", justify="right")
    for record in manifest.records:
        name = "\n= ".join(map(visible, [record.name, *record.also]))
        states = ", ".join(f"{visible(state)} {dtype}" for state, dtype in record.states.items())
        shape = "×".join(map(str, record.shape)) or "scalar"
        table.add_row(*map(Text, (name, record.kind, shape, states, decimal(_record_bytes(record)))))
    if not console.is_terminal:  # a program reads it: one line for each tensor, with its whole name
        unlimited = console.options.update(max_width=WIDEST)
        console.width = max(console.width, console.measure(table, options=unlimited).maximum)
    console.print(table)


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _by_state(manifest: Manifest) -> dict[str, int]:
    sizes: dict[str, int] = defaultdict(int)
    for record in manifest.records:
        for state in record.states:
            kind = record.kind if state == "value" else "optimizer"
            sizes[f"{kind} {state}"] += record.numel * record.dtype(state).itemsize
    return dict(sizes)


def _record_bytes(record: ParamRecord) -> int:
    return sum(record.numel * record.dtype(state).itemsize for state in record.states)


def _bytes(storage: Storage, path: Path) -> int:
    names = [name for name in storage.names(path) if name.endswith(".safetensors")]
    return sum(storage.size(path / name) for name in names)


@contextmanager
def _progress(shown: bool) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as progress:
        yield progress


def _write_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
