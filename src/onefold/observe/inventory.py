"""The inventory of one rank: the storages of each state on each tier, and the bytes that the layout predicts for them.

Memory is counted by storage, files by their length. Gradients of units that the host updates pass through buffers of
the device, which count as communication; gradients that wait on the host are in buffers of a pool and count by their
own length, and the rest of the pools counts as staging. For buffers the prediction is an upper bound. On a CPU, device
and host share memory; what would be offloaded from a device counts as the host's there too.
"""

from __future__ import annotations

from typing import NamedTuple

from onefold.cost.limits import BETWEEN_STEPS, COPYING, IN_FLIGHT, READ_AHEAD, WAITING, WORKERS, updating_bytes
from onefold.cost.sizes import Sizes, size_of_layout
from onefold.cost.states import StateCost, file_bytes, state_bytes
from onefold.model.storage import storage_bytes
from onefold.runtime.engine import Engine
from onefold.runtime.held_tensors import CHECKPOINTS_HOST, PAGEABLE, PINNED, host_tensors
from onefold.settings.placement import Scope, Tier

DISK = "disk"


class TierRow(NamedTuple):
    """One state on a tier other than the device."""

    state: str  # optimizer, parameters, gradients, staging, spare
    place: str  # pinned or pageable host memory, or disk
    measured: int  # bytes
    planned: int  # bytes; of staging buffers: at most


# -- host memory and disk ---------------------------------------------------------------------------------------------


def offloaded_rows(engine: Engine) -> tuple[TierRow, ...]:
    """A row for each state and place that is not the device, if there is anything. Waits for host updates."""
    engine.updates.wait()
    offloaded = sum(unit.gradients.offloaded.nbytes for unit in engine.units if unit.gradients.offloaded is not None)
    near = PINNED if engine.tiers.host.cuda else PAGEABLE
    measured = {row: storage_bytes(tensors) for row, tensors in host_tensors(engine).items()}
    measured["staging", near] -= offloaded
    measured["gradients", near] = offloaded
    images = {"optimizer": [unit.image for unit in engine.units]}
    images["parameters"] = [unit.flat_params.image for unit in engine.all_units]
    for state, files in images.items():
        measured[state, DISK] = sum(image.nbytes for image in files if image is not None)
    planned = _planned_offloaded(engine, near)
    return tuple(
        TierRow(*row, measured.get(row, 0), plan) for row, plan in planned.items() if measured.get(row) or plan
    )


def _planned_offloaded(engine: Engine, near: str) -> dict[tuple[str, str], int]:
    units = sizes_of(engine).units
    placements = [unit.placement for unit in engine.all_units]
    states = {tier: state_bytes(units, placements, StateCost(0), tier) for tier in (Tier.HOST, Tier.DISK)}
    waiting = [u.layout.shard_numel * u.gradients.dtype.itemsize for u in engine.units if u.gradients.offloaded]
    found = {
        ("optimizer", PAGEABLE): planned_optimizer(engine, Tier.HOST),
        ("optimizer", DISK): planned_optimizer(engine, Tier.DISK),
        ("parameters", near): states[Tier.HOST].parameters,
        ("parameters", DISK): states[Tier.DISK].parameters,
        ("gradients", near): sum(waiting),
    }
    copied, used = _staging_limits(engine)
    for index in engine.updates.spare:
        unit, (vectors, _) = engine.units[index], engine.optimizers.planned_state(index)
        numel, widths = unit.master.owned.numel, unit.dtypes.widths
        found["spare", near] = found.get(("spare", near), 0) + numel * widths.compute
        found["spare", PAGEABLE] = found.get(("spare", PAGEABLE), 0) + numel * widths.master + vectors
    found["staging", near] = copied - sum(waiting)
    found["staging", PAGEABLE] = found.get(("staging", PAGEABLE), 0) + used
    return found


def planned_optimizer(engine: Engine, tier: Tier) -> int:
    """Bytes of master and optimizer state on a tier, as predicted; step counts are never in a file."""
    total = 0
    for index, unit in enumerate(engine.units):
        vectors, counts = engine.optimizers.planned_state(index)
        master = unit.master.owned.numel * unit.dtypes.widths.master if unit.has_training_state else 0
        vectors += unit.average_bytes
        where = unit.placement.optimizer_tier
        if unit.parked:
            total += {Tier.HOST: master + vectors, Tier.DEVICE: counts}.get(tier, 0)
        elif where is Tier.DISK:
            total += {Tier.DISK: file_bytes(master, vectors), Tier.HOST: counts}.get(tier, 0)
        elif where is tier:
            total += master + vectors + counts
    return total


