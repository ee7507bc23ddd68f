"""Loading: find the checkpoint, match names, fill what each rank holds, and hand back what the user had put in.

1 Rank 0 says which checkpoint; all open it and match its names with the model's. Up to here nothing has changed.
2 Every rank reads its ranges into place. If one fails, all raise, and the model refuses to run until a load succeeds.
3 Values travel to whoever keeps them whole; random states come last, so that the run goes on where it was.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from onefold.checkpoint.format.folder import find, step_of
from onefold.checkpoint.format.reading import Checkpoint, Source, until_not_removed
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.weights import open_weights
from onefold.checkpoint.protocol.background import WORKER
from onefold.checkpoint.protocol.commit import set_aside
from onefold.checkpoint.protocol.names import Choice, match, match_modules, patterns
from onefold.checkpoint.protocol.own import BUFFERS, EXTRA_NOTE, MODULES, OwnNotes, seat_of, set_random_state
from onefold.checkpoint.protocol.quiesce import aside, begin_load, end_load, quiesce
from onefold.checkpoint.protocol.restore import check_kinds, fill_buffers, fill_optimizer, fill_values
from onefold.checkpoint.protocol.save import check_optimizer
from onefold.checkpoint.protocol.stages import StageContents, elsewhere, part_of
from onefold.checkpoint.protocol.state import params_of, truths
from onefold.checkpoint.protocol.together import attempt, check_same
from onefold.comm.agreement import digest
from onefold.comm.communicator import Comm
from onefold.errors import CheckpointDamaged, CheckpointError, ConfigError
from onefold.optim.optimizer import Optimizer
from onefold.runtime.engine import Engine, engine_of
from onefold.runtime.full_parameters import EXTRA, extra_states, persistent_buffers
from onefold.runtime.refusals import Call

LOG = logging.getLogger("onefold")


class Plan(NamedTuple):
    """What will be loaded from where."""

    source: Source
    found: dict[str, str]  # the model's name -> the saved one
    own: OwnNotes | None
    notes: dict[str, Any] | None  # the optimizer's
    settings: list[dict[str, Any] | None]  # of its groups
    modules: dict[str, Any]  # what set_extra_state will be given
    random: dict[str, torch.Tensor]
    extra: Any = None


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    fallback: bool = False,
    rename: Mapping[str, str] | None = None,
    subset: str | Iterable[str] | None = None,
    allow_missing: str | Iterable[str] = (),
    allow_extra: str | Iterable[str] = (),
) -> Any:
    """Fill a sharded model, and its optimizer, from a checkpoint, and return the `extra` that was saved. Collective.

    `folder` is a folder of checkpoints (the newest is taken), one `step-…` in it, a .safetensors file or a Hugging Face
    folder. The number of ranks, the stage and the precision may differ from those of the run that saved it. With
    `fallback` a damaged checkpoint is passed over, with a warning, for the one before it. `rename` maps saved names, or
    beginnings of names that end in a dot, to the model's; `subset` loads some tensors only; what is missing or left
    over is an error unless a name or pattern in `allow_missing` or `allow_extra` covers it. Without an optimizer only
    weights are loaded, and random states stay as they are.

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
    comm = aside(engine)
    WORKER.finish()
    storage, choices = Storage(), []

    def prepare() -> list[Any]:
        check_optimizer(engine, optimizer)
        chosen = None if subset is None else patterns("subset", subset)
        missing, extra = patterns("allow_missing", allow_missing), patterns("allow_extra", allow_extra)
        choices.append(Choice(rename=_mapping(rename), subset=chosen, allow_missing=missing, allow_extra=extra))
        asked = [optimizer is not None, bool(fallback), list(choices[0].rename.items()), chosen, missing, extra]
        quiesce(engine, Call.LOAD)
        part = part_of(engine, None)
        if open_weights(storage, Path(folder)) is not None:
            return [asked, None, part]
        return [asked, _found(storage, folder) if comm.rank == 0 else [], part]

    told = attempt(comm, prepare)
    settings = "whether an optimizer is given, fallback, rename, subset, allow_missing, allow_extra"
    check_same(comm, [row[0] for row in told], "loads", settings)
    candidates = told[0][1]
    others = elsewhere([StageContents(*row[2]) for row in told], engine.comms.pp.rank)
    choice = replace(choices[0], elsewhere=others)
    if candidates is None:
        return _load_one(engine, optimizer, choice, lambda: open_weights(storage, Path(folder)))
    alone = str(Path(folder)) == candidates[0]  # the path names one checkpoint, and means no other

    def find_again() -> list[str]:
        return attempt(comm, partial(_found, storage, folder) if comm.rank == 0 and not alone else list)[0]

    return until_not_removed(partial(_load_first, engine, optimizer, choice, fallback), candidates, find_again)


