"""shard(): puts units, engine and hooks around a model, in place, in six steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from torch import nn

from onefold.activations.automatic import attach_activations
from onefold.comm.agreement import number_messages, on_all
from onefold.comm.communicator import Comms
from onefold.comm.mesh import Axes, axes_of
from onefold.comm.meter import Meter
from onefold.model.agreement import agree_on_model
from onefold.model.device import device_of, move, warn_of_idle_gpu
from onefold.model.quantized import adopt_constants, adopted_constants
from onefold.model.survey import survey_or_mistake
from onefold.model.sync import sync_parameters
from onefold.runtime.automatic import resolve
from onefold.runtime.building import build_engine
from onefold.runtime.compiling import compile_blocks, forget_graphs
from onefold.runtime.engine import Engine
from onefold.runtime.hooks import attach
from onefold.runtime.unfreezing import Unfreezing
from onefold.settings.placement import Tier
from onefold.settings.zero import Zero

ModelT = TypeVar("ModelT", bound=nn.Module)


def shard(model: ModelT, zero: Zero | None = None, /, **fields: Any) -> ModelT:
    """Shard the training state of `model` over ranks, in place, and return `model`.

    `fields` are those of `Zero`, which may also be given as one object. Parameter names and shapes, forward, hooks and
    train() stay as they were. A model stays on the device where it is, unless `device` names another; one on the meta
    device becomes real on this rank's GPU, if there is one. Collective: every rank calls it.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=2)
    >>> model.weight.shape
    torch.Size([8, 8])
    """
    return shard_over(axes_of(fields.get("mesh", getattr(zero, "mesh", None))), model, zero, fields)


def shard_over(
    axes: Axes,
    model: ModelT,
    zero: Zero | None,
    fields: dict[str, Any],
    parameter_tiers: Mapping[str, Tier] | None = None,
) -> ModelT:
    """shard(), over given axes, which may be simulated. `parameter_tiers` are the tiers of parameters by the names of
    units, if a run has decided them."""
    with adopted_constants(model):
        _shard(axes, model, zero, fields, parameter_tiers)
    return model


def _shard(
    axes: Axes, model: nn.Module, zero: Zero | None, fields: dict[str, Any], parameter_tiers: Mapping[str, Tier] | None
) -> None:
    # 1 Survey the model. A mistake is kept until step 2, where all ranks hear of it.
    device = device_of(model, fields.get("device", getattr(zero, "device", None)), axes)
    found = survey_or_mistake(model, zero, fields, axes)

    # 2 All ranks agree on the settings and on the model, or all raise.
    comms = Comms.over(axes, device, found.settings.timeout_s, Meter())
    tensor_shards = agree_on_model(comms, model, found)
    warn_of_idle_gpu(device, comms.world, meta=found.meta)
    number_messages(comms)
    comms.connect()

    # 3 Decide what the settings leave open. From here on nothing about the model is looked for again.
    resolved = resolve(found, tensor_shards, device, comms, parameter_tiers)

    # 4 Move the model to the device that was asked for, except sharded parameters, which step 5 moves one unit at a
    # time; and bring parameters and buffers in line with rank 0's, or compare them.
    on_all(comms.world, lambda: move(model, device, resolved.sharded_names))
    adopt_constants(model)
    sync_parameters(model, resolved, comms)

    # 5 Move the parameters into the flat buffers of their units, and make the engine that drives them.
    engine = build_engine(model, resolved, comms)

    # 6 Attach the engine's hooks, compile blocks, and apply the activation policy.
    forget_graphs()
    _attach(engine)
    engine.follow_unfreezing(Unfreezing(engine, partial(_attach, engine)))
    comms.world.meter.cut()  # what was sent here belongs to no step


def _attach(engine: Engine) -> None:
    attach(engine)
    compile_blocks(engine)
    attach_activations(engine)
