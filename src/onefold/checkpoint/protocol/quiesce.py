"""The moment in which a model is saved or filled anew: nothing of it is half done; all ranks can talk beside it."""

from __future__ import annotations

import torch

from onefold.comm.communicator import Comm
from onefold.errors import StateError
from onefold.runtime.engine import Engine
from onefold.settings.placement import Scope
from onefold.state.edits import Author

TIMEOUT_S = 24 * 3600.0  # a disk may be slow; a peer that has ended is noticed at once


def background_comm(engine: Engine) -> Comm:
    """All ranks, over a group of its own, for what may take long or run in another thread. Collective at first."""
    return engine.background_comm(TIMEOUT_S)


def quiet(engine: Engine, where: str) -> None:
    """Nothing is half done, so that all values may be read, or replaced, as one state."""
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
    """Every value is about to be replaced: gradients of the old ones go, and so do whole copies."""
    engine.mark_broken("load() failed half way, so the model holds values of two states; load a checkpoint again")
    engine.drop_gradients()
    engine.unsharding.gathers.catch_up()
    engine.unsharding.reshard_all()


def end_load(engine: Engine) -> None:
    """Each rank has new values of what it owns: bring the others, and tell whoever remembers the old ones."""
    owners = [u for u in engine.units if u.placement.optimizer is Scope.SHARDED]
    gathers = [u.flat_params.gather_updated() for u in owners if u.placement.parameters is Scope.REPLICATED]
    for pending in gathers:
        pending.wait()
    for unit in engine.all_units:
        unit.edits.record_own_write(Author.LOAD)
    engine.comm.meter.cut()
    engine.mark_repaired()
