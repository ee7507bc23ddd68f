"""What users write to parameters inside full_parameters(): refused, or kept if all ranks wrote the same.

A context without write=True compares what parameters hold at its end with what they held at its beginning, by digests
(digests.py): torch does not count writes through .data. One with write=True compares what ranks hold at its end. Either
takes one small message, after which all ranks go on, or all raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from onefold.comm.agreement import agree, together
from onefold.comm.meter import Label
from onefold.errors import MismatchError, StateError
from onefold.model.dtensor_shards import local_tensor
from onefold.runtime.engine import Engine
from onefold.state.digests import digests

READING, WRITING = "full_parameters()", "full_parameters(write=True)"
WRITE_ALIKE = f"inside {WRITING} write the same values on every rank: rank 0's have been kept"


@contextmanager
def refuse_writes(engine: Engine) -> Iterator[None]:
    """Raises at the end, on every rank, if a rank has written parameters meanwhile: sharded ones lose what was written,
    and replicated ones keep it."""
    for unit in engine.all_units:
        unit.edits.watch(unit.digests)
    engine.frozen_edits.watch(partial(_frozen_digests, engine))
    error: Exception | None = None
    try:
        yield
        try:
            _check_unwritten(engine)
        except StateError as mistake:
            error = mistake
        _agree(engine, [], error, READING)
    except BaseException:
        for unit in engine.all_units:  # without an error of its own, which would hide this one
            unit.drop_user_writes()
        raise
    finally:
        for unit in engine.all_units:
            unit.edits.unwatch()
        engine.frozen_edits.unwatch()


@contextmanager
def keep_writes(engine: Engine) -> Iterator[None]:
    """Keeps what users have written at the end, in the shards and in the masters."""
    begin_writes(engine)
    try:
        yield
        take_writes(engine)
    except BaseException:
        for unit in engine.all_units:  # without an error of its own, which would hide this one
            unit.drop_user_writes()
        raise


def begin_writes(engine: Engine) -> None:
    """Users may write parameters from here to `take_writes`."""
    for unit in engine.units:
        unit.begin_user_writes()


def take_writes(engine: Engine) -> None:
    """Keeps what users have written since `begin_writes`. Where ranks have written different values, rank 0's are kept,
    and every rank raises. Collective."""
    try:
        _compare(engine)
    except (MismatchError, StateError):
        for tensor in [*(unit.flat_params.buffer for unit in engine.all_units), *_frozen(engine)]:
            engine.everyone.broadcast([tensor], Label("agree", "what users wrote"))
        _take(engine)
        raise
    _take(engine)


def _take(engine: Engine) -> None:
    for unit in engine.all_units:
        unit.take_user_writes()


def _check_unwritten(engine: Engine) -> None:
    names = [unit.layout.slots[index].name for unit in engine.all_units for index in unit.edits.written()]
    names += [engine.frozen[index][0] for index in engine.frozen_edits.written()]
    if names:
        raise StateError(
            f"{', '.join(names)} was written inside {READING} without write=True; write inside "
            f"onefold.full_parameters(model, write=True)"
        )
    _check_places(engine)


def _compare(engine: Engine) -> None:
    """Raises on every rank unless all ranks hold the same parameters."""
    error, lines = None, list[str]()
    try:
        _check_places(engine)
        if engine.everyone.size > 1:
            names = [slot.name for unit in engine.all_units for slot in unit.layout.slots]
            names += [name for name, _ in engine.frozen]
            found = [*(unit.digests() for unit in engine.all_units), _frozen_digests(engine)]
            numbers = [number % (1 << 64) for one in found for number in one.tolist()]
            lines = [f"{name} with bits {number:016x}" for name, number in zip(names, numbers, strict=True)]
    except StateError as mistake:
        error = mistake
    _agree(engine, lines, error, WRITING)


def _check_places(engine: Engine) -> None:
    """Raises if a parameter has other memory, which a user has assigned to its .data."""
    for unit in engine.all_units:
        unit.flat_params.check()


def _agree(engine: Engine, lines: list[str], error: Exception | None, where: str) -> None:
    said = partial(agree, engine.everyone, lines, error, where=where, remedy=WRITE_ALIKE)
    together(engine.comms, said, where=where)


def _frozen(engine: Engine) -> list[Tensor]:
    return [local_tensor(param).detach() for _, param in engine.frozen]


def _frozen_digests(engine: Engine) -> Tensor:
    return digests(tensor.reshape(-1) for tensor in _frozen(engine))
