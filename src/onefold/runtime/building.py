"""Builds what trains a model: its units over flat buffers, and the engine that drives them."""

from __future__ import annotations

import torch
from torch import nn

from onefold.comm.agreement import on_all
from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comms
from onefold.comm.sequence import sequence_group
from onefold.model.resolved import Resolved
from onefold.offload.tiers import Tiers
from onefold.runtime.automatic import waits_for_a_step
from onefold.runtime.engine import Engine
from onefold.runtime.memory_watch import MemoryWatch
from onefold.runtime.parking import Parking
from onefold.runtime.pipeline_axis import Pipeline
from onefold.runtime.sequence_watch import NoSequences, SequenceWatch
from onefold.settings.zero import Zero
from onefold.state.build import build_units, reserve


def build_engine(model: nn.Module, resolved: Resolved, comms: Comms) -> Engine:
    """Moves the parameters into the flat buffers of their units, and makes the engine; the model has no hook of it yet.
    Collective."""
    device = resolved.device
    pool, tiers = Pool(device, keeps=comms.shard.on_host), Tiers(device, keeps=comms.shard.on_host)
    on_all(comms.world, lambda: reserve(resolved, comms.shard.rank, tiers))
    units = on_all(comms.world, lambda: build_units(model, resolved, comms, pool, tiers))
    pipeline = Pipeline.of(comms, sum(unit.trained for unit in units))
    engine = Engine(
        model, resolved, comms=comms, pool=pool, tiers=tiers, units=units, pipeline=pipeline,
        sequences=_watched(model, resolved.settings, comms, device),
    )  # fmt: skip
    if waits_for_a_step(resolved.settings, device, comms):
        engine.watch_memory(MemoryWatch(engine, resolved.candidates), Parking(engine))
    return engine


def _watched(model: nn.Module, settings: Zero, comms: Comms, device: torch.device) -> NoSequences:
    """What watches the model's attention, if its mesh cuts sequences. Collective then."""
    if comms.sequence.size == 1 or settings.mesh is None:
        return NoSequences()
    group = sequence_group(settings.mesh, device)
    return SequenceWatch(model, group, comms.world.meter, settings.timeout_s, compiled=bool(settings.compile))
