"""Fills a sharded model and its optimizer from a checkpoint of any stage, precision and number of ranks.

Each rank reads the elements of its master and its optimizer state, and no others; replicated parameters whose optimizer
is sharded are completed by the same all-gather that follows every update.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from onefold.checkpoint.format.manifest import VALUE, ParamRecord
from onefold.checkpoint.format.notes import decode_single
from onefold.checkpoint.format.reading import Source, read_in_order
from onefold.checkpoint.protocol.state import AVERAGES, OTHERS, Param, params_of, pieces, scales_of
from onefold.cost.layout import ALIGN, Span
from onefold.errors import CheckpointError
from onefold.model.dtensor_shards import local_tensor
from onefold.model.element_order import Order
from onefold.model.storage import dense_stride
from onefold.optim.optimizer import Optimizer
from onefold.optim.optimizer_state import Codes, NewState, decoded, load_states
from onefold.runtime.engine import Engine
from onefold.state.rounding import narrow

LOG = logging.getLogger("onefold")
CHUNK_BYTES = 64 << 20  # of host memory at a time; all bytes of a digest are read together


def chunks(source: Source, name: str, state: str, order: Order, elements: Span) -> Iterator[tuple[Span, Tensor]]:
    """Elements of a parameter, numbered in this order, chunk by chunk: their span and a host tensor in the saved
    dtype."""
    record = source.records[name]
    dtype = record.dtype(state)
    together = not record.order.same(order)  # then each read_in_order would read all of it
    scratch = torch.empty(0, dtype=dtype)
    for span in [elements] if together else pieces(elements, CHUNK_BYTES // dtype.itemsize):
        scratch = scratch if scratch.numel() >= span.numel else torch.empty(span.numel, dtype=dtype)
        read_in_order(source, name, order, span, scratch[: span.numel], state)
        yield span, scratch[: span.numel]


def check_kinds(source: Source, found: Mapping[str, str], dtypes: Mapping[str, torch.dtype]) -> None:
    """Raises if a saved tensor cannot be cast to the model's: complex to real, or floating to integer."""
    for name, saved in found.items():
        for state in source.records[saved].states:
            dtype = source.records[saved].dtype(state)
            if not torch.can_cast(dtype, dtypes[name]):
                raise CheckpointError(
                    f"{saved} ({state}) is saved in {dtype}, which does not fit {name} in {dtypes[name]}; build the "
                    f"model with the saved dtype, or leave it out with subset="
                )


def check_fits(name: str, values: Tensor, dtype: torch.dtype) -> None:
    """Raises if a cast would make a finite number infinite, or change an integer."""
    if _range(dtype) >= _range(values.dtype):
        return
    made = values.to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        made = made.float() if made.itemsize == 1 else made
        bad = values.isfinite() & ~made.isfinite()
    else:
        bad = made != values
    if bool(bad.any()):
        raise CheckpointError(f"{name} has values too large for {dtype}; load it in a wider precision (bf16 or fp32)")


def _range(dtype: torch.dtype) -> float:
    if dtype is torch.bool:
        return 1
    return torch.finfo(dtype).max if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def fill_parameters(engine: Engine, source: Source, found: Mapping[str, str]) -> None:
    """Fills parameters and their masters; `found` has the saved name of each parameter to load."""
    params = {param.name: param for param in params_of(engine)}
    for unit in engine.all_units:
        for slot in unit.layout.slots:
            part = slot.span.clip(unit.master.owned)
            if slot.name in found and part.numel:
                start = slot.start - params[slot.name].base  # of element 0, in the unit
                order, elements = params[slot.name].order, part.shift(-start)
                with unit.state_in_memory(write=True):
                    for span, values in chunks(source, found[slot.name], VALUE, order, elements):
                        check_fits(slot.name, values, unit.dtypes.compute)
                        unit.master.write_both(span.shift(start), values.to(unit.pool.device))
    for name, param in ((name, local_tensor(param)) for name, param in engine.frozen):
        if name in found and param.numel():
            flat = torch.empty_strided(param.shape, dense_stride(param), dtype=param.dtype, device=param.device)
            line, base = flat.as_strided((param.numel(),), (1,)), params[name].base
            elements = Span(base, base + param.numel())
            for span, values in chunks(source, found[name], VALUE, params[name].order, elements):
                check_fits(name, values, param.dtype)
                narrow(values.to(param.device), line[span.start - base : span.stop - base])
            param.detach().copy_(flat)


