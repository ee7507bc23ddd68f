"""Before save() and load(): nothing of the model is in flight, and ranks have a group of their own to talk over."""

from __future__ import annotations

from onefold.comm.communicator import Comm
from onefold.runtime.engine import Engine
from onefold.runtime.refusals import Call, Situation
from onefold.settings.placement import Scope
from onefold.state.edits import Author

TIMEOUT_S = 24 * 3600.0  # a disk may be slow; a peer that has ended is noticed at once


def aside(engine: Engine) -> Comm:
    """All ranks, over a group of its own, for what may take long or run in another thread. Collective at first."""
    return engine.aside(TIMEOUT_S)


def quiesce(engine: Engine, call: Call) -> None:
    """Wait until nothing is in flight, so that save() may read all values, or load() replace them, as one state."""
    engine.check(call)
    if call is Call.LOAD:
        engine.updates.abandon()
    engine.quiesce()


def begin_load(engine: Engine) -> None:
    """Every value is about to be replaced: drop gradients of old values, and release unsharded parameters."""
    engine.mark_broken(Situation.LOAD_FAILED)
    engine.drop_gradients()
    engine.unsharding.gathers.catch_up()
    engine.unsharding.release_all()


def end_load(engine: Engine) -> None:
    """Each rank has new values of its shards: gather replicated parameters, and note that a load wrote all."""
    owners = [u for u in engine.units if u.placement.optimizer is Scope.SHARDED]
    gathers = [u.flat_params.gather_updated() for u in owners if u.placement.parameters is Scope.REPLICATED]
    for pending in gathers:
        pending.wait()
    for unit in engine.all_units:
        unit.edits.ours(Author.LOAD)
    engine.comm.meter.cut()
    engine.mark_repaired()
