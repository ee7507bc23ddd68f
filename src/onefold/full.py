"""Whole parameters for a while: to read, to write, to copy out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA

from onefold.engine import engine_of


@contextmanager
def full_parameters(model: nn.Module, write: bool = False) -> Iterator[None]:
    """Inside, every parameter is whole on every rank. With `write`, what they hold at the end is kept: write the same
    values on every rank. Collective. Also the fast way to many forwards without training (generation).

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=3)
    >>> with onefold.full_parameters(model, write=True), torch.no_grad():
    ...     _ = model.weight.fill_(0.5)
    """
    engine = engine_of(model)
    passes, narrow = engine.passes, [unit for unit in engine.units if unit.dtypes.narrow]
    passes.pin_all()
    engine.whole_for_now += 1
    for unit in narrow if write else ():
        unit.take_edits()
        unit.master.watch()
    try:
        yield
        if write:
            for unit in passes.units:
                unit.values.write_back()
            for unit in narrow:
                unit.master.absorb()
                unit.know_edits()
    finally:
        engine.whole_for_now -= 1
        passes.unpin_all()


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The whole state on rank 0's host memory, one unit at a time; empty on other ranks. Where 16 bits compute, it is
    the fp32 master's. Collective.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=3)
    >>> sorted(onefold.full_state_dict(model))
    ['bias', 'weight']
    """
    engine = engine_of(model)
    first = engine.everyone.rank == 0
    engine.passes.gathers.catch_up()
    copies: dict[int, Tensor] = {}
    narrow = [unit for unit in engine.units if unit.dtypes.narrow]
    for unit in narrow:
        unit.take_edits()
        whole = unit.whole_master()
        if first:
            copies.update({id(p): view.to("cpu", copy=True) for p, view in zip(unit.params, whole, strict=True)})
    for index, unit in enumerate(engine.passes.units):
        if unit in narrow:
            continue
        engine.passes.gathers.need(index)
        if first:
            copies.update({id(param): param.detach().to("cpu", copy=True) for param in unit.params})
        engine.passes.gathers.done(index)
    if not first:
        return {}
    state = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        state[name] = copies[id(param)] if id(param) in copies else param.detach().to("cpu", copy=True)
    buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in persistent_buffers(model).items()}
    return state | buffers | extra_states(model)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Themselves, by every name they have."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = buffer
    return found


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules add to their state dict by get_extra_state."""
    return {
        f"{prefix}.{EXTRA}" if prefix else EXTRA: module.get_extra_state()
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
