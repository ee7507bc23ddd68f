"""Quiesces a model before a save or load, and marks it broken while a load is replacing its state."""

from __future__ import annotations

from onefold.comm.communicator import Comm
from onefold.runtime.engine import Engine
from onefold.runtime.refusals import Call, Situation
from onefold.settings.placement import Scope

TIMEOUT_S = 24 * 3600.0  # disks may be slow; the end of a peer is noticed at once


def background_comm(engine: Engine) -> Comm:
    """A communicator of all ranks over a group of its own, for messages that may take long or come from another
    thread. The first call is collective."""
    return engine.background_comm(TIMEOUT_S)


def check_and_quiesce(engine: Engine, call: Call) -> None:
    """Raises if the model is in the middle of a step; then waits until nothing is in flight, so that all state can be
    read or replaced."""
    engine.check(call)
    if call is Call.LOAD:
        engine.updates.abandon()
    engine.quiesce()


def begin_load(engine: Engine) -> None:
    """Drops gradients and unsharded parameters before all state is replaced, and marks the model broken until then."""
    engine.mark_broken(Situation.LOAD_FAILED)
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
        unit.edits.record_own_write()
    engine.comm.meter.cut()
    engine.mark_repaired()
