"""Transfers between device, host and disk in a step, and how long a step waits for them. Numbers only.

Host updates overlap with compute: started in backward, with the rest of it; after clipping, with the next forward,
where parameters are hidden until they are used (stage 3). A CPU update of fp32 moments is bound by memory bandwidth:
each parameter costs 26 bytes with a split master, 28 with an fp32 one (Adam). That of smaller moments is bound by
compute. Loading, updating and storing overlap too, so the slowest of CPU, PCIe and disk counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from onefold.cost.hardware import Hardware
from onefold.cost.sizes import UnitSize
from onefold.cost.states import StateCost, optimizer_bytes, updated_numel
from onefold.settings.placement import Placement, Tier
from onefold.settings.widths import Widths


class TransferBytes(NamedTuple):
    """Bytes that one rank moves in one step."""

    device: int = 0  # read and written by updates there
    host: int = 0
    down: int = 0  # over PCIe, for updates
    up: int = 0
    disk: int = 0  # read and written, for updates
    fetched: int = 0  # parameters copied to the device for one forward or backward
    in_file: int = 0  # of them, from disk


def update_bytes(widths: Widths, cost: StateCost) -> int:
    """Bytes that an update reads and writes for one element: it reads and writes state and master, reads the gradient
    and writes the parameter; it reads the old parameter too, unless the master is a copy.

    >>> [update_bytes(Widths(2, 2, 2, master), StateCost(8)) for master in (2, 4)]
    [26, 28]
    """
    accesses = 1 if widths.master == 4 else 2  # to the parameter
    return 2 * (widths.master + cost.per_element) + widths.grad + accesses * widths.compute


def update_rate(hardware: Hardware, tier: Tier, widths: Widths, cost: StateCost) -> float:
    """Bytes per second that updates on the device or the host read and write."""
    found = hardware.rates and hardware.rates.update_rate(tier.value, update_bytes(widths, cost), cost.form)
    return found or (hardware.memory_rate if tier is Tier.DEVICE else hardware.host_rate)


def transfers_of(units: Sequence[UnitSize], placements: Sequence[Placement], cost: StateCost) -> TransferBytes:
    """Bytes of all units."""
    # Units come by the hundred and are of few sizes. A placement and widths are many units' own objects.
    known: dict[Any, TransferBytes] = {}
    counts: dict[Any, int] = {}
    for unit, placement in zip(units, placements, strict=True):
        key = (*unit[1:7], id(unit.widths), unit.trained, unit.whole_numel, id(placement))
        if key not in known:
            known[key] = _transfers_of(unit, placement, cost)
        counts[key] = counts.get(key, 0) + 1
    return TransferBytes(
        *(sum(count * known[key][at] for key, count in counts.items()) for at in range(len(TransferBytes._fields)))
    )


def _transfers_of(unit: UnitSize, placement: Placement, cost: StateCost) -> TransferBytes:
    numel, widths = updated_numel(unit, placement), unit.widths
    touched, shard_bytes = numel * update_bytes(widths, cost), unit.shard * widths.compute
    on_device = placement.parameters_tier is Tier.DEVICE
    in_file = shard_bytes if placement.parameters_tier is Tier.DISK else 0
    one = TransferBytes(device=touched, fetched=0 if on_device else shard_bytes, in_file=in_file)
    if not placement.updated_on_host:
        return one
    old = numel * widths.compute if on_device and widths.master != 4 else 0
    return one._replace(
        device=0,
        host=touched,
        down=numel * widths.grad + old,
        up=numel * widths.compute if on_device else 0,
        disk=2 * optimizer_bytes(unit, placement, cost, Tier.DISK) + (2 * in_file if numel else 0),
    )


def host_update_s(transfers: TransferBytes, hardware: Hardware, rate: float, ranks: int) -> float:
    """Seconds of one step's host updates, which read and write at this `rate`, hidden or not; `ranks` share the host
    and its disk."""
    pcie = max(transfers.down, transfers.up) / hardware.pcie_rate
    disk = transfers.disk * ranks / hardware.disk_rate if transfers.disk else 0.0
    return max(transfers.host * ranks / rate, pcie, disk)


def overlapped_s(forward_s: float, backward_s: float, *, late: bool, in_backward: bool) -> float:
    """Seconds of compute that host updates overlap with: backward if they start `in_backward`, and the next forward if
    they may be `late`."""
    return (backward_s if in_backward else 0.0) + (forward_s if late else 0.0)


def exposed_update_s(host_s: float, overlapped: float, units: int) -> float:
    """Seconds that a step waits for host updates: what compute does not hide, and the last of `units` updates (0: none
    is waited for)."""
    tail = host_s / units if units and overlapped else 0.0
    return max(0.0, host_s - overlapped) + tail


def transfer_s(transfers: TransferBytes, hardware: Hardware, ranks: int, *, passes: int, offloaded: int) -> float:
    """Seconds of transfers over PCIe or disk in a step of so many forwards and backwards; `offloaded` bytes of
    activations go to the host and back."""
    up = transfers.up + passes * transfers.fetched + offloaded
    pcie = max(transfers.down + offloaded, up) / hardware.pcie_rate
    disk = (transfers.disk + passes * transfers.in_file) * ranks
    return max(pcie, disk / hardware.disk_rate if disk else 0.0)
