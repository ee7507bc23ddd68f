"""From settings to a training loop: join the ranks, prepare the data, build and shard the model, resume."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from contextlib import ExitStack
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn

from onefold.checkpoint.memory.resilient import STORE, Resilient
from onefold.checkpoint.protocol.load import load
from onefold.comm.agreement import on_all
from onefold.comm.communicator import Comm
from onefold.comm.hang_record import RECORDS
from onefold.comm.mesh import Mesh, axes_of, init, mesh
from onefold.comm.meter import Label, Meter
from onefold.cost.shapes import Shape
from onefold.errors import ConfigError, MismatchError
from onefold.optim.optimizer import Optimizer
from onefold.sharding import shard
from onefold.train.run.data import Data, Prepared, load_data, prepare
from onefold.train.run.diagnose import is_out_of_memory, out_of_memory
from onefold.train.run.environment import facts_of
from onefold.train.run.folder import LOCK, RunFolder, make_folder, replace, write_facts
from onefold.train.run.lock import LAUNCHED, RunLock
from onefold.train.run.loop import Loop, Place
from onefold.train.run.metrics import Listener, collect_warnings
from onefold.train.run.optimizers import make_optimizer
from onefold.train.run.pretrained import keep_beside
from onefold.train.run.records import cut_after, read_facts, read_lines
from onefold.train.run.run_model import Maker, RunModel, built_in
from onefold.train.run.same import check_same, check_stages, digest_of
from onefold.train.run.saved import check_store, checkpoints_of, saved_steps
from onefold.train.run.settings import Settings
from onefold.train.run.stop import Stop
from onefold.train.run.toml import NOT_SAVED, to_toml

PROBE = ".writing-"  # files that ranks make in --out to see that they can, while others check that it is empty
DATA_TIMEOUT_S = 24 * 3600.0
DATA = Label("train", "the data")
SAVED = Label("train", "the last checkpoint")


class Ended(NamedTuple):
    """How far a run came."""

    step: int
    finished: bool


def check_folder(settings: Settings) -> None:
    """Raises unless --out is empty, or holds a run that is to be resumed, and can be written."""
    out = settings.output.out
    make_folder(out)
    found = any(path.name != LOCK and not path.name.startswith(PROBE) for path in out.iterdir())
    if found and not settings.checkpoints.may_resume:
        known = RunFolder(out).config
        again = f" (and --config {known}, to repeat that run)" if known.exists() else ""
        raise ConfigError(f"--out {out} is not empty; resume its run with --resume, or give another --out{again}")
    try:
        probe = out / f"{PROBE}{os.getpid()}"
        probe.touch()
        probe.unlink(missing_ok=True)  # on another node a rank may have the same number
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}; give another folder") from error


def train(settings: Settings, stop: Stop, listener: Listener, maker: Maker | None = None) -> Ended:
    """One rank of a run. Collective. `stop` listens to signals from the first step on; `maker` makes the models of
    --weights that are not the built-in GPT."""
    if torch.cuda.is_available():
        os.environ.setdefault(RECORDS, str(settings.output.out / "records"))
    init(timeout_s=settings.checkpoints.timeout_s)
    comm = Comm(axes_of(None).everyone, torch.device("cpu"), settings.checkpoints.timeout_s, Meter())
    with ExitStack() as held:
        if LAUNCHED not in os.environ:  # else the launcher holds it
            lock = RunLock(settings.output.out)
            on_all(comm, lambda: held.enter_context(lock) if comm.rank == 0 else None, "--out")
        return _train(settings, comm, stop, listener, maker)


def _train(settings: Settings, comm: Comm, stop: Stop, listener: Listener, maker: Maker | None) -> Ended:
    early: list[tuple[str, str]] = []  # warnings from before there is a loop
    with collect_warnings(lambda kind, message: early.append((kind, message))):
        try:
            loop, place, prepared = _prepare(settings, comm, maker)
        except Exception as error:
            if is_out_of_memory(error):
                stage = settings.zero.stage if isinstance(settings.zero.stage, int) else 0
                raise out_of_memory({}, where="making the model", stage=stage, micro_batch=1) from error
            raise
        for kind, message in early:
            loop.warnings.add(kind, message)
    with collect_warnings(loop.warnings.add):
        if comm.rank == 0:
            assert prepared is not None, "rank 0 is the first of its node"
            facts = _write_facts(loop, place, prepared)
            listener.began(facts, place.step)
        try:
            with stop:
                done = loop.run(place, stop, listener)
        finally:
            listener.ended()
    return Ended(done.step, done.step == settings.steps.steps)


def _prepare(settings: Settings, comm: Comm, maker: Maker | None) -> tuple[Loop, Place, Prepared | None]:
    on_all(comm, lambda: check_store(settings, comm.size) if comm.rank == 0 else None, "--store")
    data, prepared = _data(settings, comm)
    shape = on_all(comm, lambda: settings.model.shape(data.vocab), "the model")
    on_all(comm, lambda: _check_same(settings, prepared, shape) if comm.rank == 0 else None, "the run that is resumed")
    axes = settings.zero.axes(comm.size)
    places = None
    if axes:
        places = mesh(replica=axes["replica"], shard=axes["shard"], sequence=axes["sequence"], tp=axes["tp"])
    along = places if axes.get("sequence", 1) > 1 else None
    made = on_all(comm, lambda: _make(settings, shape, along, maker), "the model")
    model: Any = made.module
    if axes.get("tp", 1) > 1 and places is not None:
        from onefold.train.run.tensor_parallel import parallelize  # here: it brings the compiler, a second of imports

        parallelize(model, places, sequence=settings.zero.sequence)
    zero = dataclasses.replace(
        settings.zero.zero(settings.steps.seed), init=made.init, mesh=places,
        timeout_s=settings.checkpoints.timeout_s, compile=settings.output.compile,
    )  # fmt: skip
    shard(model, zero)
    optimizer = make_optimizer(settings, model, comm.size)
    if settings.checkpoints.elastic is None:
        place = _resume(settings, model, optimizer, comm)
        return Loop(settings, made, optimizer, data, comm), place, prepared
    given = _settings_of(optimizer)
    copies = Resilient(checkpoints_of(settings), model, optimizer, every=settings.checkpoints.copy_every)
    place = _place(settings, optimizer, given, copies.extra) if copies.restored else _start(settings, comm)
    loop = Loop(settings, made, optimizer, data, comm, copies)
    if copies.restored and comm.rank == 0:
        source = "the store" if copies.restored == STORE else copies.restored
        ranks = f"{comm.size} rank{'s' * (comm.size > 1)}"
        loop.warnings.add("elastic", f"goes on after step {place.step} with {ranks}, from {source}")
    return loop, place, prepared


def _make(settings: Settings, shape: Shape, along: Mesh | None, maker: Maker | None) -> RunModel:
    """The model on the meta device. `along` is a mesh that cuts sequences."""
    start = settings.model.start()
    if start is None or start.built_in:
        return built_in(shape, along, start)
    assert maker is not None, "a model of transformers needs a maker"
    return maker(start, shape)


def _data(settings: Settings, comm: Comm) -> tuple[Data, Prepared | None]:
    """The first process of each node hashes the data and tokenises what is not in its cache; the others wait for it."""
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    comm = Comm(axes_of(None).everyone, torch.device("cpu"), DATA_TIMEOUT_S, Meter())  # much text takes long
    prepared = on_all(comm, lambda: prepare(settings.data, settings.output.out) if first else None, "the data")
    mine = [prepared.entry, prepared.digests.run_digest] if prepared else None
    found = [json.loads(row) for row in comm.exchange(json.dumps(mine).encode(), DATA)]
    for rank, theirs in enumerate(found):
        if theirs is not None and theirs != found[0]:
            raise MismatchError(f"rank {rank} found other data at --data than rank 0; give all nodes the same files")
    seq, own = settings.model.length, settings.output.out
    return on_all(comm, lambda: load_data(settings.data, seq, found[0][0], own), "the data"), prepared


def _check_same(settings: Settings, prepared: Prepared | None, shape: Shape) -> None:
    """On rank 0: raises if the run in --out, or an earlier stage of a comparison, had other settings or data."""
    assert prepared is not None, "rank 0 is the first of its node"
    check_stages(settings, prepared.digests)
    if settings.checkpoints.may_resume:
        check_same(settings, prepared.digests, shape)
        folder = RunFolder(settings.output.out)
        if saved_steps(settings) and digest_of(folder.path) is None:
            warnings.warn(
                f"{folder.facts} does not record what data the run was trained on, so it is unknown whether they are "
                f"the same; from now on it is recorded",
                stacklevel=2,
            )


def _resume(settings: Settings, model: nn.Module, optimizer: Optimizer, comm: Comm) -> Place:
    """Loads the last checkpoint, if the run is resumed and has one."""
    given = _settings_of(optimizer)
    wanted = settings.checkpoints.may_resume
    mine = on_all(comm, lambda: saved_steps(settings) if wanted else [], "the last checkpoint")
    known = comm.exchange(bytes([bool(mine)]), SAVED)[0][0]  # as rank 0 sees it: on other nodes it may show later
    if not known:
        return _start(settings, comm)
    return _place(settings, optimizer, given, load(checkpoints_of(settings), model, optimizer, fallback=True))


def _start(settings: Settings, comm: Comm) -> Place:
    """The place of a run that has no checkpoint."""
    if settings.checkpoints.may_resume and comm.rank == 0:
        _set_aside(RunFolder(settings.output.out))
    return Place(0, 0)


def _settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _place(settings: Settings, optimizer: Optimizer, given: list[dict[str, Any]], extra: Any) -> Place:
    """The place of a run whose state was loaded. The optimizer's settings are those that were `given` with flags, not
    those of the checkpoint."""
    folder = RunFolder(settings.output.out)
    if extra["step"] > settings.steps.steps:
        raise ConfigError(f"the run at {folder.path} is at step {extra['step']} already; give --steps above that")
    for group, settled in zip(optimizer.param_groups, given, strict=True):
        group.update(settled)
    return Place(extra["step"], extra["samples"])


def _set_aside(folder: RunFolder) -> None:
    """Renames the metrics of a run that left no checkpoint, since the run starts again."""
    if rows := read_lines(folder.metrics):
        kept = folder.metrics.with_name("metrics-without-checkpoint.jsonl")
        for number in count(2):
            if not kept.exists():
                break
            kept = folder.metrics.with_name(f"metrics-without-checkpoint-{number}.jsonl")
        folder.metrics.replace(kept)
        warnings.warn(
            f"{folder.path} has no checkpoint to resume from, so it starts at step 0; the {len(rows)} rows it wrote "
            f"are in {kept.name}",
            stacklevel=2,
        )


def _write_facts(loop: Loop, place: Place, prepared: Prepared) -> dict[str, Any]:
    """On rank 0, before the first step: writes settings and facts, and removes rows of later steps than this one."""
    settings, folder = loop.settings, loop.run_folder
    folder.path.mkdir(parents=True, exist_ok=True)
    batch = dataclasses.replace(settings.steps, global_batch=loop.batch, accumulation=None)  # the same on any ranks
    replace(folder.config, to_toml(dataclasses.replace(settings, steps=batch), leave_out=NOT_SAVED))
    earlier = read_facts(folder.path) if folder.facts.exists() else {}
    facts = facts_of(settings, loop.made, loop.optimizer, loop.data, prepared, earlier=earlier, step=place.step)
    if settings.model.weights is not None:
        keep_beside(settings.model.weights, folder.pretrained)
    replace(folder.data, prepared.digests.to_json())
    write_facts(folder.path, facts)
    cut_after(folder.metrics, place.step)
    cut_after(folder.warnings, place.step)
    return facts