def fill_buffers(
    buffers: Mapping[str, Tensor], source: Source, found: Mapping[str, str], own: Mapping[str, Tensor]
) -> None:
    """Fills buffers: from this rank's own notes where it has them, else from the checkpoint."""
    for name, buffer in buffers.items():
        if name in found:
            record = source.records[found[name]]
            value = own.get(record.name)
            if value is None or value.shape != buffer.shape:
                flat = torch.empty(record.numel, dtype=record.dtype())
                source.read(record.name, Span(0, record.numel), flat)
                value = flat.as_strided(record.shape, record.stride)
            check_fits(name, value, buffer.dtype)
            buffer.copy_(value)


def fill_optimizer(engine: Engine, optimizer: Optimizer, source: Source, found: Mapping[str, str]) -> None:
    """Loads the optimizer state of every parameter in `found`; a parameter without saved state gets none."""
    params = {param.name: param for param in params_of(engine)}
    for by_unit in optimizer.by_unit:
        new = {
            index: _new_state(source, source.records[found[slot.name]], params[slot.name])
            for index, slot in enumerate(by_unit.unit.layout.slots)
            if slot.name in found
        }
        load_states(by_unit, new, optimizer.param_groups)


def _new_state(source: Source, record: ParamRecord, param: Param) -> NewState:
    def codes(key: str, elements: Span) -> Codes | None:
        in_8bit = scales_of(record.name, key) in source.records
        if not in_8bit or param.base or not record.order.same(param.order):
            return None
        return _codes(source, record, key, elements)

    def fill(key: str, elements: Span, out: Tensor) -> None:
        if scales_of(record.name, key) in source.records:
            found = codes(key, elements)
            out.copy_(_reordered(source, record, key, param, elements) if found is None else decoded(key, found))
            return
        elements = elements.shift(param.base)
        for span, values in chunks(source, record.name, key, param.order, elements):
            at = span.shift(-elements.start)
            check_fits(f"{record.name} ({key})", values, out.dtype)
            out[at.start : at.stop].copy_(values)

    singles = {key: decode_single(word) for key, word in record.scalars.items()}
    vectors = tuple(state for state in record.states if state != VALUE and not state.startswith(AVERAGES))
    prefix, scales = f"{OTHERS}{record.name}/", {scales_of(record.name, key) for key in vectors}
    named = [name for name in source.records if name.startswith(prefix) and name not in scales]
    others = {name.removeprefix(prefix): partial(_tensor, source, name) for name in named}
    return NewState(vectors, singles, fill, codes, others)


def _codes(source: Source, record: ParamRecord, key: str, elements: Span) -> Codes:
    """Elements in 8 bits, from the first of a block on, and the scales of their blocks."""
    blocks = Span(elements.start // ALIGN, -(-elements.stop // ALIGN))
    made = Codes(*(torch.empty(span.numel, dtype=torch.uint8) for span in (elements, blocks)))
    source.read(record.name, elements, made.codes, key)
    source.read(scales_of(record.name, key), blocks, made.scales)
    return made


def saved_in_8bit(source: Source, record: ParamRecord, key: str) -> Tensor:
    """A state that was saved in 8 bits, as fp32 values in the shape of its parameter."""
    found = _codes(source, record, key, Span(0, record.numel))
    return decoded(key, found).as_strided(record.shape, record.stride)


def _reordered(source: Source, record: ParamRecord, key: str, param: Param, elements: Span) -> Tensor:
    """Elements that were saved in 8 bits in another order of memory, or are part of a tensor that is split here."""
    mine = elements.shift(param.base)
    return param.order.vector(saved_in_8bit(source, record, key))[mine.start : mine.stop]


def _tensor(source: Source, name: str) -> Tensor:
    record = source.records[name]
    flat = torch.empty(record.numel, dtype=record.dtype())
    source.read(name, Span(0, record.numel), flat)
    return flat.view(record.shape)


def fill_averages(engine: Engine, source: Source, found: Mapping[str, str]) -> None:
    """Loads the model's EMAs; one that the checkpoint does not have begins again with the loaded parameters."""
    params = {param.name: param for param in params_of(engine)}
    for average in engine.averages:
        state = AVERAGES + average.name
        if found and not any(state in source.records[saved].states for saved in found.values()):
            average.restart()
            LOG.warning("the checkpoint has no EMA %r, which begins again with what was loaded", average.name)
            continue
        for unit, vector in zip(engine.units, average.vectors, strict=True):
            for slot in unit.layout.slots:
                part, start = slot.span.clip(unit.owned_shard), slot.start - params[slot.name].base
                if slot.name not in found or state not in source.records[found[slot.name]].states or not part.numel:
                    continue
                order, elements = params[slot.name].order, part.shift(-start)
                with unit.state_in_memory(write=True):
                    for span, values in chunks(source, found[slot.name], state, order, elements):
                        at = span.shift(start - unit.owned_shard.start)
                        vector[at.start : at.stop].copy_(values)
