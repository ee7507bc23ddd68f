"""Copies the state to the memory of neighbours, beside training.

1 On the calling thread: a snapshot of what this rank owns, in host memory.
2 In the background each rank writes its snapshot to its node's folder, with digests; rank 0 merges the manifest.
3 Each rank sends its file to the rank that keeps it on the next node, in chunks; that rank checks the digests.
4 Once all files of all ranks are kept, every rank gives its folder its name, and older copies are removed.
The last complete copy stays until then, whatever happens in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from onefold.checkpoint.format.folder import MANIFEST, remove_all, step_name
from onefold.checkpoint.format.manifest import Manifest, file_name
from onefold.checkpoint.format.storage import Out, Storage
from onefold.checkpoint.format.verify import check
from onefold.checkpoint.memory.neighbours import Node
from onefold.checkpoint.memory.places import DRAFT, remove
from onefold.checkpoint.protocol.save import Job, merged_manifest, write_part
from onefold.checkpoint.protocol.state import CHUNK_BYTES
from onefold.checkpoint.protocol.together import attempt
from onefold.comm.meter import Label
from onefold.cost.layout import Span
from onefold.errors import CheckpointError
from onefold.offload.host_memory import bytes_of

SENT = Label("checkpoint", "copies in memory")


@dataclass(frozen=True)
class Places:
    """Where this rank keeps copies, and for whom."""

    folder: Path  # of its node
    node: Node
    keepers: Mapping[int, int]  # rank -> the rank on another node that keeps its copy

    def kept_by(self, rank: int) -> list[int]:
        """The ranks whose copies a rank keeps."""
        return [other for other, keeper in self.keepers.items() if keeper == rank]


def copy(job: Job, places: Places) -> None:
    """Steps 2 to 4. Collective, on any thread."""
    comm, rank, storage = job.comm, job.comm.rank, job.storage
    name = f"{step_name(job.step)}-{rank:05}-{secrets.token_hex(4)}"
    draft = places.folder / f"{DRAFT}{name}"
    older = [one for one in storage.names(places.folder) if not one.startswith(DRAFT)]

    def begin() -> dict[str, str]:
        storage.make_folder(draft)
        return {key: one.digest() for key, one in job.own.items()}

    try:
        digests = attempt(comm, begin)
        parts: list[bytes] = []
        attempt(comm, lambda: parts.append(write_part(job, draft / file_name(rank), digests)))
        rows = comm.gather_to_rank0(parts[0], SENT)
        texts: list[bytes] = []
        attempt(comm, lambda: texts.append(merged_manifest(job, rows).to_json() if rank == 0 else b""))
        text = comm.broadcast_bytes(texts[0], SENT)
        error = _pass_on(job, places, draft, Manifest.from_json(text, "the manifest of a copy"))
        attempt(comm, lambda: _seal(storage, draft, text, [file_name(one) for one in places.kept_by(rank)], error))
        attempt(comm, lambda: storage.rename(draft, places.folder / name))
    except Exception:
        with suppress(CheckpointError):
            remove_all(storage, draft)
        raise
    for one in older if rank == places.node.ranks[0] else ():
        remove(places.folder / one)


def _pass_on(job: Job, places: Places, draft: Path, manifest: Manifest) -> Exception | None:
    """Sends this rank's file to its keeper, and writes those that it keeps for others; an error of writing is returned,
    since peers must not wait."""
    comm, rank, storage = job.comm, job.comm.rank, job.storage
    sizes = {file.name: file.bytes for file in manifest.files}
    sent = sizes[file_name(rank)] if rank in places.keepers else 0
    kept = places.kept_by(rank)
    buffers = {one: torch.empty(CHUNK_BYTES, dtype=torch.uint8) for one in [rank, *kept]}
    trouble: list[Exception] = []
    with ExitStack() as opened:
        outs: dict[int, Out] = {}
        for one in kept:
            with _noting(trouble):
                outs[one] = opened.enter_context(storage.create(draft / file_name(one)))
        for start in range(0, max(sizes.values()) if places.keepers else 0, CHUNK_BYTES):
            sends: dict[int, Tensor] = {}
            mine = _chunk(start, sent)
            if mine.numel:
                sends[places.keepers[rank]] = buffers[rank][: mine.numel]
                with _noting(trouble):
                    storage.read(draft / file_name(rank), mine.start, bytes_of(sends[places.keepers[rank]]))
            wanted = {one: _chunk(start, sizes[file_name(one)]) for one in kept}
            receives = {one: buffers[one][: span.numel] for one, span in wanted.items() if span.numel}
            comm.swap(sends, receives, SENT).wait()
            for one, tensor in receives.items():
                if one in outs and not trouble:
                    with _noting(trouble):
                        outs[one].write(bytes_of(tensor))
    return trouble[0] if trouble else None


def _chunk(start: int, size: int) -> Span:
    return Span(min(start, size), min(start + CHUNK_BYTES, size))


@contextmanager
def _noting(trouble: list[Exception]) -> Iterator[None]:
    """Notes an error of an operation on files, and goes on."""
    try:
        yield
    except CheckpointError as error:
        trouble.append(error)


def _seal(storage: Storage, draft: Path, text: bytes, kept: Sequence[str], error: Exception | None) -> None:
    """Writes the manifest, and checks every byte of the files that are kept for others."""
    if error is not None:
        raise error
    with storage.create(draft / MANIFEST) as out:
        out.write(memoryview(text))
        out.finish()
    check(storage, draft, only=kept)
