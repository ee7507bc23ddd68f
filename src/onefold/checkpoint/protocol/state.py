"""What a sharded model and its optimizer hold, as named ranges: the same at every stage and for every master.

The truth of a trained parameter is its master: fp32 (or fp64) values, whatever holds them; 16-bit copies are rounded
from it, so they are not kept. Frozen parameters and buffers are themselves. The optimizer's state is vectors, by
element range like the values, and single values (step counts) per parameter. A rank answers for the elements that
its shard of the layout holds, also where it has all of them; of replicas, the first does. Of a parameter that is split
over "tp" each rank there has a part of the elements; of all others the first rank answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onefold.checkpoint.format.manifest import VALUE, Entry, ParamRecord
from onefold.checkpoint.format.notes import encode_single
from onefold.checkpoint.format.order import Order, nested_stride, rows_of
from onefold.checkpoint.format.tensorfile import DTYPE_NAMES
from onefold.cost.layout import Span, UnitLayout
from onefold.errors import CheckpointError
from onefold.model.dtensor_shards import held as local
from onefold.model.storage import dense_stride
from onefold.optim.optimizer import Optimizer
from onefold.optim.optimizer_state import SlotState, states_of
from onefold.runtime.engine import Engine
from onefold.runtime.full_parameters import check_part, persistent_buffers
from onefold.state.unit import Unit
from onefold.state.views import FlatViews

CHUNK_BYTES = 16 << 20  # of host memory at a time

Look = Callable[[Span, Tensor], Tensor]  # (elements of a parameter, scratch for them) -> their values, where they lie


def pieces(elements: Span, step: int) -> Iterator[Span]:
    for start in range(elements.start, elements.stop, step):
        yield Span(start, min(start + step, elements.stop))


class Held(NamedTuple):
    """Some elements of one state of one tensor, which this rank answers for."""

    name: str
    state: str
    elements: Span  # in memory order
    dtype: torch.dtype
    look: Look
    on_host: bool = False  # they lie on the host, and so must the scratch

    @property
    def bytes(self) -> int:
        return self.elements.numel * self.dtype.itemsize

    def spans(self) -> Iterator[Span]:
        """The elements, so many at a time as fit a chunk."""
        return pieces(self.elements, CHUNK_BYTES // self.dtype.itemsize)

    @property
    def entry(self) -> Entry:
        return Entry(self.name, self.state, self.elements.start, self.elements.stop, "")


class Param(NamedTuple):
    """A parameter or buffer of the model."""

    name: str
    also: tuple[str, ...]  # other names of the same tensor
    kind: str
    order: Order
    base: int = 0  # the number of the first element that is here

    @property
    def shape(self) -> tuple[int, ...]:
        return self.order.shape

    def record(self, states: Mapping[str, torch.dtype], scalars: Mapping[str, Any]) -> ParamRecord:
        named = {state: DTYPE_NAMES[dtype] for state, dtype in states.items()}
        shape, stride, dim, bounds = self.order
        return ParamRecord(self.name, self.kind, shape, stride, named, scalars, self.also, dim, bounds)


class Holding(NamedTuple):
    """All that one rank answers for."""

    held: list[Held]
    records: list[ParamRecord]  # of what it holds a part of; rank 0 also of what has no elements


def hold(engine: Engine, optimizer: Optimizer | None) -> Holding:
    """Look at everything; copy nothing."""
    held: list[Held] = []
    scalars: dict[str, dict[str, Any]] = {}
    every = params_of(engine)
    base = {param.name: param.base for param in every}
    if engine.comms.replica.rank == 0:
        held += (one for one in _values(engine, base) if _answers(engine, one.name))
        for by_unit in optimizer.by_unit if optimizer is not None else ():
            for state in states_of(by_unit, by_unit.unit.mine):
                name = by_unit.unit.layout.slots[state.slot].name
                if not _answers(engine, name):
                    continue
                scalars[name] = {key: encode_single(value, f"{name}: {key}") for key, value in state.singles.items()}
                elements = state.elements.shift(base[name])
                for key, flat in state.vectors.items():
                    look = _look_at_state(by_unit.unit, state, key, elements)
                    held.append(Held(name, key, elements, flat.dtype, look, by_unit.unit.updated_on_host))
    first = engine.everyone.rank == engine.comms.tp.rank == 0
    if first:
        held += [hold_tensor(name, buffer) for name, buffer in persistent_buffers(engine.model).items()]
    states: dict[str, dict[str, torch.dtype]] = {}
    for one in held:
        states.setdefault(one.name, {})[one.state] = one.dtype
    params = [p for p in every if p.name in states or (first and 0 in p.shape)]
    dtypes = truths(engine)
    records = [p.record(states.get(p.name, {VALUE: dtypes[p.name]}), scalars.get(p.name, {})) for p in params]
    return Holding([one for one in held if one.elements.numel], records)


def _look_at_state(unit: Unit, state: SlotState, key: str, elements: Span) -> Look:
    def look(span: Span, scratch: Tensor) -> Tensor:
        unit.keep_state_in_memory()
        return state.look(key)[span.start - elements.start : span.stop - elements.start]

    return look


def _answers(engine: Engine, name: str) -> bool:
    if not engine.tied.speaks_for(name):
        return False  # the other end of a pipeline does
    return name in engine.resolved.tensor_shards or engine.comms.tp.rank == 0


def truths(engine: Engine) -> dict[str, torch.dtype]:
    """The dtype in which each parameter and buffer is kept."""
    found = {name: tensor.dtype for name, tensor in [*engine.frozen, *persistent_buffers(engine.model).items()]}
    return found | {slot.name: unit.master.dtype for unit in engine.all_units for slot in unit.layout.slots}


def params_of(engine: Engine) -> list[Param]:
    """Every parameter under its first name, then every buffer. The same on all ranks."""
    names: dict[int, list[str]] = {}
    for name, param in engine.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    trained = set(engine.names)
    strides = {slot.name: unit.stride(i) for unit in engine.all_units for i, slot in enumerate(unit.layout.slots)}
    found = []
    for name, param in engine.model.named_parameters():
        also = tuple(other for other in names[id(param)] if other != name)
        stride = strides[name] if name in strides else dense_stride(param)
        order, base = _order(engine, name, tuple(local(param).shape), stride)
        found.append(Param(name, also, "trained" if name in trained else "frozen", order, base))
    for name, buffer in persistent_buffers(engine.model).items():
        found.append(Param(name, (), "buffer", rows_of(buffer.shape)))
    return found


def _order(engine: Engine, name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Order, int]:
    """How the whole of a parameter is stored, and where in it this rank's part begins."""
    check_part(engine, name, "a checkpoint")
    part = engine.resolved.tensor_shards.get(name)
    if part is None:
        return Order(shape, stride), 0
    order = Order(part.shape, nested_stride(part.shape, stride), part.dim, part.bounds)
    return order, part.start * order.row_numel