def _found(storage: Storage, folder: str | Path) -> list[str]:
    return [str(path) for path in find(storage, Path(folder))]


def _load_first(
    engine: Engine, optimizer: Optimizer | None, choice: Choice, fallback: bool, candidates: list[str]
) -> Any:
    """The first checkpoint; with fallback, the first that is not damaged."""
    storage, comm, damaged = Storage(), aside(engine), list[Path]()
    for path in map(Path, candidates):
        try:
            extra = _load_one(engine, optimizer, choice, lambda path=path: Checkpoint(storage, path))
        except CheckpointDamaged as error:
            if not fallback or str(path) == candidates[-1]:
                raise
            damaged.append(path)
            _shout(comm, f"{path} is damaged and passed over, older state is loaded instead: {error}")
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


def _shout(comm: Comm, message: str) -> None:
    LOG.error(message)
    if comm.rank == 0:
        warnings.warn(message, stacklevel=3)


def _set_aside(comm: Comm, storage: Storage, damaged: list[Path]) -> None:
    """So that their steps can be saved again. Where we may not write, they stay."""
    for path in damaged if comm.rank == 0 else ():
        step = step_of(path.name)
        try:
            if step is not None:
                LOG.error("%s was set aside as %s", path, set_aside(storage, path.parent, step))
        except CheckpointError as error:
            LOG.error("%s could not be set aside: %s", path, error)


@torch.no_grad()
def _load_one(engine: Engine, optimizer: Optimizer | None, choice: Choice, opened: Any) -> Any:
    comm, plans = aside(engine), []

    def plan() -> str:
        plans.append(_plan(engine, optimizer, choice, opened()))
        seen = plans[0].source
        return digest([str(file) for file in seen.manifest.files]) if isinstance(seen, Checkpoint) else ""

    if len(set(attempt(comm, plan))) > 1:
        raise CheckpointError(
            "the ranks found different checkpoints under one path; all ranks must see the same folder"
        )
    found = plans[0]
    whole = len(found.found) == len(params_of(engine)) and (optimizer is not None or engine.optimizer is None)
    if not whole:
        engine.check(Call.LOAD_PART)
    attempt(comm, lambda: begin_load(engine))
    attempt(comm, lambda: _fill(engine, optimizer, found))
    attempt(comm, lambda: set_random_state(found.random, engine.device))
    end_load(engine)
    if found.own is not None and optimizer is not None:
        _warn_of_other_ranks(engine, found.own)
    return found.extra


def _plan(engine: Engine, optimizer: Optimizer | None, choice: Choice, source: Source) -> Plan:
    records = {record.name: record for record in source.records.values() if record.kind != "extra"}
    found = match(params_of(engine), records.values(), choice)
    check_kinds(source, found, truths(engine))
    if not isinstance(source, Checkpoint):
        if optimizer is not None:
            raise CheckpointError(
                "these are weights without optimizer state; leave the optimizer out: load(path, model)"
            )
        return Plan(source, found, None, None, [], {}, {})
    own = OwnNotes(source, seat_of(engine))
    notes, settings = None, []
    if optimizer is not None:
        notes = _optimizer_notes(source, own, optimizer)
        settings = [
            _settings(group["params"], found, notes, engine, i) for i, group in enumerate(optimizer.param_groups)
        ]
    modules = {} if choice.subset is not None else _module_notes(engine, own, choice)
    random = own.random_states(engine.device) if optimizer is not None else {}
    return Plan(source, found, own, notes, settings, modules, random, own.get(EXTRA_NOTE))


