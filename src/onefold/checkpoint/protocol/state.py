"""What one rank saves of a sharded model and its optimizer, as named element ranges: the same at every stage.

Of a trained parameter the master is saved: fp32 (or fp64) values; 16-bit parameters are rounded from it, so they are
not saved. Frozen parameters and buffers are saved as they are. Optimizer state is vectors, saved by element range, and
single values (step counts), saved per parameter. A rank saves the elements in its shard of the layout, also where
parameters are replicated; of replicas, the first one saves. Of a parameter split over "tp" each rank saves its part; of
all others the first rank of "tp" does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onefold.checkpoint.format.manifest import VALUE, Entry, ParamRecord
from onefold.checkpoint.format.notes import encode_single
from onefold.checkpoint.format.tensorfile import DTYPE_NAMES
from onefold.cost.layout import ALIGN, Piece, Span, UnitLayout
from onefold.errors import CheckpointError
from onefold.model.dtensor_shards import local_tensor as local
from onefold.model.element_order import Order, contiguous_order, order_of
from onefold.model.storage import dense_stride
from onefold.optim.kernels.rule import SCALE
from onefold.optim.optimizer import Optimizer
from onefold.optim.optimizer_state import ParamState, states_of
from onefold.runtime.engine import Engine
from onefold.runtime.full_parameters import check_split_dim, persistent_buffers
from onefold.state.unit import Unit
from onefold.state.views import FlatViews

CHUNK_BYTES = 16 << 20  # of host memory at a time
OTHERS = "onefold.optimizer/"  # names of tensors of optimizer state that have another shape than their parameter
AVERAGES = "onefold.average."  # the state of a parameter that is an EMA's begins so; its name follows

Reader = Callable[[Span, Tensor], Tensor]  # (elements of a parameter, scratch) -> their values


def pieces(elements: Span, step: int) -> Iterator[Span]:
    for start in range(elements.start, elements.stop, step):
        yield Span(start, min(start + step, elements.stop))


class OwnedElements(NamedTuple):
    """Some elements of one state of one tensor, which this rank saves."""

    name: str
    state: str
    elements: Span  # in memory order
    dtype: torch.dtype
    read: Reader
    on_host: bool = False  # the elements are on the host, and the scratch must be too
    settled: bool = False  # on the device, and written by nobody who does not wait for a snapshot (offload/tiers.py)
    direct: bool = False  # `read` gives a view of a dense vector on the device, without a copy

    @property
    def bytes(self) -> int:
        return self.elements.numel * self.dtype.itemsize

    def spans(self) -> Iterator[Span]:
        """The elements, cut into spans of at most CHUNK_BYTES."""
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
    base: int = 0  # the number of this rank's first element, if it is split over "tp"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.order.shape

    def record(self, states: Mapping[str, torch.dtype], scalars: Mapping[str, Any]) -> ParamRecord:
        named = {state: DTYPE_NAMES[dtype] for state, dtype in states.items()}
        shape, stride, dim, bounds = self.order
        return ParamRecord(self.name, self.kind, shape, stride, named, scalars, self.also, dim, bounds)


class RankContents(NamedTuple):
    """All that one rank saves."""

    owned: list[OwnedElements]
    records: list[ParamRecord]  # of the tensors of which it saves elements; rank 0 also of empty tensors


def rank_contents(engine: Engine, optimizers: Sequence[Optimizer], *, frozen: bool = True) -> RankContents:
    """What this rank saves, with or without `frozen` parameters; nothing is copied yet."""
    owned: list[OwnedElements] = []
    scalars: dict[str, dict[str, Any]] = {}
    left_out = set() if frozen else frozen_names(engine)
    every = [param for param in params_of(engine) if param.name not in left_out]
    base = {param.name: param.base for param in every}
    if engine.comms.replica.rank == 0:
        owned += (one for one in _values(engine, base) if _saves(engine, one.name))
        for by_unit in (one for optimizer in optimizers for one in optimizer.by_unit):
            for state in states_of(by_unit, by_unit.unit.mine):
                name = by_unit.unit.layout.slots[state.slot].name
                if name not in base or not _saves(engine, name):
                    continue
                scalars[name] = {key: encode_single(value, f"{name}: {key}") for key, value in state.singles.items()}
                elements = state.elements.shift(base[name])
                for key, flat in state.vectors.items():
                    read, on_host = _state_reader(by_unit.unit, state, key, elements), by_unit.unit.updated_on_host
                    there = not on_host
                    direct = there and state.read(key).data_ptr() == flat.data_ptr()  # else it is copied to be a vector
                    owned.append(OwnedElements(name, key, elements, flat.dtype, read, on_host, there, direct))
                for key, scales in state.scales.items():
                    blocks = -(-_numel(by_unit.unit, state.slot) // ALIGN)
                    found = Param(scales_of(name, key), (), "extra", contiguous_order((blocks,)))
                    span = Span(state.elements.start // ALIGN, -(-state.elements.stop // ALIGN))
                    on_host = by_unit.unit.updated_on_host
                    one = vector(found.name, VALUE, span, scales)
                    owned.append(one._replace(on_host=on_host, settled=not on_host, direct=not on_host))
                    every.append(found)
                for key, tensor in state.others.items():
                    found = Param(f"{OTHERS}{name}/{key}", (), "extra", contiguous_order(tensor.shape))
                    owned.append(own_tensor(found.name, tensor))
                    every.append(found)
        owned += (one for one in _averages(engine, base) if _saves(engine, one.name))
    first = engine.everyone.rank == engine.comms.tp.rank == 0
    if first:
        owned += [own_tensor(name, buffer) for name, buffer in persistent_buffers(engine.model).items()]
    states: dict[str, dict[str, torch.dtype]] = {}
    for one in owned:
        states.setdefault(one.name, {})[one.state] = one.dtype
    params = [p for p in every if p.name in states or p.name in scalars or (first and 0 in p.shape)]
    dtypes = stored_dtypes(engine)
    records = [p.record(states.get(p.name) or {VALUE: dtypes[p.name]}, scalars.get(p.name, {})) for p in params]
    return RankContents([one for one in owned if one.elements.numel], records)


def _numel(unit: Unit, slot: int) -> int:
    return unit.layout.slots[slot].numel


def scales_of(name: str, state: str) -> str:
    """The name of the scales of a parameter's optimizer state in 8 bits: one byte for each block of ALIGN elements."""
    return f"{OTHERS}{name}/{state}{SCALE}"


