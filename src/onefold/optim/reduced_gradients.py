"""The reduced gradients of a step, for those who read or change them before step(): pieces, and norms.

Every element of a gradient belongs to one rank of the mesh axis "shard", at every stage, also where gradients are
replicated. That rank's piece is what counts; where other ranks hold the same elements, step() brings them in line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from onefold.comm.meter import Label
from onefold.errors import ConfigError
from onefold.runtime.engine import Engine, engine_of
from onefold.runtime.refusals import Call
from onefold.settings.placement import Scope

GROUPINGS = ("parameter", "block")


def complete(engine: Engine, call: Call) -> None:
    """Before this call: waits until every gradient of the step is reduced and nothing else reads it; gradients that
    count for nobody are zeros. Collective."""
    engine.check(call)
    engine.complete_gradients(call)
    engine.schedule.drain()
    engine.updates.wait()  # a host update of the last step may still read the gradients
    for index, unit in enumerate(engine.units):
        for slot, flag in enumerate(engine.used.to_update_of(index)):
            if not flag:  # nobody's gradient, or one the user dropped
                unit.gradients.forget(slot)


def pieces(engine: Engine, without: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """The names of parameters that have a gradient, and this rank's elements of it, flat; gradients are complete."""
    for index, unit in enumerate(engine.units):
        to_update = engine.used.to_update_of(index)
        for slot, flag in zip(unit.layout.slots, to_update, strict=True):
            mine = slot.span.clip(unit.mine)
            if flag and mine.numel and slot.name not in without and unit.gradients.reduced:
                unit.gradients.changes()
                yield slot.name, unit.gradients.pieces(mine)[0][1]


def share_writes(engine: Engine) -> None:
    """Ranks that hold the same elements take what their owner wrote: replicas, and at stage 0 all ranks. Collective."""
    units = [unit for unit in engine.units if unit.gradients.reduced]
    engine.comms.replica.broadcast([unit.gradients.mine() for unit in units], Label("reduce-replica", "written"))
    if engine.resolved.placement.optimizer is Scope.REPLICATED:
        for pending in [unit.gradients.gather() for unit in units if not unit.updated_on_host]:
            pending.wait()


@torch.no_grad()
def grad_norms(model: nn.Module, norm_type: float = 2.0, by: str = "parameter") -> dict[str, Tensor]:
    """The norm of each parameter's gradient, by its name; with by="block", of each block's, and under "" of the rest.

    Call it between backward and step, on every rank; one small message is sent. The norms are those of the gradients as
    `step` will use them, after `clip_grad_norm` if that was called, and have the same bits on every rank and at every
    stage. Parameters without a gradient are left out. In a pipeline each stage gets the norms of its own part.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(4, 4), stage=2)
    >>> optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> {name: round(float(norm), 3) for name, norm in onefold.grad_norms(model).items()}
    {'weight': 4.0, 'bias': 2.0}
    """
    if by not in GROUPINGS:
        raise ConfigError(f"by={by!r} is unknown; use one of {', '.join(map(repr, GROUPINGS))}")
    if not (isinstance(norm_type, int | float) and norm_type > 0):
        raise ConfigError(f"norm_type={norm_type!r} is not a positive number or inf")
    engine = engine_of(model)
    complete(engine, Call.GRADIENTS)
    for optimizer in engine.optimizers:
        optimizer.run_gradient_hooks()
    names = [engine.names[index] for index in engine.used.to_update()]
    comm, tp = engine.comms.shard, engine.comms.tp
    table = torch.zeros(tp.size, comm.size, len(names), dtype=torch.float64, device=engine.device)
    row = {name: place for place, name in enumerate(names)}
    factors = _factors(engine)
    for name, piece in pieces(engine):
        if engine.counts(name):
            norm = torch.linalg.vector_norm(piece, norm_type, dtype=torch.promote_types(piece.dtype, torch.float32))
            table[tp.rank, comm.rank, row[name]] = norm.to(table.device) * factors(name)
    comm.all_gather(table[tp.rank].view(-1), Label("norm", "parameters")).wait()
    if tp.size > 1:
        tp.all_gather(table.view(-1), Label("norm", "parameters")).wait()
    norms = torch.linalg.vector_norm(table.view(-1, len(names)), norm_type, dim=0) / engine.scale.value
    if by == "parameter":
        return dict(zip(names, norms.float().unbind(), strict=True))
    block = {info.name: info.block for info in engine.resolved.params}
    found: dict[str, list[Tensor]] = {}
    for name, norm in zip(names, norms.unbind(), strict=True):
        found.setdefault(block[name], []).append(norm)
    return {name: torch.linalg.vector_norm(torch.stack(parts), norm_type).float() for name, parts in found.items()}


def _factors(engine: Engine) -> Callable[[str], float | Tensor]:
    """What step() will still multiply a parameter's gradient by: the clipping factor of 16-bit gradients."""
    narrow = {slot.name for unit in engine.units if unit.dtypes.narrow for slot in unit.layout.slots}
    clip = {engine.names[i]: one.pending_clip for one in engine.optimizers for i in one.indices}
    return lambda name: clip.get(name, 1.0) if name in narrow else 1.0
