"""check_replicas(): state that several ranks hold has the same bits on all of them, or the rank that differs is named.

Which ranks hold the same follows from the placement of a unit: replicated state is on all ranks of "shard" and
"replica", sharded state on the ranks of "replica". Each rank computes digests where its state is; one small message per
axis says whether all are equal. Only where they are not are the digests themselves exchanged.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.errors import ConfigError, MismatchError
from onefold.model.dtensor_shards import local_tensor
from onefold.optim.optimizer import Optimizer
from onefold.optim.optimizer_state import states_of
from onefold.runtime.engine import Engine, engine_of
from onefold.runtime.refusals import Call
from onefold.settings.placement import Scope
from onefold.state.digests import digests
from onefold.state.unit import Unit

REPLICAS = Label("agree", "replicas")
NAMED = 3  # parameters, before the rest is counted


class Held(NamedTuple):
    """What this rank holds of one state of one parameter."""

    name: str
    replicated: bool  # on all ranks of "shard" and "replica"; else on those of "replica"
    vector: Tensor


class Differing(NamedTuple):
    """A state of a parameter of which ranks hold different bits."""

    name: str
    digests: list[int]  # by rank of the axis


@torch.no_grad()
def check_replicas(model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None = None) -> None:
    """Raise `MismatchError` on every rank, naming the rank and the parameters, if ranks that must hold the same bits do
    not: memory or a device has corrupted them. Collective.

    Compared are parameters and masters, and with `optimizer` its state: at stage 0 all of it, at stages 1 and 2 the
    parameters, and in a mesh with an axis "replica" every shard. Call it before `step`: at stages 1 and 2 that sends
    parameters anew. Buffers are not compared. On CUDA the host waits.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(4, 4), stage=2)
    >>> onefold.check_replicas(model)
    """
    engine = engine_of(model)
    engine.check(Call.FULL_STATE_DICT)
    optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer] if optimizer else []
    for one in optimizers:
        if not any(one is other for other in engine.optimizers):
            raise ConfigError(f"{type(one).__name__} is no onefold.Optimizer of this model; give that one, or None")
    engine.updates.finish()
    engine.updates.wait()  # no quiesce(): it would take corrupted parameters for what a user wrote
    names: dict[bool, list[str]] = {True: [], False: []}
    found: dict[bool, list[Tensor]] = {True: [], False: []}
    for part in _parts(engine, optimizers):
        for scope in names:
            held = [one for one in part if one.replicated is scope and one.vector.numel()]
            names[scope] += [one.name for one in held]
            found[scope] += [digests(one.vector for one in held)] if held else []
    comms, said = engine.comms, ""
    for scope, comm in ((True, comms.everyone), (False, comms.replica)):
        mine = [number for one in found[scope] for number in one.tolist()]
        if comm.size > 1 and not _equal(comm, mine):
            said = said or _described(_differing(comm, names[scope], mine), comm)
    if comms.world.all_reduce_max(bytes([bool(said)]), REPLICAS)[0]:
        texts = [row.decode() for row in comms.world.exchange(said.encode(), REPLICAS)]
        raise MismatchError(next(text for text in texts if text))


def _parts(engine: Engine, optimizers: Sequence[Optimizer]) -> Iterator[list[Held]]:
    """What this rank holds, a part at a time: the vectors of a part may be copies."""
    for unit in engine.all_units:
        unit.flat_params.wait_for_update()
        with unit.state_in_memory():
            yield _parameters(unit)
            for slot in unit.layout.slots if unit.master.tensors() else ():
                span = slot.span.clip(unit.master.owned)
                wide = torch.empty(span.numel, dtype=unit.master.dtype, device=unit.pool.device)
                unit.master.read(span, wide)
                yield [Held(f"the master of {slot.name}", unit.placement.optimizer is Scope.REPLICATED, wide)]
    yield [Held(name, True, local_tensor(param).detach().reshape(-1)) for name, param in engine.frozen]
    for by_unit in (one for optimizer in optimizers for one in optimizer.by_unit):
        unit, replicated = by_unit.unit, by_unit.unit.placement.optimizer is Scope.REPLICATED
        with unit.state_in_memory():
            yield [
                Held(f"{key} of {unit.layout.slots[state.slot].name}", replicated, flat)
                for state in states_of(by_unit, unit.master.owned)
                for key, flat in state.vectors.items()
            ]


def _parameters(unit: Unit) -> list[Held]:
    flat = unit.flat_params
    if flat.scope is Scope.REPLICATED:
        buffer = flat.buffer
        return [Held(s.name, True, buffer[s.start : s.start + s.span.numel]) for s in unit.layout.slots]
    parts = [(slot.name, slot.span.clip(unit.owned_shard)) for slot in unit.layout.slots]
    return [Held(name, False, flat.part(span)) for name, span in parts if span.numel]


def _equal(comm: Comm, mine: Sequence[int]) -> bool:
    """Whether all ranks have these digests: in one message, whose size depends on nothing. Collective."""
    digest = hashlib.sha256(struct.pack(f"<{len(mine)}q", *mine)).digest()
    heard = comm.all_reduce_max(digest + bytes(255 - byte for byte in digest), REPLICAS)
    return all(high + low == 255 for high, low in zip(heard[:32], heard[32:], strict=True))


def _differing(comm: Comm, names: Sequence[str], mine: Sequence[int]) -> list[Differing]:
    form = f"<{len(mine)}q"
    rows = [struct.unpack(form, row) for row in comm.exchange(struct.pack(form, *mine), REPLICAS)]
    columns = zip(names, zip(*rows, strict=True), strict=True)
    return [Differing(name, list(column)) for name, column in columns if len(set(column)) > 1]


def _described(differing: Sequence[Differing], comm: Comm) -> str:
    """One sentence: who differs in what. Where most ranks agree, the others are wrong; two ranks cannot tell."""
    first = differing[0]
    (bits, count), *_ = Counter(first.digests).most_common()
    odd = [comm.world_rank(rank) for rank, found in enumerate(first.digests) if found != bits]
    even = [comm.world_rank(rank) for rank, found in enumerate(first.digests) if found == bits]
    more = f" and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
    what = ", ".join(one.name for one in differing[:NAMED]) + more
    if 2 * count > comm.size:
        return (
            f"{_ranks(odd)} {'hold' if len(odd) > 1 else 'holds'} other bits of {what} than {_ranks(even)}: its memory "
            f"or device has corrupted them; go on from a checkpoint without that machine"
        )
    return (
        f"{_ranks(even)} and {_ranks(odd)} hold different bits of {what}, and which are wrong cannot be told: the "
        f"memory or device of one has corrupted them; test both machines, and go on from a checkpoint"
    )


def _ranks(found: Sequence[int]) -> str:
    shown = ", ".join(map(str, found[:8])) + (" …" if len(found) > 8 else "")
    return f"rank{'s' * (len(found) > 1)} {shown}"
