"""Which units keep their parameters on the device when not all fit: Offload(optimizer="auto").

By formula, before anything is on the device: what a rank keeps of them, the units that are unsharded at once, the
buffers of reductions, a gradient that autograd has just made and one on its way to the host. Activations are not known
then, so `device_bytes` must be less than the device has. The first units of forward stay: nothing can prefetch them,
and they are the ones that keep their optimizer state on the device. Of the others as many as fit are in host memory,
and the last ones on disk. Where a step decides, it begins with as few on the device as the host allows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from onefold.comm.strategy import Strategy
from onefold.cost.arrivals import arrivals
from onefold.cost.automatic import ADAM, host_need
from onefold.cost.peak import segments
from onefold.cost.sizes import UnitSize
from onefold.cost.splits import filled, tiers_of
from onefold.cost.states import StateCost, parameter_bytes
from onefold.settings.placement import Placement, Scope, Tier


class ParameterNeed(NamedTuple):
    """Bytes on the device of parameters, and of what a step needs beside them whatever its activations are."""

    kept: int  # parameters while nothing is unsharded
    unsharded: int  # the units that are unsharded at once
    buffers: int  # of reductions, and the largest gradient twice: as autograd makes it, and on its way to the host

    @property
    def total(self) -> int:
        return self.kept + self.unsharded + self.buffers


def parameter_need(
    units: Sequence[UnitSize], placements: Sequence[Placement], strategy: Strategy, *, cuda: bool, prefetch: int = 1
) -> ParameterNeed:
    """What a step takes with these placements, without optimizer state, activations and sums of micro-batches."""
    arriving = arrivals(units, placements, strategy, cuda=cuda, one_pass=False)
    made = max((unit.largest_numel * unit.widths.compute for unit in units if unit.trained), default=0)
    copied = max((unit.numel * unit.widths.grad for unit in units if unit.trained), default=0)
    return ParameterNeed(
        sum(map(parameter_bytes, units, placements)),
        max((part.gathered for part in segments(units, placements, prefetch)), default=0),
        max((unit.done.buffers for unit in arriving), default=0) + made + copied,
    )


def least_need(units: Sequence[UnitSize], placements: Sequence[Placement]) -> ParameterNeed:
    """The least that any step needs on the device: the parameters kept there, and the largest unsharded unit."""
    sharded = [unit for unit, row in zip(units, placements, strict=True) if row.parameters is Scope.SHARDED]
    largest = max((unit.unsharded_bytes for unit in sharded), default=0)
    return ParameterNeed(sum(map(parameter_bytes, units, placements)), largest, 0)


def choose_parameters(
    units: Sequence[UnitSize],
    rows: Mapping[Tier, Sequence[Placement]],
    strategy: Strategy,
    *,
    cuda: bool,
    prefetch: int = 1,
    device_bytes: int,
    host_bytes: int | None = None,
) -> list[Tier]:
    """The tier of each unit's parameters. `rows` has the placements of all units with parameters on each tier; a unit
    that is always replicated has the same in all. `host_bytes` bounds host memory; None: there is no disk."""
    every = range(len(units))
    fixed = {at for at in every if rows[Tier.HOST][at].parameters_tier is Tier.DEVICE}
    buffers = parameter_need(units, rows[Tier.DEVICE], strategy, cuda=cuda, prefetch=prefetch).buffers

    def placed(tiers: Sequence[Tier]) -> list[Placement]:
        return [rows[tier][at] for at, tier in enumerate(tiers)]

    def fits_device(on_device: Collection[int]) -> bool:
        placements = placed(tiers_of(len(units), fixed.union(on_device), every))
        kept = sum(map(parameter_bytes, units, placements))
        gathered = max((part.gathered for part in segments(units, placements, prefetch)), default=0)
        return kept + gathered + buffers <= device_bytes

    def kind(at: int) -> tuple[int, int]:
        return units[at].shard, units[at].numel

    movable = [at for at in every if at not in fixed]
    on_device = fixed.union(movable if fits_device(movable) else filled(movable, fits_device, kind))
    rest = [at for at in every if at not in on_device]
    on_disk = [Tier.DISK for unit in units if unit.trained]  # which leaves the most host memory to parameters

    def fits_host(on_host: Collection[int]) -> bool:
        placements = placed(tiers_of(len(units), on_device, on_host))
        return host_bytes is None or host_need(units, placements, on_disk, cost=ADAM) <= host_bytes

    on_host = rest if fits_host(rest) else filled(rest, fits_host, kind)
    return tiers_of(len(units), on_device, on_host)


def parameters_in_first_step(
    units: Sequence[UnitSize], rows: Mapping[Tier, Sequence[Placement]], chosen: Sequence[Tier], host_bytes: int
) -> list[Tier]:
    """The tiers of parameters in a first step, which shows how many fit on the device. Units that `chosen` has on the
    device begin on the host, as far as it has room beside the masters and gradients of all units."""
    states = [Tier.HOST for unit in units if unit.trained]
    movable = [at for at, row in enumerate(rows[Tier.HOST]) if row.parameters_tier is Tier.HOST]
    front = [at for at in movable if chosen[at] is Tier.DEVICE]

    def moved(staying: int) -> list[Tier]:
        leaves = set(front[staying:])
        return [Tier.HOST if at in leaves else tier for at, tier in enumerate(chosen)]

    def fits_host(tiers: Sequence[Tier]) -> bool:
        placements = [rows[tier][at] for at, tier in enumerate(tiers)]
        return host_need(units, placements, states, cost=StateCost(0)) <= host_bytes

    return next((tiers for staying in range(len(front)) if fits_host(tiers := moved(staying))), list(chosen))
