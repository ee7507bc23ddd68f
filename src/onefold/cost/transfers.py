"""Transfers between device, host and disk in a step, and how long a step waits for them. Numbers only.

Host updates overlap with compute: started in backward, with the rest of it; after clipping, with the next forward,
where parameters are hidden until they are used (stage 3). A CPU update is bound by memory bandwidth: each parameter
costs 26 bytes with a split master, 28 with an fp32 one (Adam). Loading, updating and storing overlap too, so the
slowest of CPU, PCIe and disk counts.
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
    """Bytes that one rank moves in one step."""

    device: int = 0  # read and written by updates there
    host: int = 0
    down: int = 0  # over PCIe, for updates
    up: int = 0
    disk: int = 0  # read and written, for updates
    fetched: int = 0  # parameters copied to the device for one forward or backward
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
    """Seconds of one step's host updates, hidden or not; `ranks` share the host and its disk."""
    pcie = max(moves.down, moves.up) / hardware.pcie_rate
    disk = moves.disk * ranks / hardware.disk_rate if moves.disk else 0.0
    return max(moves.host * ranks / hardware.host_rate, pcie, disk)


def time_beside(forward_s: float, backward_s: float, *, late: bool, inside: bool) -> float:
    """Seconds of compute that host updates overlap with: backward if they start `inside` it, and the next forward if
    they may be `late`."""
    return (backward_s if inside else 0.0) + (forward_s if late else 0.0)


def exposed_update_s(host_s: float, beside_s: float, units: int) -> float:
    """Seconds that a step waits for host updates: what compute does not hide, and the last of `units` updates (0: none
    is waited for)."""
    tail = host_s / units if units and beside_s else 0.0
    return max(0.0, host_s - beside_s) + tail


def moving_s(moves: Moves, hardware: Hardware, ranks: int, *, passes: int, offloaded: int) -> float:
    """Seconds of transfers over PCIe or disk in a step of so many forwards and backwards; `offloaded` bytes of
    activations go to the host and back."""
    up = moves.up + passes * moves.fetched + offloaded
    pcie = max(moves.down + offloaded, up) / hardware.pcie_rate
    disk = (moves.disk + passes * moves.in_file) * ranks
    return max(pcie, disk / hardware.disk_rate if disk else 0.0)
