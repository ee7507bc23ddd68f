"""What Offload(optimizer="auto") brings to the device after the first step, beside optimizer state: parameters that
began in host memory or on disk, and activations of blocks that began to be computed again. In this order, as they fit.

All ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from onefold.cost.filling import Room, Taken, UnitOnDevice, with_blocks
from onefold.cost.parameters import parameter_need
from onefold.cost.search import most
from onefold.cost.splits import filled
from onefold.cost.text import format_bytes
from onefold.runtime.automatic import parameters_are_automatic, parameters_told, prefetch_units
from onefold.runtime.block_choice import BlockChoice
from onefold.runtime.engine import Engine
from onefold.runtime.moving import move_parameters
from onefold.settings.placement import Scope, Tier

TRIED = 4  # numbers of blocks that are compared, beside none


def raise_parameters(
    engine: Engine,
    parts: Sequence[Taken],
    units: Sequence[UnitOnDevice],
    most_bytes: int,
    common: Callable[[Collection[int]], frozenset[int]],
) -> list[Taken]:
    """Brings the parameters of as many units to the device as fit in `most_bytes` beside what a step took, those of the
    first units of forward. Returns the parts of the step with these bytes added. `common` gives the units that every
    rank has chosen. Collective."""
    if not _away(engine):
        return list(parts)
    took = Room(parts, units).needed_bytes(())
    added = _raise(engine, lambda more: took + more <= most_bytes, common, lambda more: format_bytes(took + more))
    return [part._replace(nbytes=part.nbytes + added) for part in parts]


def raise_parameters_by_formula(
    engine: Engine, most_bytes: int, common: Callable[[Collection[int]], frozenset[int]]
) -> None:
    """Brings parameters to the device before a step has shown what it takes: by formula parameters, unsharded units and
    buffers of reductions may take `most_bytes`. Collective."""
    if not _away(engine):
        return
    resolved = engine.resolved
    sizes = [spec.size(0, resolved.precision) for spec in resolved.units]
    took = parameter_need(
        sizes, [spec.placement for spec in resolved.units], engine.comm.strategy, cuda=engine.device.type == "cuda",
        prefetch=prefetch_units(resolved.settings),
    ).total  # fmt: skip
    _raise(engine, lambda more: took + more <= most_bytes, common, lambda more: f"at least {format_bytes(took + more)}")


def raise_parameters_of(engine: Engine, names: Collection[str]) -> None:
    """Brings the parameters of these units to the device, which is to update them."""
    away = {spec.layout.name for spec in engine.resolved.units if spec.placement.parameters_tier is not Tier.DEVICE}
    if names := away.intersection(names):
        tiers = [
            Tier.DEVICE if spec.layout.name in names else spec.placement.parameters_tier
            for spec in engine.resolved.units
            if spec.flat
        ]
        move_parameters(
            engine, names, Tier.DEVICE, f"{parameters_told(tiers)}: the host cannot hold all state that is loaded"
        )


def _away(engine: Engine) -> bool:
    """Whether some parameters are off the device, and "auto" may bring them there."""
    resolved = engine.resolved
    away = any(spec.flat and spec.placement.parameters_tier is not Tier.DEVICE for spec in resolved.units)
    return away and parameters_are_automatic(resolved.settings, engine.device, engine.comms)


def _raise(
    engine: Engine,
    fits: Callable[[int], bool],
    common: Callable[[Collection[int]], frozenset[int]],
    takes: Callable[[int], str],
) -> int:
    """Brings the parameters of units to the device, from the first of forward on, while the bytes added pass `fits`.
    Returns the bytes added. `takes` puts into words what a step takes with so many more."""
    flat = [spec for spec in engine.resolved.units if spec.flat]
    nbytes = [spec.layout.shard_numel * spec.dtype.itemsize for spec in flat]
    away = [at for at, spec in enumerate(flat) if spec.placement.parameters_tier is not Tier.DEVICE]
    chosen = common(filled(away, lambda more: fits(sum(nbytes[at] for at in more)), nbytes.__getitem__))
    added = sum(nbytes[at] for at in chosen)
    tiers = [Tier.DEVICE if at in chosen else spec.placement.parameters_tier for at, spec in enumerate(flat)]
    why = f"{parameters_told(tiers)}: a step takes {takes(added)} with them"
    move_parameters(engine, [flat[at].layout.name for at in chosen], Tier.DEVICE, why)
    return added


class Lowered(NamedTuple):
    """Parameters that were moved from the device to host memory."""

    nbytes: int = 0
    told: str = ""


def lower_parameters(engine: Engine, excess_bytes: int, what: str) -> Lowered:
    """Moves the parameters of the last units of forward from the device to host memory until so many bytes are free
    there, or none that are sharded are left. The same on all ranks."""
    resolved = engine.resolved
    if not parameters_are_automatic(resolved.settings, engine.device, engine.comms):
        return Lowered()
    moved, left = list[str](), excess_bytes
    for spec in reversed([spec for spec in resolved.units if spec.flat]):
        there = spec.placement.parameters is Scope.SHARDED and spec.placement.parameters_tier is Tier.DEVICE
        if there and left > 0:
            moved.append(spec.layout.name)
            left -= spec.layout.shard_numel * spec.dtype.itemsize
    if not moved:
        return Lowered()
    tiers = [
        Tier.HOST if spec.layout.name in moved else spec.placement.parameters_tier
        for spec in resolved.units
        if spec.flat
    ]
    move_parameters(engine, moved, Tier.HOST, f"{parameters_told(tiers)}: {what}")
    return Lowered(excess_bytes - left, f"parameters of {len(moved)} units were moved from the device to host memory")


def blocks_of(engine: Engine, choice: BlockChoice) -> list[frozenset[int]]:
    """The trained units, by number, of each block that may keep its activations."""
    trained = [spec for spec in engine.resolved.units if spec.trained]
    return [frozenset(at for at, spec in enumerate(trained) if name in spec.blocks) for name in choice.names]


def blocks_to_keep(
    blocks: Sequence[frozenset[int]],
    more_bytes: int,
    parts: Sequence[Taken],
    fits: Callable[[list[Taken]], bool],
    seconds: Callable[[list[Taken], int], float],
) -> int:
    """How many of the last blocks keep their activations: of a few numbers up to the largest that fits, the one with
    the fewest seconds."""

    def with_last(count: int) -> list[Taken]:
        return with_blocks(parts, blocks[len(blocks) - count :], more_bytes)

    largest = most(lambda count: fits(with_last(count)), len(blocks))
    tried = sorted({largest * part // TRIED for part in range(TRIED + 1)}, reverse=True)
    return min(tried, key=lambda count: seconds(with_last(count), count))
