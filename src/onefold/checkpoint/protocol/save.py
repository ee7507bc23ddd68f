"""Saves a checkpoint: every rank writes the elements it owns, rank 0 merges the manifest and commits.

1 On the calling thread: describe what this rank owns; for a save in the background, copy it to host memory, if all
ranks have room for that.
2 Rank 0 begins. 3 Each rank writes and flushes its file. 4 Rank 0 collects what each file holds, and commits.
Steps 2 to 4 communicate over a group of their own; in each, if one rank fails, all raise the same error.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from onefold.checkpoint.format.address import place
from onefold.checkpoint.format.folder import step_name
from onefold.checkpoint.format.manifest import (
    Manifest,
    ParamRecord,
    RankPart,
    block_of,
    merge_rank_parts,
    rank_part_from_json,
    rank_part_to_json,
)
from onefold.checkpoint.format.opening import check_shared, storage_of
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import write_tensors
from onefold.checkpoint.protocol.background import WORKER
from onefold.checkpoint.protocol.commit import begin, clean, commit, retain
from onefold.checkpoint.protocol.draft import Draft
from onefold.checkpoint.protocol.optimizers import Given, checked
from onefold.checkpoint.protocol.own import EXTRA_NOTE, Note, differing, note, notes_of
from onefold.checkpoint.protocol.quiesce import background_comm, check_and_quiesce
from onefold.checkpoint.protocol.snapshot import staged
from onefold.checkpoint.protocol.stages import StageContents, joined_groups, stage_contents
from onefold.checkpoint.protocol.state import OwnedElements, on_host, rank_contents
from onefold.checkpoint.protocol.together import CHECKPOINT, attempt, check_same
from onefold.comm.communicator import Comm
from onefold.errors import CheckpointDamaged, CheckpointError, ConfigError
from onefold.offload.host_memory import host_share, size_text
from onefold.optim.optimizer import Optimizer
from onefold.runtime.engine import Engine, engine_of
from onefold.runtime.full_parameters import TRAINABLE
from onefold.runtime.refusals import Call
from onefold.version import VERSION

LOG = logging.getLogger("onefold")
LAST_STEP = 10**18 - 1  # that fits into a folder's name


@dataclass(frozen=True)
class Job:
    """All that a save needs; in the background it refers to copies, not to the model."""

    comm: Comm
    storage: Storage
    run: Path
    step: int
    keep: int | None
    overwrite: bool
    owned: Sequence[OwnedElements]
    records: Sequence[ParamRecord]
    own: dict[str, Note]
    optimizer: Note | None
    about: dict[str, Any]
    device: torch.device  # where `owned` lies


class SaveRequest(NamedTuple):
    """The arguments of save()."""

    run: Path
    optimizers: Sequence[Optimizer]
    extra: Any
    step: int | None
    keep: int | None
    wait: bool
    overwrite: bool
    only: str | None


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    extra: Any = None,
    step: int | None = None,
    keep: int | None = None,
    wait: bool = True,
    overwrite: bool = False,
    only: str | None = None,
) -> Path:
    """Write a checkpoint `step-…` into the run's `folder`, and return its path. Collective.

    A checkpoint is committed as a whole or not at all, also when the process or the machine stops in between. `extra`
    is anything made of dicts, lists, tuples, plain values and tensors: a scheduler's state, the place in the data.
    `folder` may be the address of an object store, as "s3://bucket/run" (pip install 'onefold[remote]' s3fs). `step` is
    by default how many steps the optimizer has taken or skipped. Where the model has several Optimizers, give all of
    them: `save(folder, model, (first, second))`. With `keep` only that many of the newest checkpoints stay in `folder`.
    Gradients are not saved: save between steps.

    With wait=False the state is copied to host memory and written while training goes on; what goes wrong then is
    raised by the next `save`, `load` or `finish_saves`. Where memory has no room for the copy, all ranks write before
    they go on, and log it.

    With `overwrite` a checkpoint of the same step is replaced, once the new one is complete; if both are the same to
    the last byte, the old one stays. With only="trainable" frozen parameters are left out, for adapters on a model
    that is kept elsewhere; load() then leaves them as they are.

    >>> import tempfile, torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=2)
    >>> optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     onefold.save(folder, model, optimizer, extra={"epoch": 3}).name
    'step-00000000'
    """
    return save_on(
        None, folder, model, optimizer,
        extra=extra, step=step, keep=keep, wait=wait, overwrite=overwrite, only=only,
    )  # fmt: skip


def save_on(
    storage: Storage | None,
    folder: str | Path,
    model: nn.Module,
    optimizer: Given,
    *,
    extra: Any = None,
    step: int | None = None,
    keep: int | None = None,
    wait: bool = True,
    overwrite: bool = False,
    only: str | None = None,
) -> Path:
    """save() with a given Storage; None takes that of the folder."""
    engine = engine_of(model)
    comm = background_comm(engine)
    WORKER.finish()
    jobs: list[Job] = []
    optimizers: list[Optimizer] = []

    def describe() -> list[Any]:
        optimizers.extend(checked(engine, optimizer))
        run = place(folder).absolute()
        chosen = storage or storage_of(run)
        check_shared(run, comm.size)
        chosen.check_access(run)
        job = describe_job(engine, comm, chosen, SaveRequest(run, optimizers, extra, step, keep, wait, overwrite, only))
        jobs.append(job)
        return [
            [job.step, job.keep, len(optimizers), overwrite, only],
            stage_contents(engine, optimizers),
            wait or _fits(job),
        ]

    try:
        answers = attempt(comm, describe)
        check_same(
            comm, [row[0] for row in answers], "saves", "step, keep, how many optimizers are given, overwrite, only"
        )
        groups = attempt(comm, lambda: joined_groups([StageContents(*row[1]) for row in answers]))[0]
        wait = wait or not all(row[2] for row in answers)
        if not wait:
            attempt(comm, lambda: jobs.append(_copied(jobs.pop())))
        job = jobs[0]
        job = replace(job, optimizer=optimizer_note(optimizers, groups, copy=not wait))
        if wait:
            write(job)
        else:
            WORKER.start(lambda: write(job))
        return job.run / step_name(job.step)
    finally:
        engine.tiers.load_for_reading(None)


def optimizer_note(optimizers: Sequence[Optimizer], groups: Sequence[list[str]], *, copy: bool) -> Note | None:
    """What is saved of Optimizers beside the state of parameters; `groups` are the names in each of their param groups,
    of all stages of a pipeline."""
    names, notes = iter(groups), [one.notes() for one in optimizers]
    rows = [{**n, "groups": [{**group, "names": next(names)} for group in n["groups"]]} for n in notes]
    return note(rows if len(rows) > 1 else rows[0], "optimizer", copy=copy) if rows else None


@torch.no_grad()
def describe_job(engine: Engine, comm: Comm, storage: Storage, request: SaveRequest) -> Job:
    """All that this rank saves; nothing is copied yet but small values, unless the save waits."""
    step = _check(request)
    check_and_quiesce(engine, Call.SAVE)
    contents = rank_contents(engine, request.optimizers, frozen=request.only is None)
    settings = engine.resolved.settings
    own = notes_of(engine.model, request.extra, engine.device, copy=not request.wait)
    about = {
        "stage": settings.stage, "precision": str(engine.resolved.precision), "settings": settings.describe(),
        "tp": engine.comms.tp.size, "pp": engine.comms.pp.size, "accumulated": engine.accumulating.wide_sums,
        "onefold": VERSION, "torch": torch.__version__,
        "python": platform.python_version(),
        **({"only": request.only} if request.only else {}),
    }  # fmt: skip
    device = engine.device
    return Job(
        comm, storage, request.run, step, request.keep, request.overwrite, contents.owned, contents.records, own, None,
        about, device,
    )  # fmt: skip


def _fits(job: Job) -> bool:
    """Whether host memory has room for a copy of what this rank owns."""
    needed, found = sum(one.bytes for one in job.owned) - WORKER.kept, host_share()
    if needed > found:
        LOG.warning(
            "rank %d: a copy of its state needs %s more of host memory, of which it may take %s: the checkpoint is "
            "written before training goes on",
            job.comm.world_rank(job.comm.rank), size_text(needed), size_text(found),
        )  # fmt: skip
    return needed <= found


@torch.no_grad()
def _copied(job: Job) -> Job:
    copies = staged(job.owned, job.device, WORKER)
    if job.device.type == "cuda":
        torch.cuda.synchronize(job.device)
    return replace(job, owned=copies, device=torch.device("cpu"))


def _check(request: SaveRequest) -> int:
    """The step of the checkpoint; raises for invalid arguments."""
    step, keep = request.step, request.keep
    if step is None and not request.optimizers:
        raise ConfigError("nothing counts steps without an optimizer: give save(step=…)")
    if step is None:  # skipped ones too, else a save after a skipped step would be refused
        step = max(one.tried for one in request.optimizers)
    if type(step) is not int or not 0 <= step <= LAST_STEP:
        raise ConfigError(f"step={step!r} is not a whole number of at least 0")
    if type(request.overwrite) is not bool:
        raise ConfigError(f"overwrite={request.overwrite!r} is neither True nor False")
    if request.only not in (None, TRAINABLE):
        raise ConfigError(f"only={request.only!r} is unknown; use {TRAINABLE!r}, or leave it out to save everything")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(f"keep={keep!r} is not a number of checkpoints of at least 1, or None for all")
    return step


def write(job: Job) -> Path:
    """Steps 2 to 4 of a save. Collective, on any thread."""
    comm, rank = job.comm, job.comm.rank

    def start() -> list[Any]:
        draft = begin(job.storage, job.run, job.step, overwrite=job.overwrite) if rank == 0 else None
        begun = [draft.folder.name, draft.attempt, draft.replaces] if draft else []
        return [begun, {name: one.digest() for name, one in job.own.items()}]

    answers = attempt(comm, start)
    # By its name only: ranks may mount the folder at different paths.
    name, number, replaces = answers[0][0]
    draft = Draft(job.run, job.step, job.run / name, number, replaces)
    try:
        return _fill(job, draft, [row[1] for row in answers])
    except Exception:
        if rank == 0:
            with suppress(Exception):  # the next save tries again
                clean(job.storage, job.run)
        raise


def _fill(job: Job, draft: Draft, digests: list[dict[str, str]]) -> Path:
    comm, rank = job.comm, job.comm.rank
    parts: list[bytes] = []
    attempt(comm, lambda: parts.append(write_part(job, draft.file(rank), digests)))
    rows = comm.gather_to_rank0(parts[0], CHECKPOINT)

    def commit_all() -> None:
        if rank == 0:
            commit(job.storage, draft, merged_manifest(job, rows))

    attempt(comm, commit_all)
    final = job.run / step_name(job.step)

    def retain_all() -> None:
        if rank == 0 and job.keep is not None:
            try:
                retain(job.storage, job.run, job.keep)
            except CheckpointError as error:
                raise CheckpointError(f"{final} is committed, but an older one was not removed: {error}") from error

    attempt(comm, retain_all)
    return final


def write_part(job: Job, path: Path, digests: list[dict[str, str]]) -> bytes:
    """Writes the file of this rank; returns its part of the manifest. `digests` are those of all ranks' notes."""
    rank = job.comm.rank
    own = differing(job.own, rank, digests)
    notes = [*own.values(), *([job.optimizer] if job.optimizer and rank == 0 else [])]
    owned = [*job.owned, *(one for n in notes for one in n.owned(rank) if one.elements.numel)]
    records = [*job.records, *(record for n in notes for record in n.records(rank))]
    by_name = {record.name: record for record in records}
    entries = [one.entry for one in owned]
    blocks = [block_of(entry, by_name[entry.name]) for entry in entries]
    written = write_tensors(job.storage, path, blocks, on_host(owned, job.device))
    answers = {name: one.json for name, one in own.items() if rank or name != EXTRA_NOTE}
    return json.dumps([rank_part_to_json(written, entries, records), answers]).encode()


def part_from(blob: bytes) -> RankPart:
    """What a rank wrote, from what `write_part` returned there. Raises CheckpointDamaged if it came damaged."""
    try:
        return rank_part_from_json(json.loads(blob)[0])
    except (ValueError, TypeError, LookupError) as error:
        raise CheckpointDamaged(f"what a rank says it wrote came damaged: {error}") from error


def merged_manifest(job: Job, parts: Sequence[bytes]) -> Manifest:
    """The manifest of a checkpoint, on rank 0, from the parts of all ranks."""
    rows = [json.loads(part) for part in parts]
    about = {**job.about, "own": [row[1] for row in rows]}
    optimizer = {"notes": job.optimizer.json} if job.optimizer else None
    bare = Manifest(job.step, job.comm.size, (), (), (), about, optimizer, job.own[EXTRA_NOTE].json)
    return merge_rank_parts([row[0] for row in rows], bare)