def _values(engine: Engine, base: Mapping[str, int]) -> Iterator[Held]:
    units = {unit.name: unit for unit in engine.all_units}
    frozen = dict(engine.frozen)
    for layout in (spec.layout for spec in engine.resolved.units):
        if layout.name in units:
            yield from _in_unit(units[layout.name], layout, engine.comm.rank, base)
        else:
            yield from _whole(layout, engine.comm.rank, frozen, base)


def _in_unit(unit: Unit, layout: UnitLayout, rank: int, base: Mapping[str, int]) -> Iterator[Held]:
    for piece in layout.pieces(rank):
        elements = piece.elements.shift(base[piece.name])
        start = unit.mine.start + piece.offset - elements.start  # of element 0, in the unit

        def look(elements: Span, scratch: Tensor, start: int = start) -> Tensor:
            unit.keep_state_in_memory()
            return unit.master.look(elements.shift(start), scratch)

        yield Held(piece.name, VALUE, elements, unit.master.dtype, look, unit.updated_on_host)


def _whole(layout: UnitLayout, rank: int, params: dict[str, nn.Parameter], base: Mapping[str, int]) -> Iterator[Held]:
    """Frozen parameters that every rank has whole."""
    members = [params[slot.name] for slot in layout.slots]
    index = {slot.name: i for i, slot in enumerate(layout.slots)}
    for piece in layout.pieces(rank):
        param = local(params[piece.name]).detach()
        flat = FlatViews(layout, members, param.dtype).in_memory_order(param, index[piece.name])
        here = flat[piece.elements.start : piece.elements.stop]
        yield vector(piece.name, VALUE, piece.elements.shift(base[piece.name]), here)


def vector(name: str, state: str, elements: Span, flat: Tensor) -> Held:
    """A flat tensor that holds just these elements."""

    def look(span: Span, scratch: Tensor) -> Tensor:
        return flat[span.start - elements.start : span.stop - elements.start]

    return Held(name, state, elements, flat.dtype, look)


def plain(tensor: Tensor) -> Tensor:
    """A tensor whose memory holds its values row by row: no lazy conjugate or negative, no gaps."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def hold_tensor(name: str, tensor: Tensor) -> Held:
    """All of a tensor, as if it were contiguous."""
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors cannot hold; convert it first")
    return vector(name, VALUE, Span(0, tensor.numel()), plain(tensor).view(-1))


def on_host(held: Sequence[Held], device: torch.device) -> Iterator[Tensor]:
    """All elements in order, on the host, in chunks; each may be scratch that the next one overwrites."""
    scratch: dict[tuple[torch.dtype, bool], Tensor] = {}
    landing = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) if device.type == "cuda" else None
    for one in held:
        kind, where = (one.dtype, one.on_host), "cpu" if one.on_host else device
        if kind not in scratch:
            scratch[kind] = torch.empty(CHUNK_BYTES // one.dtype.itemsize, dtype=one.dtype, device=where)
        for span in one.spans():
            part = one.look(span, scratch[kind])
            if landing is not None and part.device.type != "cpu":
                part = landing[: part.nbytes].view(part.dtype).copy_(part)
            yield part
