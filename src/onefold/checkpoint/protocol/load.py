"""Loads a checkpoint: finds it, matches names, fills each rank's shards, and returns what the user had saved.

1 Rank 0 chooses the checkpoint; all ranks open it and match its names with the model's. Nothing has changed so far.
2 Every rank reads the elements it owns. If one fails, all raise, and the model raises until a load succeeds.
3 Replicated parameters are all-gathered; random states are set last, so that the run continues bit for bit.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from onefold.checkpoint.format.address import place
from onefold.checkpoint.format.folder import find, step_name, step_of
from onefold.checkpoint.format.opening import storage_of
from onefold.checkpoint.format.reading import Checkpoint, Source, retry_if_removed
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.weights import open_weights
from onefold.checkpoint.protocol.background import WORKER
from onefold.checkpoint.protocol.commit import set_aside
from onefold.checkpoint.protocol.names import Choice, match, match_modules, patterns
from onefold.checkpoint.protocol.optimizers import checked
from onefold.checkpoint.protocol.own import BUFFERS, EXTRA_NOTE, MODULES, OwnNotes, place_of, set_random_state
from onefold.checkpoint.protocol.quiesce import background_comm, begin_load, check_and_quiesce, end_load
from onefold.checkpoint.protocol.restore import (
    check_kinds,
    fill_averages,
    fill_buffers,
    fill_optimizer,
    fill_parameters,
)
from onefold.checkpoint.protocol.stages import StageContents, names_elsewhere, stage_contents
from onefold.checkpoint.protocol.state import frozen_names, params_of, stored_dtypes
from onefold.checkpoint.protocol.together import attempt, check_same
from onefold.comm.agreement import digest
from onefold.comm.communicator import Comm
from onefold.errors import CheckpointDamaged, CheckpointError, ConfigError
from onefold.optim.optimizer import Optimizer
from onefold.runtime.engine import Engine, engine_of
from onefold.runtime.full_parameters import EXTRA, TRAINABLE, extra_states, persistent_buffers
from onefold.runtime.refusals import Call

LOG = logging.getLogger("onefold")
OPTIONAL = {"spikes"}  # what an Optimizer's notes need not have


class SavedOptimizer(NamedTuple):
    """What will be loaded into one Optimizer beside the state of its parameters."""

    optimizer: Optimizer
    notes: dict[str, Any]
    settings: list[dict[str, Any] | None]  # of its param groups


class Plan(NamedTuple):
    """What will be loaded, and from where."""

    source: Source
    found: dict[str, str]  # the model's name -> the saved one
    own: OwnNotes | None
    optimizers: list[SavedOptimizer]  # in the order in which they were given
    modules: dict[str, Any]  # module -> the argument of its set_extra_state
    random: dict[str, torch.Tensor]
    extra: Any = None


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    fallback: bool = False,
    rename: Mapping[str, str] | None = None,
    subset: str | Iterable[str] | None = None,
    allow_missing: str | Iterable[str] = (),
    allow_extra: str | Iterable[str] = (),
) -> Any:
    """Fill a sharded model, and its optimizer, from a checkpoint, and return the `extra` that was saved. Collective.

    `folder` is a folder of checkpoints (the newest is taken), one `step-…` in it, a .safetensors file or a Hugging Face
    folder; or the address of one in an object store, as "s3://bucket/run". The number of ranks, the stage and the
    precision may differ from those of the run that saved it. With `fallback` a damaged checkpoint is passed over, with
    a warning, for the one before it. `rename` maps saved names, or beginnings of names that end in a dot, to the
    model's; `subset` loads some tensors only; what is missing or left over is an error unless a name or pattern in
    `allow_missing` or `allow_extra` covers it. Without an optimizer only weights are loaded, and random states stay as
    they are; several are given in the order in which they were saved.

    >>> import tempfile, torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=2)
    >>> optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = onefold.save(folder, model, optimizer, extra={"epoch": 3})
    ...     onefold.load(folder, model, optimizer)
    {'epoch': 3}
    """
    engine = engine_of(model)
    engine.unfreezing.follow()
    comm = background_comm(engine)
    WORKER.finish()
    opened, choices, optimizers = list[tuple[Storage, Path]](), list[Choice](), list[Optimizer]()

    def prepare() -> list[Any]:
        optimizers.extend(checked(engine, optimizer))
        chosen = None if subset is None else patterns("subset", subset)
        missing, extra = patterns("allow_missing", allow_missing), patterns("allow_extra", allow_extra)
        choices.append(Choice(rename=_mapping(rename), subset=chosen, allow_missing=missing, allow_extra=extra))
        asked = [len(optimizers), bool(fallback), list(choices[0].rename.items()), chosen, missing, extra]
        check_and_quiesce(engine, Call.LOAD)
        part = stage_contents(engine, ())
        found = place(folder)
        storage = storage_of(found)
        opened.append((storage, found))
        if open_weights(storage, found) is not None:
            return [asked, None, part]
        return [asked, _found(storage, found) if comm.rank == 0 else [], part]

    answers = attempt(comm, prepare)
    settings = "how many optimizers are given, fallback, rename, subset, allow_missing, allow_extra"
    check_same(comm, [row[0] for row in answers], "loads", settings)
    (storage, path), candidates = opened[0], answers[0][1]
    others = names_elsewhere([StageContents(*row[2]) for row in answers], engine.comms.pp.rank)
    choice = replace(choices[0], elsewhere=others)
    if candidates is None:
        return _load_one(engine, optimizers, choice, lambda: open_weights(storage, path))
    alone = str(path) == candidates[0]  # the path is one checkpoint: no other may be taken

    def find_again() -> list[str]:
        return attempt(comm, partial(_found, storage, path) if comm.rank == 0 and not alone else list)[0]

    return retry_if_removed(partial(_load_first, engine, storage, optimizers, choice, fallback), candidates, find_again)


def load_opened(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None, opened: Callable[[], Checkpoint]
) -> Any:
    """load() of the checkpoint that `opened` returns, which is the same on all ranks."""
    engine = engine_of(model)
    engine.unfreezing.follow()
    WORKER.finish()
    optimizers: list[Optimizer] = []

    def prepare() -> StageContents:
        optimizers.extend(checked(engine, optimizer))
        check_and_quiesce(engine, Call.LOAD)
        return stage_contents(engine, ())

    parts = [StageContents(*row) for row in attempt(background_comm(engine), prepare)]
    return _load_one(engine, optimizers, Choice(elsewhere=names_elsewhere(parts, engine.comms.pp.rank)), opened)


def _found(storage: Storage, folder: Path) -> list[str]:
    return [str(path) for path in find(storage, folder)]


def _load_first(
    engine: Engine,
    storage: Storage,
    optimizers: Sequence[Optimizer],
    choice: Choice,
    fallback: bool,
    candidates: list[str],
) -> Any:
    """Loads the first checkpoint; with `fallback`, the first that is not damaged."""
    comm, damaged = background_comm(engine), list[Path]()
    for path in map(place, candidates):
        try:
            extra = _load_one(engine, optimizers, choice, lambda path=path: Checkpoint(storage, path))
        except CheckpointDamaged as error:
            if not fallback or str(path) == candidates[-1]:
                raise
            damaged.append(path)
            _warn(comm, f"{path} is damaged and passed over, older state is loaded instead: {error}")
        else:
            _set_aside(comm, storage, damaged)
            return extra
    raise AssertionError("find() gives at least one")


def _mapping(rename: Any) -> dict[str, str]:
    if not isinstance(rename or {}, Mapping) or not all(
        isinstance(n, str) for kv in (rename or {}).items() for n in kv
    ):
        raise ConfigError(f"rename={rename!r} is not a dict of saved names to the model's names")
    return dict(rename or {})


def _warn(comm: Comm, message: str) -> None:
    LOG.error(message)
    if comm.rank == 0:
        warnings.warn(message, stacklevel=3)


def pass_over(comm: Comm, folder: Path, step: int, error: CheckpointDamaged) -> None:
    """Warns that a checkpoint is damaged and that older state is loaded instead, and renames it."""
    path = folder / step_name(step)
    _warn(comm, f"{path} is damaged and passed over, older state is loaded instead: {error}")
    _set_aside(comm, storage_of(folder), [path])


def _set_aside(comm: Comm, storage: Storage, damaged: list[Path]) -> None:
    """Renames damaged checkpoints, so that their steps can be saved again; without permission they stay."""
    for path in damaged if comm.rank == 0 else ():
        step = step_of(path.name)
        try:
            if step is not None:
                LOG.error("%s was set aside as %s", path, set_aside(storage, path.parent, step))
        except CheckpointError as error:
            LOG.error("%s could not be set aside: %s", path, error)


@torch.no_grad()
def _load_one(engine: Engine, optimizers: Sequence[Optimizer], choice: Choice, opened: Any) -> Any:
    comm, plans = background_comm(engine), []

    def plan() -> str:
        plans.append(_plan(engine, optimizers, choice, opened()))
        seen = plans[0].source
        return digest([str(file) for file in seen.manifest.files]) if isinstance(seen, Checkpoint) else ""

    if len(set(attempt(comm, plan))) > 1:
        raise CheckpointError(
            "the ranks found different checkpoints under one path; all ranks must see the same folder"
        )
    found = plans[0]
    whole = len(found.found) == len(params_of(engine)) and (bool(optimizers) or not len(engine.optimizers))
    if not whole:
        engine.check(Call.LOAD_PART)
    attempt(comm, lambda: begin_load(engine))
    for optimizer in optimizers:
        attempt(comm, optimizer.before_load)
    attempt(comm, lambda: _fill(engine, found))
    attempt(comm, lambda: set_random_state(found.random, engine.device))
    end_load(engine)
    if found.own is not None and optimizers:
        _warn_of_other_ranks(engine, found.own)
    return found.extra


def _plan(engine: Engine, optimizers: Sequence[Optimizer], choice: Choice, source: Source) -> Plan:
    records = {record.name: record for record in source.records.values() if record.kind != "extra"}
    every = params_of(engine)
    if isinstance(source, Checkpoint) and source.manifest.about.get("only") == TRAINABLE:
        choice = replace(choice, allow_missing=choice.allow_missing + tuple(sorted(frozen_names(engine))))
    found = match(every, records.values(), choice)
    check_kinds(source, found, stored_dtypes(engine))
    if not isinstance(source, Checkpoint):
        if optimizers:
            raise CheckpointError(
                "these are weights without optimizer state; leave the optimizer out: load(path, model)"
            )
        return Plan(source, found, None, [], {}, {})
    own = OwnNotes(source, place_of(engine))
    saved = _optimizer_notes(source, own, optimizers) if optimizers else []
    loaded = [
        SavedOptimizer(
            one, notes,
            [
                _settings(group["params"], found, notes, engine, i, one.class_of(i))
                for i, group in enumerate(one.param_groups)
            ],
        )
        for one, notes in zip(optimizers, saved, strict=True)
    ]  # fmt: skip
    modules = {} if choice.subset is not None else _module_notes(engine, own, choice)
    random = own.random_states(engine.device) if optimizers else {}
    return Plan(source, found, own, loaded, modules, random, own.get(EXTRA_NOTE))


def _optimizer_notes(source: Checkpoint, own: OwnNotes, optimizers: Sequence[Optimizer]) -> list[dict[str, Any]]:
    """The notes of each of the Optimizers that were saved, in their order."""
    saved = source.manifest.optimizer
    if saved is None:
        raise CheckpointError(f"{source.folder} was saved without an optimizer; leave it out: load(path, model)")
    notes = own.decode(saved.get("notes"))
    rows = notes if isinstance(notes, list) else [notes]
    wanted = optimizers[0].notes().keys() - OPTIONAL
    if not all(isinstance(row, dict) and row.keys() - OPTIONAL == wanted for row in rows):
        raise CheckpointDamaged(f"{source.folder}: the manifest does not tell what the optimizer was")
    theirs, ours = ([row["class"] for row in these] for these in (rows, [one.notes() for one in optimizers]))
    if theirs != ours:
        raise CheckpointError(
            f"{source.folder} holds the state of {', '.join(theirs)}, this optimizer is {', '.join(ours)}; build the "
            f"same class, or load weights only: load(path, model)"
        )
    return rows


def _settings(
    params: list[nn.Parameter], found: Mapping[str, str], notes: dict[str, Any], engine: Engine, number: int, cls: str
) -> dict[str, Any] | None:
    """The settings of the saved param groups that have these parameters; None if none has."""
    names = {id(param): name for name, param in zip(engine.names, engine.params, strict=True)}
    saved = {found[names[id(param)]] for param in params if names[id(param)] in found}
    groups = [group for group in notes["groups"] if saved & set(group["names"])]
    other = next((group["class"] for group in groups if group.get("class", cls) != cls), None)
    if other is not None:
        raise CheckpointError(
            f"{cls} updates parameters of param group {number}, and {other} updated some of them in the checkpoint, so "
            f"their state does not fit; give each parameter to the same class, or load weights only: load(path, model)"
        )
    if any(group["settings"] != groups[0]["settings"] for group in groups):
        raise CheckpointError(
            f"param group {number} has parameters of {len(groups)} saved groups, so their settings (lr …) contradict; "
            f"build the optimizer with the saved groups, or load weights only: load(path, model)"
        )
    return groups[0]["settings"] if groups else None


def _module_notes(engine: Engine, own: OwnNotes, choice: Choice) -> dict[str, Any]:
    """The arguments of set_extra_state, by module."""
    wanted = {key.removesuffix(EXTRA).removesuffix(".") for key in extra_states(engine.model)}
    saved = own.get(MODULES) or {}
    return {name: saved[old] for name, old in match_modules(wanted, set(saved), choice).items()}


def _fill(engine: Engine, plan: Plan) -> None:
    fill_parameters(engine, plan.source, plan.found)
    fill_averages(engine, plan.source, plan.found)
    fill_buffers(
        persistent_buffers(engine.model), plan.source, plan.found, (plan.own.get(BUFFERS) if plan.own else None) or {}
    )
    modules = dict(engine.model.named_modules(remove_duplicate=False))
    for name, value in plan.modules.items():
        modules[name].set_extra_state(value)
    for optimizer, notes, settings in plan.optimizers:
        optimizer.load_notes(notes, settings)
        fill_optimizer(engine, optimizer, plan.source, plan.found)
    if plan.optimizers:
        assert isinstance(plan.source, Checkpoint)
        if plan.source.manifest.about.get("accumulated") is True:
            engine.accumulating.keep_wide_sums_everywhere()


def _warn_of_other_ranks(engine: Engine, own: OwnNotes) -> None:
    """Warns, on rank 0, about state that depends on the number of ranks and cannot be restored exactly."""
    ranks, first = engine.everyone.size, engine.comms.world.rank == 0
    if own.has_random_states and ranks > own.streams and first:
        warnings.warn(
            f"saved by {own.streams} ranks and loaded by {ranks}: the others get random states derived from rank 0's, "
            f"so dropout differs from any run of {own.streams} ranks",
            stacklevel=5,
        )
    if not own.same_ranks and own.differing_names and first:
        warnings.warn(
            f"{', '.join(own.differing_names)} differed between the {own.ranks} ranks that saved; all ranks now have "
            f"rank 0's",
            stacklevel=5,
        )
