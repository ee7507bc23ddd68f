"""Quiesces a model before a save or load, and marks it broken while a load is replacing its state."""

from __future__ import annotations

import torch

from onefold.comm.communicator import Comm
from onefold.errors import StateError
from onefold.runtime.engine import Engine
from onefold.settings.placement import Scope
from onefold.state.edits import Author

TIMEOUT_S = 24 * 3600.0  # disks may be slow; the end of a peer is noticed at once


def background_comm(engine: Engine) -> Comm:
    """A communicator of all ranks over a group of its own, for messages that may take long or come from another
    thread. The first call is collective."""
    return engine.background_comm(TIMEOUT_S)


def check_and_quiesce(engine: Engine, where: str) -> None:
    """Raises if the model is in the middle of a step; then waits until nothing is in flight, so that all state can be
    read or replaced."""
    if where == "save()":
        engine.check_usable()
    if engine.in_full_parameters:
        raise StateError(f"{where} inside full_parameters would miss what is written there; leave it first")
    if torch._C._current_graph_task_id() != -1:
        raise StateError(f"{where} inside backward would see some units before and some after it; call it later")
    if engine.updates.awaits_step:
        raise StateError(f"{where} between a backward that updates and its step(): call optimizer.step() first")
    if where == "load()":
        engine.updates.abandon()
    engine.quiesce()


def begin_load(engine: Engine) -> None:
    """Drops gradients and unsharded parameters before all state is replaced, and marks the model broken until then."""
    engine.mark_broken("load() failed half way, so the model holds parts of two states; load a checkpoint again")
    engine.drop_gradients()
    engine.unsharding.gathers.catch_up()
    engine.unsharding.reshard_all()


def end_load(engine: Engine) -> None:
    """All-gathers replicated parameters after each rank has loaded the elements it owns, and records the writes."""
    owners = [u for u in engine.units if u.placement.optimizer is Scope.SHARDED]
    gathers = [u.flat_params.gather_updated() for u in owners if u.placement.parameters is Scope.REPLICATED]
    for pending in gathers:
        pending.wait()
    for unit in engine.all_units:
        unit.edits.record_own_write(Author.LOAD)
    engine.comm.meter.cut()
    engine.mark_repaired()
