"""unshard(): a sharded model becomes a plain module again, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from onefold.comm.agreement import on_all
from onefold.model.dtensor_shards import local_tensor, set_local_tensor
from onefold.model.quantized import release_constants
from onefold.runtime.engine import Engine, engine_of
from onefold.runtime.refusals import Call
from onefold.state.unit import Unit

ModelT = TypeVar("ModelT", bound=nn.Module)


@torch.no_grad()
def unshard(model: ModelT) -> ModelT:
    """Make a sharded model a plain torch module again, in place, and return it: the opposite of `shard`. Collective.

    Every rank gets all parameters: the same objects, in the dtypes they had before `shard`. Where 16 bits computed,
    trained ones have the values of their fp32 masters, and frozen ones keep what they were rounded to. Onefold's hooks,
    gradients and optimizer state are gone, and the model's Optimizers and EMAs raise when used. Needs memory for the
    whole model. The model may be sharded again, with other settings.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=3, precision="bf16")
    >>> model = onefold.unshard(model)
    >>> model.weight.dtype
    torch.float32
    """
    engine = engine_of(model)
    on_all(engine.comms.world, lambda: _check(engine), where="unshard()")
    with torch.inference_mode(False):  # tensors of inference mode could not be trained
        _make_plain(engine)
    return model


def _check(engine: Engine) -> None:
    engine.check(Call.UNSHARD)
    engine.check_parameters()


def _make_plain(engine: Engine) -> None:
    engine.prepare_units_change()
    engine.freezing.train_again()
    dtypes = engine.resolved.dtypes
    part(engine, {unit: [dtypes[slot.name] for slot in unit.layout.slots] for unit in engine.all_units})
    for name, param in engine.frozen:
        if param.dtype is not dtypes[name]:
            set_local_tensor(param, local_tensor(param).detach().to(dtypes[name]))
    engine.end()
    release_constants(engine.model)


def part(engine: Engine, units: Mapping[Unit, Sequence[torch.dtype]]) -> None:
    """Parts the parameters of units from their flat buffers: each is in memory of its own from now on, with all its
    values, in the dtype that is given for it. Nothing may use the units afterwards. Collective."""
    values = {unit: _copies(engine, unit, dtypes) for unit, dtypes in units.items()}
    engine.unsharding.reshard_all()  # before the loop: resharding puts placeholders into the model
    for unit in units:
        unit.flat_params.guard.lift()
        for param, value in zip(unit.params, values[unit], strict=True):
            set_local_tensor(param, value)


def _copies(engine: Engine, unit: Unit, dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Copies of all elements of a unit's parameters, of the master or of the flat buffer. Collective."""
    unsharding = engine.unsharding
    if unit.trained and unit.dtypes.narrow:
        return [value.to(dtype, copy=True) for value, dtype in zip(unit.unsharded_master(), dtypes, strict=True)]
    index = unsharding.units.index(unit) if unit in unsharding.units else None
    if index is not None:
        unsharding.gathers.unshard(index)
    found = [local_tensor(p).detach().to(dtype, copy=True) for p, dtype in zip(unit.params, dtypes, strict=True)]
    if index is not None:
        unsharding.gathers.reshard(index)
    return found