def _averages(engine: Engine, base: Mapping[str, int]) -> Iterator[OwnedElements]:
    """This rank's elements of the model's EMAs."""
    for average in engine.averages:
        for unit, flat in zip(engine.units, average.vectors, strict=True):
            for slot in (slot for slot in unit.layout.slots if slot.name in base):
                part, start = slot.span.clip(unit.owned_shard), slot.start - base[slot.name]
                if part.numel:

                    def read(
                        span: Span, scratch: Tensor, unit: Unit = unit, flat: Tensor = flat, start: int = start
                    ) -> Tensor:
                        unit.keep_state_in_memory()
                        at = span.shift(start - unit.owned_shard.start)
                        return flat[at.start : at.stop]

                    state, elements = AVERAGES + average.name, part.shift(-start)
                    yield OwnedElements(slot.name, state, elements, flat.dtype, read, unit.updated_on_host)


def _state_reader(unit: Unit, state: ParamState, key: str, elements: Span) -> Reader:
    def read(span: Span, scratch: Tensor) -> Tensor:
        unit.keep_state_in_memory()
        return state.read(key)[span.start - elements.start : span.stop - elements.start]

    return read


def _saves(engine: Engine, name: str) -> bool:
    if not engine.tied.saves(name):
        return False  # the other pipeline stage that has it does
    return name in engine.resolved.tensor_shards or engine.comms.tp.rank == 0


def stored_dtypes(engine: Engine) -> dict[str, torch.dtype]:
    """The dtype in which each parameter and buffer is saved: of a trained parameter, its master's."""
    found = {name: tensor.dtype for name, tensor in [*engine.frozen, *persistent_buffers(engine.model).items()]}
    return found | {slot.name: unit.master.dtype for unit in engine.all_units for slot in unit.layout.slots}