def _optimizer_notes(source: Checkpoint, own: OwnNotes, optimizer: Optimizer) -> dict[str, Any]:
    saved = source.manifest.optimizer
    if saved is None:
        raise CheckpointError(f"{source.folder} was saved without an optimizer; leave it out: load(path, model)")
    notes = own.decode(saved.get("notes"))
    ours = optimizer.notes()["class"]
    if not isinstance(notes, dict) or notes.keys() != optimizer.notes().keys():
        raise CheckpointDamaged(f"{source.folder}: the manifest does not tell what the optimizer was")
    if notes["class"] != ours:
        raise CheckpointError(
            f"{source.folder} holds the state of {notes['class']}, this optimizer is {ours}; build the same class, or "
            f"load weights only: load(path, model)"
        )
    return notes


def _settings(
    params: list[nn.Parameter], found: Mapping[str, str], notes: dict[str, Any], engine: Engine, number: int
) -> dict[str, Any] | None:
    """Of the saved group that has the parameters of one of ours."""
    names = {id(param): name for name, param in zip(engine.names, engine.params, strict=True)}
    saved = {found[names[id(param)]] for param in params if names[id(param)] in found}
    groups = [group for group in notes["groups"] if saved & set(group["names"])]
    if len(groups) > 1:
        raise CheckpointError(
            f"param group {number} has parameters of {len(groups)} saved groups, so their settings (lr …) contradict; "
            f"build the optimizer with the saved groups, or load weights only: load(path, model)"
        )
    return groups[0]["settings"] if groups else None


def _module_notes(engine: Engine, own: OwnNotes, choice: Choice) -> dict[str, Any]:
    """By module: what set_extra_state is to be given."""
    wanted = {key.removesuffix(EXTRA).removesuffix(".") for key in extra_states(engine.model)}
    saved = own.get(MODULES) or {}
    return {name: saved[old] for name, old in match_modules(wanted, set(saved), choice).items()}


def _fill(engine: Engine, optimizer: Optimizer | None, plan: Plan) -> None:
    fill_values(engine, plan.source, plan.found)
    fill_buffers(
        persistent_buffers(engine.model), plan.source, plan.found, (plan.own.get(BUFFERS) if plan.own else None) or {}
    )
    modules = dict(engine.model.named_modules(remove_duplicate=False))
    for name, value in plan.modules.items():
        modules[name].set_extra_state(value)
    if optimizer is not None and plan.notes is not None:
        optimizer.take_notes(plan.notes, plan.settings)
        fill_optimizer(engine, optimizer, plan.source, plan.found)
        assert isinstance(plan.source, Checkpoint)
        if plan.source.manifest.about.get("accumulated") is True:
            engine.accumulating.keep_wide_sums()


def _warn_of_other_ranks(engine: Engine, own: OwnNotes) -> None:
    """Once, on rank 0: what cannot be as it was with another number of ranks."""
    ranks, first = engine.everyone.size, engine.comms.world.rank == 0
    if ranks > own.streams and first:
        warnings.warn(
            f"saved by {own.streams} ranks and loaded by {ranks}: the others get random states derived from rank 0's, "
            f"so dropout differs from any run of {own.streams} ranks",
            stacklevel=5,
        )
    if not own.same_ranks and own.parted and first:
        warnings.warn(
            f"{', '.join(own.parted)} differed between the {own.ranks} ranks that saved; all ranks now have rank 0's",
            stacklevel=5,
        )
