"""What an Optimizer checks before its first step: that its state will fit, and that all ranks use the same kernel."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from onefold.comm.meter import Label
from onefold.cost.states import StateCost
from onefold.optim.kernels.cpu import available
from onefold.optim.kernels.rule import KNOWN
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.runtime.engine import Engine
from onefold.settings.offload import Offload
from onefold.settings.placement import Tier
from onefold.state.unit import Unit

LOG = logging.getLogger("onefold")


def updated_dtype(unit: Unit) -> torch.dtype:
    """The dtype of what the optimizer updates: of the master, or of the parameters where there is none."""
    return torch.float32 if unit.dtypes.narrow else unit.dtypes.compute


def reserve(engine: Engine, costs: Mapping[torch.dtype, StateCost], *, in_backward: bool = False) -> None:
    """Raises unless host memory and disk have room for the optimizer state of units that the host updates, and for
    their gradients. Units that the first step may move have their gradients there, and no state yet; if others are
    updated `in_backward`, gradients of those do not wait there."""
    needed = dict.fromkeys(Tier, 0)
    for index, unit in enumerate(engine.units):
        if unit.updated_on_host:
            gradient = unit.layout.shard_numel * unit.gradients.dtype.itemsize
            state = costs[updated_dtype(unit)].vectors(unit.master.owned.numel)
            waits = engine.watch.may_move(index)
            needed[unit.placement.optimizer_tier] += 0 if waits else state
            needed[Tier.HOST] += 0 if in_backward and not waits else gradient
    path = Offload.of(engine.resolved.settings.offload).path
    what = "the optimizer state"
    engine.tiers.reserve(what, host_bytes=needed[Tier.HOST], disk_bytes=needed[Tier.DISK], path=path)


def agree_on_kernel(engine: Engine, by_unit: Sequence[UnitOptimizer], cls: type[torch.optim.Optimizer]) -> None:
    """Uses the CPU's update kernel on all ranks or on none, so that replicated parameters stay equal. Collective."""
    on_cpu = any(unit.pool.device.type == "cpu" and unit.dtypes.narrow for unit in engine.units)
    wanted = on_cpu and cls in KNOWN
    # Pipeline stages may differ in what they need, so there all ranks take part.
    if not wanted and engine.comms.pp.size == 1:
        return
    mine = bytes([not wanted or available()])
    rows = engine.comms.world.all_gather_bytes(mine, Label("agree", "the CPU's update kernel"))
    engine.comm.meter.cut()
    if bytes(1) not in rows:
        return
    first = engine.comms.world.world_rank(rows.index(bytes(1)))
    LOG.info("rank %d has no update kernel for its CPU, so torch updates on every rank", first)
    for one in by_unit:
        one.native = False