def frozen_names(engine: Engine) -> set[str]:
    """Names of parameters that have been frozen since shard()."""
    return {param.name for param in params_of(engine) if param.kind == "frozen"} | engine.unfreezing.never_trained()


def params_of(engine: Engine) -> list[Param]:
    """Every parameter by its first name, then every buffer; in the same order on all ranks."""
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
        found.append(Param(name, (), "buffer", contiguous_order(buffer.shape)))
    return found


def _order(engine: Engine, name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Order, int]:
    """The stored element order of a full parameter, and the number of this rank's first element in it."""
    check_split_dim(engine, name, "a checkpoint")
    part = engine.resolved.tensor_shards.get(name)
    order = order_of(part, shape, stride)
    return order, part.start * order.row_numel if part is not None else 0


def _values(engine: Engine, base: Mapping[str, int]) -> Iterator[OwnedElements]:
    """Of the parameters in `base`."""
    units = {unit.name: unit for unit in engine.all_units}
    frozen = dict(engine.frozen)
    for layout in (spec.layout for spec in engine.resolved.units):
        mine = [piece for piece in layout.pieces(engine.comm.rank) if piece.name in base]
        if layout.name in units:
            yield from _in_unit(units[layout.name], mine, base)
        else:
            yield from _whole(layout, mine, frozen, base)


def _in_unit(unit: Unit, mine: Sequence[Piece], base: Mapping[str, int]) -> Iterator[OwnedElements]:
    for piece in mine:
        elements = piece.elements.shift(base[piece.name])
        start = unit.mine.start + piece.offset - elements.start  # of element 0, in the unit

        def read(elements: Span, scratch: Tensor, start: int = start) -> Tensor:
            unit.keep_state_in_memory()
            return unit.master.view(elements.shift(start), scratch)

        on_host, settled, dtype = unit.updated_on_host, unit.settled, unit.master.dtype
        yield OwnedElements(piece.name, VALUE, elements, dtype, read, on_host, settled, settled and unit.master.dense)


def _whole(
    layout: UnitLayout, mine: Sequence[Piece], params: dict[str, nn.Parameter], base: Mapping[str, int]
) -> Iterator[OwnedElements]:
    """Elements of frozen parameters that are replicated."""
    members = [params[slot.name] for slot in layout.slots]
    index = {slot.name: i for i, slot in enumerate(layout.slots)}
    for piece in mine:
        param = local(params[piece.name]).detach()
        flat = FlatViews(layout, members, param.dtype).in_memory_order(param, index[piece.name])
        here = flat[piece.elements.start : piece.elements.stop]
        yield vector(piece.name, VALUE, piece.elements.shift(base[piece.name]), here)


def vector(name: str, state: str, elements: Span, flat: Tensor) -> OwnedElements:
    """Elements that are in a 1-D tensor of their own."""

    def read(span: Span, scratch: Tensor) -> Tensor:
        return flat[span.start - elements.start : span.stop - elements.start]

    return OwnedElements(name, state, elements, flat.dtype, read)


def plain(tensor: Tensor) -> Tensor:
    """A contiguous tensor of the same values, without lazy conjugation or negation."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def own_tensor(name: str, tensor: Tensor) -> OwnedElements:
    """All elements of a tensor, in row-major order."""
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors cannot hold; convert it first")
    return vector(name, VALUE, Span(0, tensor.numel()), plain(tensor).view(-1))


def on_host(owned: Sequence[OwnedElements], device: torch.device) -> Iterator[Tensor]:
    """All elements in order as chunks in host memory; a chunk may be overwritten when the next one is requested."""
    scratch: dict[tuple[torch.dtype, bool], Tensor] = {}
    pinned = torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) if device.type == "cuda" else None
    for one in owned:
        kind, where = (one.dtype, one.on_host), "cpu" if one.on_host else device
        if kind not in scratch:
            scratch[kind] = torch.empty(CHUNK_BYTES // one.dtype.itemsize, dtype=one.dtype, device=where)
        for span in one.spans():
            part = one.read(span, scratch[kind])
            if pinned is not None and part.device.type != "cpu":
                part = pinned[: part.nbytes].view(part.dtype).copy_(part)
            yield part
