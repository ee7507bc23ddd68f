"""Unsharded parameters for a while, to read, write or copy: full_parameters() and full_state_dict()."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as EXTRA

from onefold.comm.meter import Label
from onefold.errors import ConfigError, StateError
from onefold.model.dtensor_shards import local_tensor
from onefold.runtime.engine import Engine, engine_of
from onefold.runtime.refusals import Call
from onefold.runtime.user_writes import begin_writes, keep_writes, refuse_writes, take_writes

NOTHING = torch.empty(0)
TRAINABLE = "trainable"  # only=: without frozen parameters


@contextmanager
def full_parameters(model: nn.Module, write: bool = False) -> Iterator[None]:
    """Unshard every parameter of the model on every rank while this context lasts.

    With write=True what the parameters hold at the end is kept: write the same values on every rank. Where ranks wrote
    different ones, rank 0's are kept, and every rank raises a MismatchError that names a parameter. Without it, a
    write to a parameter raises on every rank at the end of the context, at every stage. Also the fast way to many
    forwards without training, such as generation, because parameters are all-gathered once instead of once per forward.
    Needs memory for the whole model. Collective, at its beginning and at its end.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=3)
    >>> with onefold.full_parameters(model, write=True), torch.no_grad():
    ...     _ = model.weight.fill_(0.5)
    """
    engine = engine_of(model)
    engine.check(Call.FULL_PARAMETERS)
    if write:
        engine.check(Call.WRITE)
    engine.quiesce()
    with engine.contexts.enter(write=write) as outermost:
        if engine.contexts.reading:
            with refuse_writes(engine):
                yield
        elif outermost:
            with keep_writes(engine):
                yield
        else:
            yield


@torch.no_grad()
def full_state_dict(
    model: nn.Module, *, every_rank: bool = False, only: str | Collection[str] | None = None
) -> dict[str, Any]:
    """The unsharded state dict of the model, in rank 0's host memory; other ranks get an empty dict, or with
    `every_rank` the same one, which `model.load_state_dict` takes back.

    It is collected one unit at a time. Where 16 bits compute, parameters come from the fp32 master. With
    only="trainable" it holds the parameters that require grad, and nothing of a frozen base is gathered: adapters for
    `model.save_pretrained(folder, state_dict=…)` of PEFT. `only` may also be a set of names of parameters. In a
    pipeline the first rank of each stage gets the state of its part, or with `every_rank` all its ranks do. Collective.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=3)
    >>> sorted(onefold.full_state_dict(model))
    ['bias', 'weight']
    """
    engine = engine_of(model)
    engine.check(Call.FULL_STATE_DICT)
    chosen = _chosen(model, only)
    engine.quiesce()
    near = every_rank or engine.everyone.rank == 0  # a rank of a "tp" group that needs its split tensors
    wanted = every_rank or (near and engine.comms.tp.rank == 0)
    engine.unsharding.gathers.catch_up()
    copies: dict[int, Tensor] = {}

    def copy(name: str, param: nn.Parameter, local: Tensor) -> None:
        if near and id(param) in chosen:
            whole = gather_over_tp(engine, name, local)
            copies[id(param)] = whole.to("cpu", copy=True) if wanted else NOTHING

    for name in engine.resolved.tensor_shards:
        check_split_dim(engine, name, "full_state_dict()")
    if engine.contexts.writable:
        take_writes(engine)
        begin_writes(engine)
    narrow = [unit for unit in engine.units if unit.dtypes.narrow]
    for unit in narrow:
        for slot, param, view in zip(unit.layout.slots, unit.params, unit.unsharded_master(), strict=True):
            copy(slot.name, param, view)
    for index, unit in enumerate(engine.unsharding.units):
        if unit in narrow or chosen.isdisjoint(id(param) for param in unit.params):
            continue
        engine.unsharding.gathers.unshard(index)
        for slot, param in zip(unit.layout.slots, unit.params, strict=True):
            copy(slot.name, param, local_tensor(param).detach())
        engine.unsharding.gathers.reshard(index)
    for name, param in model.named_parameters():  # frozen or replicated parameters
        if near and id(param) not in copies and id(param) in chosen:
            copy(name, param, local_tensor(param).detach())
    if not wanted:
        return {}
    named = model.named_parameters(remove_duplicate=False)
    state: dict[str, Any] = {name: copies[id(param)] for name, param in named if id(param) in copies}
    if only is not None:
        return state
    buffers = {name: buffer.detach().to("cpu", copy=True) for name, buffer in persistent_buffers(model).items()}
    return state | buffers | extra_states(model)


def _chosen(model: nn.Module, only: str | Collection[str] | None) -> set[int]:
    """The ids of the parameters that `only` asks for."""
    named = dict(model.named_parameters(remove_duplicate=False))
    if only is None:
        return {id(param) for param in named.values()}
    if only == TRAINABLE:
        return {id(param) for param in named.values() if param.requires_grad}
    if isinstance(only, str):
        raise ConfigError(f"only={only!r} is unknown; use {TRAINABLE!r}, or leave it out to have everything")
    if unknown := sorted(set(only) - named.keys()):
        raise ConfigError(f"only= names {unknown[0]!r}, which is no parameter of the model; see named_parameters()")
    return {id(named[name]) for name in only}


def gather_over_tp(engine: Engine, name: str, local: Tensor) -> Tensor:
    """The full tensor of a parameter that may be split over "tp". Collective over "tp" if it is."""
    part, tp = engine.resolved.tensor_shards.get(name), engine.comms.tp
    if part is None:
        return local
    row = math.prod(part.shape) // max(part.shape[part.dim], 1)
    lengths = [stop - start for start, stop in pairwise(part.bounds)]
    slots = local.new_zeros(tp.size, max(lengths) * row)
    slots[tp.rank, : local.numel()] = local.reshape(-1)
    tp.all_gather(slots.view(-1), Label("gather", name)).wait()
    shapes = [part.shape[: part.dim] + (length,) + part.shape[part.dim + 1 :] for length in lengths]
    pieces = [slot[: math.prod(shape)].view(shape) for slot, shape in zip(slots, shapes, strict=True)]
    return torch.cat(pieces, dim=part.dim)


def check_split_dim(engine: Engine, name: str, where: str) -> None:
    """Raises if a parameter is split over "tp" along an unknown dim."""
    if name in engine.resolved.tensor_shards and engine.resolved.tensor_shards[name] is None:
        raise StateError(
            f"{where}: {name} is split over the ranks of 'tp', but along which dim is unknown; set param.partition_dim "
            f"(and tensor_model_parallel) before shard(), or use torch's parallelize_module"
        )


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The model's persistent buffers, not copied, by every name they have."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{prefix}.{name}" if prefix else name] = local_tensor(buffer)
    return found


def extra_states(model: nn.Module) -> dict[str, Any]:
    """What modules add to the state dict by get_extra_state."""
    return {
        f"{prefix}.{EXTRA}" if prefix else EXTRA: module.get_extra_state()
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
