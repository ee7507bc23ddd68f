"""Copies the state to the memory of neighbours, beside training.

1 On the calling thread: a snapshot of what this rank owns, in host memory.
2 In the background each rank writes its snapshot to its node's folder, with digests.
3 Each rank sends its digests and its file to the rank that keeps it on the next node, in chunks; that rank hashes each
chunk as it comes, and compares.
4 Once all files of all ranks are kept, rank 0 merges the manifest, every rank writes it and gives its folder its name,
and older copies are removed.
The last complete copy stays until then, whatever happens in between.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.checkpoint.format.folder import MANIFEST, remove_all, step_name
from onefold.checkpoint.format.manifest import file_name
from onefold.checkpoint.format.storage import Out, Storage
from onefold.checkpoint.format.verify import Arriving
from onefold.checkpoint.memory.neighbours import Node
from onefold.checkpoint.memory.places import DRAFT, remove
from onefold.checkpoint.protocol.save import Job, merged_manifest, part_from, write_part
from onefold.checkpoint.protocol.state import CHUNK_BYTES
from onefold.checkpoint.protocol.together import attempt
from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.cost.layout import Span
from onefold.errors import CheckpointError, CommError
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

    def write() -> Sizes:
        parts.append(write_part(job, draft / file_name(rank), digests))
        return Sizes(len(parts[0]), storage.size(draft / file_name(rank)))

    def keep() -> None:
        if trouble is not None:
            raise trouble
        texts.append(merged_manifest(job, rows).to_json() if rank == 0 else b"")

    parts: list[bytes] = []
    texts: list[bytes] = []
    try:
        digests = attempt(comm, begin)
        sizes = [Sizes(*row) for row in attempt(comm, write)]
        rows = comm.gather_to_rank0(parts[0], SENT)
        trouble = _pass_on(job, places, draft, parts[0], sizes)
        attempt(comm, keep)
        text = comm.broadcast_bytes(texts[0], SENT)
        attempt(comm, lambda: _seal(storage, draft, text, places.folder / name))
    except Exception as error:
        # Where a peer has died, the copy may be complete all the same: what has its name stays.
        for path in [draft] if isinstance(error, CommError) else [draft, places.folder / name]:
            with suppress(CheckpointError):
                remove_all(storage, path)
        raise
    for one in older if rank == places.node.ranks[0] else ():
        remove(places.folder / one)


class Sizes(NamedTuple):
    """In bytes, of one rank."""

    part: int  # of its part of the manifest
    file: int


def _pass_on(job: Job, places: Places, draft: Path, part: bytes, sizes: Sequence[Sizes]) -> Exception | None:
    """Sends this rank's file to its keeper, and writes and checks those that it keeps for others; an error of that is
    returned, since peers must not wait."""
    comm, rank, storage = job.comm, job.comm.rank, job.storage
    sent = sizes[rank].file if rank in places.keepers else 0
    kept = places.kept_by(rank)
    parts = _parts(comm, places, part, sizes)
    buffers = {one: torch.empty(CHUNK_BYTES, dtype=torch.uint8) for one in [rank, *kept]}
    trouble: list[Exception] = []
    with ExitStack() as opened:
        outs: dict[int, tuple[Out, Arriving]] = {}
        for one in kept:
            with _noting(trouble):
                arriving = Arriving(file_name(one), part_from(parts[one]))
                outs[one] = opened.enter_context(storage.create(draft / file_name(one))), arriving
        for start in range(0, max([sent, *(sizes[one].file for one in kept)]), CHUNK_BYTES):
            sends: dict[int, Tensor] = {}
            mine = _chunk(start, sent)
            if mine.numel:
                sends[places.keepers[rank]] = buffers[rank][: mine.numel]
                with _noting(trouble):
                    storage.read(draft / file_name(rank), mine.start, bytes_of(sends[places.keepers[rank]]))
            wanted = {one: _chunk(start, sizes[one].file) for one in kept}
            receives = {one: buffers[one][: span.numel] for one, span in wanted.items() if span.numel}
            comm.swap(sends, receives, SENT).wait()
            for one, tensor in receives.items():
                if one in outs and not trouble:
                    out, arriving = outs[one]
                    arriving.take(bytes_of(tensor))
                    with _noting(trouble):
                        out.write(bytes_of(tensor))
        for _, arriving in outs.values() if not trouble else ():
            with _noting(trouble):
                arriving.check()
    return trouble[0] if trouble else None


def _parts(comm: Comm, places: Places, part: bytes, sizes: Sequence[Sizes]) -> dict[int, bytes]:
    """The parts of the manifest of those whose files this rank keeps."""
    boxes = {one: torch.empty(sizes[one].part, dtype=torch.uint8) for one in places.kept_by(comm.rank)}
    mine = torch.frombuffer(bytearray(part), dtype=torch.uint8)
    comm.swap({places.keepers[comm.rank]: mine} if comm.rank in places.keepers else {}, boxes, SENT).wait()
    return {one: bytes(bytes_of(box)) for one, box in boxes.items()}


def _chunk(start: int, size: int) -> Span:
    return Span(min(start, size), min(start + CHUNK_BYTES, size))


@contextmanager
def _noting(trouble: list[Exception]) -> Iterator[None]:
    """Notes an error of an operation on files, and goes on."""
    try:
        yield
    except CheckpointError as error:
        trouble.append(error)


def _seal(storage: Storage, draft: Path, text: bytes, target: Path) -> None:
    """Writes the manifest, and gives the copy its name."""
    with storage.create(draft / MANIFEST) as out:
        out.write(memoryview(text))
        out.finish()
    storage.rename(draft, target)