def _staging_limits(engine: Engine) -> tuple[int, int]:
    """The most bytes of buffers for transfers, and of scratch buffers for updates and files."""
    units = [unit for unit in engine.units if unit.updated_on_host]
    if not units:
        return 0, 0
    shards = [unit.layout.shard_numel * unit.gradients.dtype.itemsize for unit in units]
    values = [unit.layout.shard_numel * unit.flat_params.dtype.itemsize for unit in engine.all_units]
    offloaded = sum(shards) if engine.updates.keeps_gradients else updating_bytes(shards)
    in_files = any(unit.flat_params.image is not None for unit in engine.all_units)
    moved = (WORKERS + BETWEEN_STEPS + (_gathered(engine) if in_files else 0)) * max(values)
    wide = [(1 + (u.dtypes.master == "split")) * 4 * u.master.owned.numel for u in units if u.dtypes.narrow]
    images = [unit.image.nbytes for unit in units if unit.image is not None]
    return offloaded + moved, WORKERS * max(wide, default=0) + (WORKERS + 1 + BETWEEN_STEPS) * max(images, default=0)


def _gathered(engine: Engine) -> int:
    """Units whose shards are loaded at once: in use, used before, prefetched, and read ahead from disk."""
    prefetch = engine.resolved.settings.prefetch
    return 2 + READ_AHEAD + (prefetch if isinstance(prefetch, int) else len(engine.unsharding.units))


# -- plans for the device ---------------------------------------------------------------------------------------------


def sizes_of(engine: Engine) -> Sizes:
    """The sizes of all units, for the planner's formulas, with the dtypes they have now."""
    rank, units = engine.comm.rank, []
    for unit in engine.all_units:
        widths = unit.dtypes.widths._replace(grad=unit.gradients.dtype.itemsize, flat=unit.gradients.flat)
        units.append(size_of_layout(unit.layout, rank, widths, trained=unit.trained))
    return Sizes(tuple(units), engine.comm.size, flags=len(engine.params))


def planned_on_device(engine: Engine) -> dict[str, int | None]:
    units = sizes_of(engine).units
    states = state_bytes(units, [unit.placement for unit in engine.all_units], StateCost(0))
    frozen = storage_bytes([param for _, param in engine.frozen])
    return {
        "parameters": states.parameters + frozen,
        "gradients": states.gradients
        if any(u.gradients.tensors() for u in engine.units if not u.updated_on_host)
        else 0,
        "optimizer": planned_optimizer(engine, Tier.DEVICE),
        "buffers": storage_bytes(engine.model.buffers()),
        "communication": _pool_limit_bytes(engine),  # at most
        **dict.fromkeys(("checkpoints", CHECKPOINTS_HOST), 0),
        **(engine.checkpoints.planned() if engine.checkpoints else {}),
        "activations": None,
    }


def _pool_limit_bytes(engine: Engine) -> int:
    """The most bytes of the pool: reductions in flight with their scratch, one whose gradients are added, a few that
    wait for another; for host updates, gradients that are being copied to the host; and where 16 bits compute, fp32
    vectors of what is summed or updated."""
    sizes = [unit.layout.numel * unit.gradients.local_itemsize for unit in engine.units]
    away = [unit.layout.numel * unit.gradients.dtype.itemsize for unit in engine.units if unit.updated_on_host]
    wide = max((4 * unit.master.owned.numel for unit in engine.units if unit.dtypes.narrow), default=0)
    reductions = 2 * IN_FLIGHT + 1 + WAITING if engine.everyone.size > 1 else 3
    wide_sums = engine.accumulating.wide_sums
    kept = sum(sizes) if wide_sums and (away or engine.resolved.placement.gradients is Scope.SHARDED) else 0
    needed = engine.everyone.size > 1 or wide_sums or wide or away or not engine.updates.keeps_gradients
    leaving = (COPYING + 1) * max(away, default=0) + engine.updates.most_lent_bytes
    return (reductions * max(sizes, default=0) if needed else 0) + leaving + 2 * wide + kept
