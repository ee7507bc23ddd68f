"""Pickled files, read by a process of their own that may only read tensors: nothing is unpickled in this one.

The files are opened here and handed to that process, which writes the tensors of each as safetensors and everything
else as JSON, into a scratch folder. Both are then read here as hostile input, as checkpoints are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onefold.checkpoint.format.notes import decode
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import TensorFile
from onefold.cost.layout import Span
from onefold.errors import CheckpointDamaged, CheckpointError, visible
from onefold.settings.limited import opened, read_json

TOGETHER = 64  # files that one process reads: descriptors are few
CHUNK_BYTES = 16 << 20
KEPT = ("PATH", "LD_LIBRARY_PATH", "LANG")  # of the environment, in which secrets may be
READER = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from onefold.integrations.checkpoints.unpickle import main; sys.exit(main())"
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in the scratch folder. Two names of one tensor have the same file and key."""

    file: TensorFile
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.file.blocks[self.key].numel

    def chunks(self, span: Span) -> Iterator[Tensor]:
        """These elements, in row-major order, as vectors of at most CHUNK_BYTES."""
        step = CHUNK_BYTES // self.dtype.itemsize
        for start in range(span.start, span.stop, step):
            part = Span(start, min(start + step, span.stop))
            out = torch.empty(part.numel, dtype=self.dtype)
            self.file.read(self.key, part, out)
            yield out

    def value(self) -> Tensor:
        parts = list(self.chunks(Span(0, self.numel)))
        return (torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)).view(self.shape)


class Job:
    """One file, or one DCP folder, to be read."""

    def __init__(self, path: Path, parts: Mapping[str, Path] | None = None) -> None:
        self.path, self.parts = path, parts


def read_pickled(paths: Sequence[Path], scratch: Path) -> list[Any]:
    """What torch.save wrote into each file, with a StoredTensor in place of each tensor."""
    found: list[Any] = []
    for path, file, tree in _read([Job(path) for path in paths], scratch):
        found.append(_decoded(path, file, tree))
    return found


def read_dcp_items(folder: Path, scratch: Path) -> tuple[dict[str, Any], TensorFile]:
    """The items of a DCP folder by their flat keys, and the file with the chunks of its tensors."""
    parts = {path.name: path for path in sorted(folder.iterdir()) if path.name != ".metadata"}
    [(path, file, tree)] = _read([Job(folder / ".metadata", parts)], scratch)
    for item in tree["items"].values():
        if "value" in item:
            item["value"] = decode(item["value"], _no_tensors(path))
    return tree["items"], file


def _read(jobs: Sequence[Job], scratch: Path) -> Iterator[tuple[Path, TensorFile, Any]]:
    for first in range(0, len(jobs), TOGETHER):
        some = jobs[first : first + TOGETHER]
        names = [(scratch / f"{first + i}.safetensors", scratch / f"{first + i}.json") for i in range(len(some))]
        _start_reader(some, names)
        for job, (tensors, tree) in zip(some, names, strict=True):
            yield job.path, TensorFile(Storage(), tensors), read_json(tree)


def _start_reader(jobs: Sequence[Job], names: Sequence[tuple[Path, Path]]) -> None:
    """Runs the process that reads; raises what it refuses."""
    with ExitStack() as stack:
        descriptors: list[int] = []
        size = 0

        def source(path: Path) -> int:
            nonlocal size
            try:
                file = stack.enter_context(opened(path, None))
            except FileNotFoundError as error:
                raise CheckpointError(f"{path} does not exist; name the folder or file to import") from error
            size += os.fstat(file.fileno()).st_size
            descriptors.append(file.fileno())
            return file.fileno()

        def target(path: Path) -> int:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, descriptor)
            descriptors.append(descriptor)
            return descriptor

        rows = [
            {
                "source": source(job.path), "tensors": target(tensors), "tree": target(tree),
                "parts": None if job.parts is None else {name: source(path) for name, path in job.parts.items()},
            }
            for job, (tensors, tree) in zip(jobs, names, strict=True)
        ]  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-I", "-c", READER, json.dumps([path for path in sys.path if path])],
            input=json.dumps({"files": rows, "bytes": size}), capture_output=True, text=True, pass_fds=descriptors,
            env={"OMP_NUM_THREADS": "1"} | {name: os.environ[name] for name in KEPT if name in os.environ},
        )  # fmt: skip
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        many = f"{jobs[0].path}" + (f" and {len(jobs) - 1} more" if len(jobs) > 1 else "")
        raise CheckpointError(
            f"the process that reads {many} ended with {_ended(done.returncode)}: {visible(said[:200])}; it may use "
            f"four GB and twice the size of the files"
        ) from None
    if answer["error"] is not None:
        raise CheckpointError(f"{jobs[answer['file']].path} {visible(answer['error'])}")


def _ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _decoded(path: Path, file: TensorFile, tree: Any) -> Any:
    def stored(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
        key = tree["aliases"].get(key, key)
        if key not in file.blocks or file.blocks[key][1:] != (dtype, shape):
            raise CheckpointDamaged(f"{path} was read as tensors that its settings do not name; import it again")
        return StoredTensor(file, key, dtype, shape)

    return decode(tree["tree"], stored)


def _no_tensors(path: Path) -> Any:
    def refuse(*_: object) -> Any:
        raise CheckpointDamaged(f"{path} has a tensor where a plain value was wanted")

    return refuse
