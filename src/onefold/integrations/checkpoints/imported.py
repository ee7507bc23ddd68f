"""Imports a checkpoint of another program: reads it, and commits it as one of Onefold's, in one process.

1 find out what the source is  2 a process of its own reads pickle  3 tensors and optimizer state are put together by
name  4 they are written as a checkpoint of one rank, which any stage and number of ranks loads.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.checkpoint.format.address import place
from onefold.checkpoint.format.manifest import (
    VALUE,
    Entry,
    Manifest,
    ParamRecord,
    block_of,
    merge_rank_parts,
    rank_part_to_json,
)
from onefold.checkpoint.format.notes import encode_single
from onefold.checkpoint.format.opening import storage_of
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import DTYPE_NAMES, write_tensors
from onefold.checkpoint.protocol.commit import begin, clean, commit
from onefold.checkpoint.protocol.own import EXTRA_NOTE, MODULES, note
from onefold.checkpoint.protocol.state import on_host
from onefold.errors import CheckpointError, ConfigError
from onefold.integrations.checkpoints.dcp_folder import is_dcp, read_dcp
from onefold.integrations.checkpoints.deepspeed_folder import is_deepspeed, read_deepspeed
from onefold.integrations.checkpoints.foreign import Elements, Foreign, ForeignTensor
from onefold.integrations.checkpoints.optimizers import class_of, in_form_of
from onefold.integrations.checkpoints.torch_files import read_torch_files
from onefold.integrations.checkpoints.trainer_folder import is_trainer, read_trainer
from onefold.model.element_order import contiguous_stride
from onefold.version import VERSION


class Imported(NamedTuple):
    """What `import_checkpoint` wrote."""

    folder: Path  # of the checkpoint: OUT/step-…
    step: int
    origin: str  # by what the source was written
    parameters: int  # how many tensors, buffers included
    optimizer: str | None  # the torch class; None if the source has no optimizer, or weights_only


def import_checkpoint(
    source: str | Path,
    out: str | Path,
    *,
    optimizer_source: str | Path | None = None,
    optimizer: str | None = None,
    names: Sequence[str] | None = None,
    step: int | None = None,
    weights_only: bool = False,
) -> Imported:
    """Write another program's checkpoint, optimizer state included, as a checkpoint `step-…` in the folder `out`.

    `source` is a DeepSpeed folder (ZeRO stage 0 to 3, any number of ranks), a DCP folder of torch, a checkpoint of
    transformers' Trainer, or a file of `torch.save`: a state dict, a dict with "model" and "optimizer", or a checkpoint
    of Lightning. `optimizer_source` has the optimizer where that was saved on its own. `optimizer` names the torch
    class ("AdamW") where the source does not tell it, `names` are the parameters in the optimizer's order where shapes
    do not tell them, `step` is the number of the checkpoint. `out` may be the address of an object store, as
    "s3://bucket/run". Pickle is read by a process that may only read tensors.
    Not collective: call it on one rank, then `load` on all.

    >>> import tempfile, torch, onefold
    >>> model = torch.nn.Linear(8, 8)
    >>> optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/last.pt")
    ...     onefold.import_checkpoint(f"{folder}/last.pt", f"{folder}/run").optimizer
    'AdamW'
    """
    path, run = Path(source).absolute(), place(out).absolute()
    storage = storage_of(run)
    storage.check_access(run)
    second = None if optimizer_source is None else Path(optimizer_source).absolute()
    if step is not None and (type(step) is not int or step < 0):
        raise ConfigError(f"step={step!r} is not a whole number of at least 0")
    if storage.renames and not run.parent.is_dir():
        raise CheckpointError(f"{run.parent} is no folder; make the folder above {run.name} first")
    with tempfile.TemporaryDirectory(prefix=".importing-", dir=run.parent if storage.renames else None) as scratch:
        found = _read(path, second, names, Path(scratch))
        if step is not None:
            found = replace(found, step=step)
        if weights_only:
            found = _without_optimizer(found)
        cls = None if found.groups is None else class_of(found, optimizer)
        if cls is None and optimizer is not None and not weights_only:
            raise CheckpointError(f"{path} holds no optimizer state; leave optimizer= away, or name optimizer_source=")
        found = found if cls is None else in_form_of(cls, found)
        name = None if cls is None else cls.__name__
        return Imported(_write(storage, run, found, name), found.step or 0, found.origin, len(found.tensors), name)


def _read(path: Path, second: Path | None, names: Sequence[str] | None, scratch: Path) -> Foreign:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; wanted is a DeepSpeed or DCP folder, or a file of torch.save")
    if is_dcp(path):
        return read_dcp(path, second, scratch)
    if path.is_dir() and is_deepspeed(path):
        if second is not None:
            raise ConfigError("a DeepSpeed folder has its optimizer in itself; leave optimizer_source= away")
        return read_deepspeed(path, names, scratch)
    if is_trainer(path):
        if second is not None:
            raise ConfigError("a folder of the Trainer has its optimizer in itself; leave optimizer_source= away")
        return read_trainer(path, names, scratch)
    if path.is_dir():
        raise CheckpointError(
            f"{path} is neither a DeepSpeed folder (latest, global_step…, *_model_states.pt) nor a DCP folder "
            f"(.metadata) nor one of transformers' Trainer (trainer_state.json, optimizer.pt); name a file of "
            f"torch.save in it, or load weights with onefold.load"
        )
    return read_torch_files(path, second, names, scratch)


def _without_optimizer(found: Foreign) -> Foreign:
    return replace(found, groups=None, tensors=[replace(one, states={}, singles={}) for one in found.tensors])


# -- writing --------------------------------------------------------------------------------------------------------


def _write(storage: Storage, run: Path, found: Foreign, optimizer: str | None) -> Path:
    step = found.step or 0
    notes = {
        EXTRA_NOTE: note(dict(found.extra), EXTRA_NOTE, copy=False),
        MODULES: note(dict(found.modules), MODULES, copy=False),
        "optimizer": note(_optimizer_notes(found, optimizer), "optimizer", copy=False),
    }
    about = {
        "imported": found.origin, "tp": 1, "pp": 1, "accumulated": False, "own": [{MODULES: notes[MODULES].json}],
        "onefold": VERSION, "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip
    saved = {"notes": notes["optimizer"].json} if optimizer else None
    draft = begin(storage, run, step)
    try:
        owned = [one for part in notes.values() for one in part.owned(0) if one.elements.numel]
        records = [*map(_record, found.tensors), *(record for part in notes.values() for record in part.records(0))]
        by_name = {record.name: record for record in records}
        stored = [pair for one in found.tensors for pair in _stored(one)]
        entries = [*(entry for entry, _ in stored), *(one.entry for one in owned)]

        def chunks() -> Iterator[Tensor]:
            for _, elements in stored:
                yield from elements.chunks()
            yield from on_host(owned, torch.device("cpu"))

        blocks = [block_of(entry, by_name[entry.name]) for entry in entries]
        written = write_tensors(storage, draft.file(0), blocks, chunks())
        bare = Manifest(step, 1, (), (), (), about, saved, notes[EXTRA_NOTE].json)
        return commit(storage, draft, merge_rank_parts([rank_part_to_json(written, entries, records)], bare))
    except Exception:
        with suppress(CheckpointError):
            clean(storage, run)
        raise


def _optimizer_notes(found: Foreign, name: str | None) -> dict[str, Any] | None:
    """As an Optimizer writes them."""
    if name is None:
        return None
    scale = None if found.loss_scale is None else {"scale": found.loss_scale, "good": 0, "borne": 0}
    groups = [group._asdict() for group in found.groups or ()]
    steps = max((found.step or 0) - found.skipped, 0)
    return {"class": name, "steps": steps, "skipped": found.skipped, "loss_scale": scale, "groups": groups}


def _record(one: ForeignTensor) -> ParamRecord:
    for state, elements in {VALUE: one.value, **one.states}.items():
        if elements.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{one.name} ({state}) is {elements.dtype}, which a checkpoint cannot hold")
    states = {state: DTYPE_NAMES[elements.dtype] for state, elements in {VALUE: one.value, **one.states}.items()}
    singles = {key: encode_single(value, f"{one.name}: {key}") for key, value in one.singles.items()}
    shape = one.value.shape
    return ParamRecord(one.name, one.kind, shape, contiguous_stride(shape), states, singles, one.also)


def _stored(one: ForeignTensor) -> Iterator[tuple[Entry, Elements]]:
    record = _record(one)
    for state, elements in {VALUE: one.value, **one.states}.items():
        if record.numel:
            yield Entry(one.name, state, 0, record.numel, ""), elements
