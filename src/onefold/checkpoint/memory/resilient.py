"""`resilient()`: a training loop that goes on after ranks were lost, from copies of its state in memory.

At the start all ranks agree on the newest copy that is complete in the memory of the nodes that are left, and each
reads the elements that it owns now, from its own node or from peers. Only where no copy is complete, or the newest
checkpoint is newer, is the state read from that checkpoint, on disk or in an object store.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from onefold.checkpoint.format.address import Address, place
from onefold.checkpoint.format.folder import committed
from onefold.checkpoint.format.manifest import VALUE, Manifest
from onefold.checkpoint.format.opening import check_shared, storage_of
from onefold.checkpoint.format.reading import Checkpoint
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.memory.copying import Places, copy
from onefold.checkpoint.memory.found import Chosen, LocalCopy, choose, local_copies, readable_by, undamaged
from onefold.checkpoint.memory.late import late
from onefold.checkpoint.memory.neighbours import check_room, keepers, nodes_of
from onefold.checkpoint.memory.peers import COPY, RANGES, CopyStorage, Peers
from onefold.checkpoint.memory.places import (
    DRAFT,
    copies_folder,
    identity,
    remove,
    remove_copies,
    remove_stale,
    room_bytes,
)
from onefold.checkpoint.protocol.background import Worker, finish_saves
from onefold.checkpoint.protocol.load import load, load_opened, pass_over
from onefold.checkpoint.protocol.optimizers import checked
from onefold.checkpoint.protocol.save import Job, SaveRequest, describe_job, optimizer_note, staged
from onefold.checkpoint.protocol.stages import StageContents, joined_groups, stage_contents
from onefold.checkpoint.protocol.state import OwnedElements, rank_contents
from onefold.checkpoint.protocol.together import attempt, check_same
from onefold.comm.streams import SideStream, StreamEvent
from onefold.errors import CheckpointDamaged, CheckpointError, CommError, ConfigError, OffloadError
from onefold.offload.host_memory import bytes_of
from onefold.optim.optimizer import Optimizer
from onefold.runtime.engine import Engine, engine_of

LOG = logging.getLogger("onefold")


MEMORY, DISK, STORE = "memory", "disk", "store"  # where a state is restored from


def resilient(
    folder: str | Path, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, every: int = 10
) -> Resilient:
    """Make a training loop go on after ranks were lost: restore the newest state, then keep copies of it in memory.

    Every `every` steps the state is copied, beside training, to the memory of this node and of a neighbour on another
    node. When ranks were lost and torchrun or `onefold run` has started those that are left, at any number, the state
    is restored from these copies; or from the newest checkpoint of `folder`, where `onefold.save` puts them, if memory
    has no complete copy or an older one. Collective.

    >>> import tempfile, torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=2)
    >>> optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    >>> with tempfile.TemporaryDirectory() as folder, onefold.resilient(folder, model, optimizer, every=2) as run:
    ...     for step in range(run.extra["step"] if run.extra else 0, 4):
    ...         model(torch.ones(2, 8)).sum().backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    ...         run.step({"step": step + 1})
    """
    return Resilient(folder, model, optimizer, every=every)


class Snapshot(NamedTuple):
    """A copy in host memory of what a rank owns; it may be read once the event `complete` has passed."""

    owned: Sequence[OwnedElements]
    complete: StreamEvent


class Resilient:
    """Copies of the state of a training loop in memory; made by `resilient`, which has restored the state.

    As a context it removes the copies when the block ends, and keeps them for the next start if the block raises.

    >>> import tempfile, torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=2)
    >>> optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = onefold.save(folder, model, optimizer, extra={"epoch": 3})
    ...     with onefold.Resilient(folder, model, optimizer) as run:
    ...         run.restored, run.extra
    ('disk', {'epoch': 3})
    """

    def __init__(
        self, folder: str | Path, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], *, every: int = 10
    ) -> None:
        self._model, self._engine = model, engine_of(model)
        world = self._engine.comms.world
        self._comm = self._engine.background_comm(world.timeout.total_seconds(), "copies in memory")
        self._run, self._every = place(folder), every
        self._optimizers: list[Optimizer] = []
        self._worker, self._storage = Worker(), Storage()
        self._beside = SideStream(self._engine.device)  # where state leaves a GPU beside the next forward and backward
        self._copying: int | None = None  # the step whose copy is being made
        self._began_s, self._told_late = 0.0, False
        self._places, self._nodes = self._prepare(optimizer)
        self._extra, self._restored = self._restore()

    @property
    def extra(self) -> Any:
        """What was given to `step`, or to `save`, with the state that was restored; None if the run starts."""
        return self._extra

    @property
    def restored(self) -> str | None:
        """Where the state was restored from: "memory", "disk", "store" (an object store), or None if the run starts."""
        return self._restored

    # -- copies ------------------------------------------------------------------------------------------------------

    def step(self, extra: Any = None, *, step: int | None = None) -> None:
        """Call after every step, on all ranks, with what must be restored with the state (see `save`). `step` is by
        default how many steps the optimizer has taken or skipped; every so many are copied."""
        number = max(one.tried for one in self._optimizers) if step is None else step
        if number % self._every == 0:
            self._finish(number)
            self._start(extra, number)

    def close(self) -> None:
        """Waits for the last copy, and for a checkpoint that is still being saved, and removes all copies: the run is
        done, and its result saved. Collective."""
        finish_saves()  # what is not committed yet is in the copies alone
        self._finish()
        attempt(self._comm, lambda: None)  # nobody reads or writes there any more
        if self._comm.rank == self._places.node.ranks[0]:
            remove_copies(self._places.folder)

    def __enter__(self) -> Resilient:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif not issubclass(kind, CommError):  # else peers may have ended, and would be waited for
            with suppress(Exception):
                self._worker.finish()

    def _start(self, extra: Any, step: int) -> None:
        """Takes a snapshot, and starts to copy it."""
        engine = self._engine
        request = SaveRequest(self._places.folder, self._optimizers, extra, step, None, False, False, None)
        try:
            job = describe_job(engine, self._comm, self._storage, request)
            job = replace(job, optimizer=optimizer_note(self._optimizers, self._groups(), copy=True))
            snapshot = self._snapshot(job)
        finally:
            engine.tiers.load_for_reading(None)
        self._copying, self._began_s = step, time.monotonic()
        self._worker.start(lambda: _copy_after(snapshot, job, self._places))

    @torch.no_grad()
    def _snapshot(self, job: Job) -> Snapshot | Exception:
        """The state in host memory; the error if there is no room for it, which then all ranks are told."""
        try:
            copies = staged(job.owned, job.device, self._worker, self._beside)
        except (OffloadError, MemoryError, RuntimeError) as error:
            if isinstance(error, CommError):
                raise
            return error
        self._beside.wait_for_current()
        event = self._beside.event()
        self._engine.tiers.snapshot_until(event)
        return Snapshot(copies, event)

    def _groups(self) -> list[list[str]]:
        """The names in each param group, of all stages of a pipeline."""
        mine = stage_contents(self._engine, self._optimizers)
        if self._engine.comms.pp.size == 1:
            return joined_groups([mine])
        return joined_groups([StageContents(*row) for row in attempt(self._comm, lambda: mine)])

    def _finish(self, now: int = 0) -> None:
        """Waits for the copy that is being made; another is due after step `now`, if that is given. If it has failed,
        the run goes on, and the last one stays."""
        step, self._copying = self._copying, None
        waits_s = time.monotonic()
        try:
            self._worker.finish()
        except CommError:
            raise
        except Exception as error:
            if self._comm.rank == self._places.node.ranks[0]:
                LOG.warning("step %s was not copied to memory, the copy before it stays: %s", step, error)
        ended_s = time.monotonic()
        said = "" if step is None else late(step, now, ended_s - self._began_s, ended_s - waits_s)
        if said and not self._told_late and self._comm.rank == 0:
            self._told_late = True
            LOG.warning("%s", said)

    # -- the start ---------------------------------------------------------------------------------------------------

    def _prepare(self, optimizer: Optimizer | Sequence[Optimizer]) -> tuple[Places, list[str]]:
        """Checks the arguments, finds the nodes, and checks that all of them have room."""
        folders: list[Path] = []

        def look() -> list[Any]:
            if type(self._every) is not int or self._every < 1:
                raise ConfigError(f"every={self._every!r} is not a number of steps of at least 1")
            self._optimizers.extend(checked(self._engine, optimizer))
            if not self._optimizers:
                raise ConfigError("resilient() needs the model's Optimizer: without its state no run can go on")
            check_shared(self._run, self._comm.size)
            remove_stale()
            folders.append(copies_folder(self._run.absolute()))
            size = state_bytes(self._engine, self._optimizers)
            return [self._every, identity(folders[0]), size, room_bytes(folders[0]), str(folders[0])]

        rows = attempt(self._comm, look)
        check_same(self._comm, [row[0] for row in rows], "copies every", "every=")
        names = [row[1] for row in rows]
        nodes = nodes_of(names)
        node = next(one for one in nodes if self._comm.rank in one.ranks)
        rooms = {one.name: rows[one.ranks[0]][3] for one in nodes}
        check_room(nodes, [row[2] for row in rows], rooms, rows[0][4])
        if self._comm.rank == node.ranks[0]:
            for draft in folders[0].glob(f"{DRAFT}*"):
                remove(draft)
        return Places(folders[0], node, keepers(nodes)), names

    def _restore(self) -> tuple[Any, str | None]:
        rank, node = self._comm.rank, self._places.node
        copies: dict[str, LocalCopy] = {}
        newest: list[int] = []

        def look() -> list[Any]:
            copies.update(local_copies(self._places.folder))
            newest.append(self._newest_saved() if rank == 0 else -1)
            return [newest[0], undamaged(copies.values(), node.ranks.index(rank), len(node.ranks))]

        answers = attempt(self._comm, look)
        chosen, saved = choose([row[1] for row in answers]), answers[0][0]
        source = STORE if isinstance(self._run, Address) else DISK
        if chosen is None:
            newest_of_all = load(str(self._run), self._model, self._optimizers, fallback=True) if saved >= 0 else None
            return newest_of_all, source if saved >= 0 else None
        while saved > chosen.step:
            try:
                return load(str(self._run), self._model, self._optimizers), source
            except CheckpointDamaged as error:  # the copy may be newer than the checkpoint before it
                pass_over(self._comm, self._run, saved, error)
            before, saved = saved, attempt(self._comm, lambda: self._newest_saved() if rank == 0 else -1)[0]
            if saved >= before:  # it could not be set aside
                break
        return self._from_memory(chosen, copies.get(chosen.digest)), MEMORY

    def _newest_saved(self) -> int:
        finish_saves()
        storage = storage_of(self._run)
        return max(committed(storage, self._run), default=-1) if storage.is_folder(self._run) else -1

    def _from_memory(self, chosen: Chosen, copy: LocalCopy | None) -> Any:
        readable = readable_by(chosen, self._nodes)
        text = self._manifest_text(chosen, copy)
        manifest = Manifest.from_json(text, "the manifest of a copy")
        here = {name: path for name, path in (copy.files if copy else {}).items() if name in readable[self._comm.rank]}
        if all(len(files) == len(chosen.holders) for files in readable.values()):
            storage = CopyStorage(text, manifest, here)
            return load_opened(self._model, self._optimizers, lambda: Checkpoint(storage, COPY))
        holders = {name: ranks[0] for name, ranks in chosen.holders.items()}
        read = CopyStorage(text, manifest, here).read
        with Peers(self._comm, holders, lambda file, offset, into: read(COPY / file, offset, into)) as peers:
            storage = CopyStorage(text, manifest, here, peers)
            return load_opened(self._model, self._optimizers, lambda: Checkpoint(storage, COPY))

    def _manifest_text(self, chosen: Chosen, copy: LocalCopy | None) -> bytes:
        """The manifest, on every rank: sent by the first rank that has it to those that have not. Collective."""
        has = [json.loads(row) for row in self._comm.exchange(json.dumps(copy is not None).encode(), RANGES)]
        first, lacking = has.index(True), [rank for rank, there in enumerate(has) if not there]
        if copy is not None:
            text = torch.frombuffer(bytearray(copy.text), dtype=torch.uint8)
        else:
            text = torch.empty(chosen.manifest_bytes, dtype=torch.uint8)
        sends = {rank: text for rank in lacking} if self._comm.rank == first else {}
        self._comm.swap(sends, {first: text} if self._comm.rank in lacking else {}, RANGES).wait()
        return bytes(bytes_of(text))


def _copy_after(snapshot: Snapshot | Exception, job: Job, places: Places) -> None:
    """Copies a job from the snapshot of its state. The job keeps that state alive while the snapshot is taken."""
    if isinstance(snapshot, Exception):
        _tell(job, snapshot)
    else:
        snapshot.complete.wait()
        copy(replace(job, owned=snapshot.owned, device=torch.device("cpu")), places)


def _tell(job: Job, error: Exception) -> None:
    """Tells the other ranks, which begin to copy, why this one does not."""

    def fail() -> None:
        raise CheckpointError(f"no snapshot of the state could be taken: {error}") from error

    attempt(job.comm, fail)


def state_bytes(engine: Engine, optimizers: Sequence[Optimizer]) -> int:
    """Bytes of what this rank copies, once every parameter was updated."""
    owned = rank_contents(engine, optimizers).owned
    trained = set(engine.names)
    values = [one for one in owned if one.state == VALUE]
    per_element = max(one.state_bytes_per_element for one in optimizers)
    planned = sum(one.bytes + one.elements.numel * per_element * (one.name in trained) for one in values)
    return max(planned, sum(one.bytes for one in owned))
