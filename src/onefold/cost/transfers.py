"""What moves between device, host and disk in a step, and how long a step waits for it. Numbers only.

Updates on the host run beside the device: inside backward, beside the rest of it; after clipping, beside the next
forward, where values are seen in passes only (stage 3). A CPU update is bound by memory: each parameter costs 26 bytes
there with a split master, 28 with an fp32 one (Adam). Reading ahead, updating and sending back run side by side, so the
slowest of processors, PCIe and disk counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onefold.cost.hardware import Hardware
from onefold.cost.sizes import UnitSize
from onefold.cost.states import StateCost, optimizer_bytes, updated_numel
from onefold.settings.placement import Placement, Tier
from onefold.settings.widths import Widths


class Moves(NamedTuple):
    """Bytes of one step and one rank."""

    device: int = 0  # read and written by updates there
    host: int = 0
    down: int = 0  # over PCIe, for updates
    up: int = 0
    disk: int = 0  # read and written, for updates
    fetched: int = 0  # values that come to the device for one pass
    in_file: int = 0  # of them, from disk


def update_bytes(widths: Widths, cost: StateCost) -> int:
    """Read and written for one element: state and master both ways, the gradient in, the new value out; the old value
    in, too, unless the master is a copy.

    >>> [update_bytes(Widths(2, 2, 2, master), StateCost(8)) for master in (2, 4)]
    [26, 28]
    """
    values = 1 if widths.master == 4 else 2
    return 2 * (widths.master + cost.per_element) + widths.grad + values * widths.compute


def moves_of(units: Sequence[UnitSize], placements: Sequence[Placement], cost: StateCost) -> Moves:
    total = Moves()
    for unit, placement in zip(units, placements, strict=True):
        numel, widths = updated_numel(unit, placement), unit.widths
        touched, values = numel * update_bytes(widths, cost), unit.shard * widths.compute
        here = placement.parameters_tier is Tier.DEVICE
        filed = values if placement.parameters_tier is Tier.DISK else 0
        one = Moves(device=touched, fetched=0 if here else values, in_file=filed)
        if placement.updated_on_host:
            old = numel * widths.compute if here and widths.master != 4 else 0
            one = one._replace(
                device=0,
                host=touched,
                down=numel * widths.grad + old,
                up=numel * widths.compute if here else 0,
                disk=2 * optimizer_bytes(unit, placement, cost, Tier.DISK) + (2 * filed if numel else 0),
            )
        total = Moves(*(a + b for a, b in zip(total, one, strict=True)))
    return total


def host_side_s(moves: Moves, hardware: Hardware, ranks: int) -> float:
    """One step's updates on the host, hidden or not; `ranks` share it and its disk."""
    pcie = max(moves.down, moves.up) / hardware.pcie_rate
    disk = moves.disk * ranks / hardware.disk_rate if moves.disk else 0.0
    return max(moves.host * ranks / hardware.host_rate, pcie, disk)


def time_beside(forward_s: float, backward_s: float, *, late: bool, inside: bool) -> float:
    """Compute that runs beside updates on the host. `late`: an update may run beside the next forward; `inside`: it
    starts inside backward."""
    return (backward_s if inside else 0.0) + (forward_s if late else 0.0)


def exposed_update_s(host_s: float, beside_s: float, units: int) -> float:
    """What a step waits for: what compute does not cover, and the tail: the last of `units` (0: none is waited for)."""
    tail = host_s / units if units and beside_s else 0.0
    return max(0.0, host_s - beside_s) + tail


def moving_s(moves: Moves, hardware: Hardware, ranks: int, *, passes: int, offloaded: int) -> float:
    """All that PCIe or disk carry in a step of so many passes; `offloaded` activations go down and come up."""
    up = moves.up + passes * moves.fetched + offloaded
    pcie = max(moves.down + offloaded, up) / hardware.pcie_rate
    disk = (moves.disk + passes * moves.in_file) * ranks
    return max(pcie, disk / hardware.disk_rate if disk else 0.0)
