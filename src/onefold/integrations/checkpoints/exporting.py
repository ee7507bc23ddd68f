"""Exports a checkpoint for other programs: weights for Hugging Face, or model and optimizer for plain torch and DCP.

`torch` is one file of `torch.save`: {"model": …, "optimizer": …}, which a plain model and torch optimizer load. `dcp`
is a folder that FSDP2 loads: {"model": …, "optim": …} as get_state_dict() names it. Both are put together in memory.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onefold.checkpoint.format.address import local, place
from onefold.checkpoint.format.export import SHARD_BYTES, Exported
from onefold.checkpoint.format.export import export as export_weights
from onefold.checkpoint.format.folder import drafted
from onefold.checkpoint.format.manifest import VALUE, ParamRecord
from onefold.checkpoint.format.notes import decode_single
from onefold.checkpoint.format.opening import storage_of
from onefold.checkpoint.format.reading import Checkpoint, read_in_order, with_newest
from onefold.checkpoint.format.storage import Storage, explained
from onefold.checkpoint.protocol.names import extra_name
from onefold.checkpoint.protocol.own import MODULES, OwnNotes, RankPlace
from onefold.checkpoint.protocol.restore import saved_in_8bit
from onefold.checkpoint.protocol.state import AVERAGES, scales_of
from onefold.cost.layout import Span
from onefold.errors import CheckpointError, ConfigError
from onefold.integrations.checkpoints.optimizers import defaults_of
from onefold.model.element_order import contiguous_order

HUGGING_FACE, TORCH, DCP = "huggingface", "torch", "dcp"
FORMATS = (HUGGING_FACE, TORCH, DCP)


def export(
    folder: str | Path,
    out: str | Path,
    dtype: str | torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    *,
    format: str = HUGGING_FACE,
) -> Exported:
    """Write a checkpoint for other programs: its weights as a Hugging Face folder, or all of it for torch.

    `folder` is a folder of checkpoints, of which the newest is taken, or one `step-…` in it; `out` must not exist. With
    format="huggingface" weights are written as safetensors files of at most `shard_bytes`, parameters in `dtype`
    ("fp32", "bf16", "fp16"), by default in that of the checkpoint; tied weights once, under their first name; `out` may
    then be the address of an object store, as "s3://bucket/weights". With
    "torch" `out` is a file of torch.save with "model" and "optimizer", which a plain model and torch.optim load; with
    "dcp" a folder of torch.distributed.checkpoint with "model" and "optim", which FSDP2 loads: both hold the fp32
    masters and the optimizer state, and need memory for them. Not collective: call it on one rank.

    >>> import tempfile, torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = onefold.save(folder, model, step=1)
    ...     onefold.export(folder, folder + "/weights", dtype="bf16").files
    ('model.safetensors',)
    """
    if format not in FORMATS:
        raise ConfigError(f"format={format!r} is not one of {', '.join(FORMATS)}")
    if format == HUGGING_FACE:
        return export_weights(folder, out, dtype, shard_bytes)
    if dtype is not None:
        raise ConfigError(f"dtype={dtype!r} is for format='huggingface'; {format} holds the optimizer's fp32 masters")
    source, storage, target = place(folder), Storage(), local(out, "an export")
    if storage.exists(target):
        raise CheckpointError(f"{target} exists; name one that does not, so that nothing is overwritten")
    found = storage_of(source)
    return with_newest(found, source, lambda path: _export(storage, Checkpoint(found, path), target, format))


def _export(storage: Storage, checkpoint: Checkpoint, target: Path, format: str) -> Exported:
    about = checkpoint.manifest.about
    notes = OwnNotes(checkpoint, RankPlace(0, checkpoint.manifest.ranks, about.get("tp", 1), about.get("pp", 1)))
    records = [record for record in checkpoint.manifest.records if record.kind != "extra"]
    model: dict[str, Any] = {}
    for record in records:
        model |= dict.fromkeys((record.name, *record.also), _tensor(checkpoint, record, VALUE))
    for module, value in (notes.get(MODULES) or {}).items():
        model[extra_name(module)] = value
    state: dict[str, Any] = {"model": model}
    optimizer = _optimizer(checkpoint, notes, records, numbered=format == TORCH)
    if optimizer is not None:
        state["optimizer" if format == TORCH else "optim"] = optimizer
    with drafted(storage, target) as draft:
        _explaining(target, lambda: (_save_torch if format == TORCH else _save_dcp)(state, draft))
    files = tuple(storage.names(target)) if format == DCP else (target.name,)
    sizes = [record.numel * record.dtype(key).itemsize for record in records for key in record.states]
    return Exported(target, checkpoint.manifest.step, files, len(records), sum(sizes))


def _tensor(checkpoint: Checkpoint, record: ParamRecord, state: str) -> Tensor:
    out = torch.empty(record.shape, dtype=record.dtype(state))
    if record.numel:
        span = Span(0, record.numel)
        read_in_order(checkpoint, record.name, contiguous_order(record.shape), span, out.view(-1), state)
    return out


def _state(checkpoint: Checkpoint, record: ParamRecord, key: str) -> Tensor:
    """Optimizer state in fp32, whatever form it was saved in."""
    if scales_of(record.name, key) in checkpoint.records:
        return saved_in_8bit(checkpoint, record, key).contiguous()
    found = _tensor(checkpoint, record, key)
    return found.float() if found.dtype is torch.bfloat16 else found


def _optimizer(
    checkpoint: Checkpoint, notes: OwnNotes, records: list[ParamRecord], *, numbered: bool
) -> dict[str, Any] | None:
    """The state dict of a torch optimizer, whose parameters are `numbered` group after group, or named."""
    saved = checkpoint.manifest.optimizer
    if saved is None:
        return None
    row = notes.decode(saved.get("notes"))
    if isinstance(row, list):
        raise CheckpointError(
            f"{checkpoint.folder} holds {len(row)} optimizers, and a state dict of torch holds one; export weights"
        )
    groups: list[dict[str, Any]] = []
    keys: dict[str, str | int] = {}
    for group in row["groups"]:
        first = len(keys)
        keys |= {name: first + i if numbered else name for i, name in enumerate(group["names"])}
        params = {"params": [keys[name] for name in group["names"]]}
        named = {"param_names": group["names"]} if numbered else {}
        groups.append({**defaults_of(row["class"]), **group["settings"], **named, **params})
    state = {}
    for record in records:
        vectors = [key for key in record.states if key != VALUE and not key.startswith(AVERAGES)]
        if record.name in keys and (vectors or record.scalars):
            singles = {key: decode_single(word) for key, word in record.scalars.items()}
            state[keys[record.name]] = singles | {key: _state(checkpoint, record, key) for key in vectors}
    return {"state": state, "param_groups": groups}


def _explaining(target: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise explained("write", target, error) from error


def _save_torch(state: dict[str, Any], draft: Path) -> None:
    with open(draft, "xb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _save_dcp(state: dict[str, Any], draft: Path) -> None:
    """By this process alone: nothing is sent to other ranks."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(draft, sync_files=True), no_dist=True)
