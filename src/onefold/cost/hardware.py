"""Rates and sizes of devices, nodes and links: the vendors' figures, one way and per device unless said otherwise.

`efficiency` is the share of the peak flop rate that large matrix products of a transformer reach in training; with it
a plan's seconds are realistic, not optimal. Where `rates` are known, as `onefold measure` recorded them, these count.
Give your own with `--hardware FILE` or `--hardware measure`, or by replacing a field.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onefold.cost.compute import typical_rate
from onefold.cost.rates import Rates, read_rates, shipped_rates
from onefold.errors import ConfigError

GB = 10**9
USABLE = 0.95  # of a GPU: its context and the buffers of the communication library take the rest


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device, and the nodes and links it comes with."""

    name: str
    device: str = "cuda"
    memory_bytes: int
    flops: float
    """Per second, dense, in 16 bits (fp32 on a CPU)."""
    flops_fp32: float | None = None
    """The peak rate of fp32 without TF32, which is torch's default; None where `flops` is the rate of fp32, too."""
    efficiency: float
    memory_rate: float
    """Bytes per second between a device and its own memory."""
    node_ranks: int
    node_link: float
    """Bytes per second from one device to others of its node."""
    nics: int
    nic_rate: float
    """Bytes per second of one network interface of a node."""
    latency_s: float = 10e-6
    core_rate: float = 0.0
    """Of CPU ranks: bytes that one sends, and receives as many, per second of CPU time; 0: `node_link`."""
    core_latency_s: float = 0.0
    """CPU time of one message of CPU ranks beside that of its bytes."""
    beside_compute: tuple[float, float] = (1.0, 1.0)
    """How many times as long as an all-gather alone an all-gather and a reduce-scatter take while ranks compute."""
    both_at_once: float | None = None
    """How many times as long both take at the same time as the longer one alone; None: they follow each other."""
    slowed_by_messages: float = 1.0
    """How many times as long compute takes while messages are in flight."""
    host_bytes: int
    """Of a node."""
    pcie_rate: float
    host_rate: float = 100 * GB
    """Bytes per second between a node's processors and their memory, which is what a CPU optimizer is bound by."""
    disk_bytes: int = 0
    disk_rate: float = 0.0
    """Of a node."""
    rates: Rates | None = field(default=None, repr=False, compare=False)
    """Measured seconds by shape and dtype."""

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that a run may take."""
        return int(USABLE * self.memory_bytes) if self.device == "cuda" else self.memory_bytes

    def peak_flops(self, width: int) -> float:
        """The peak flop rate of a dtype with so many bytes.

        >>> TABLE["a100-80"].peak_flops(2) / TABLE["a100-80"].peak_flops(4)
        16.0
        """
        return self.flops_fp32 or self.flops if width == 4 else self.flops

    def link(self, ranks: int, per_node: int) -> float:
        """Bytes per second each rank sends in a ring over `ranks`, of which a node holds `per_node`.

        A ring leaves a node once, however many of the node's ranks are in it; rings of neighbours share the interfaces.
        """
        if ranks <= per_node:
            return self.node_link
        share = self.nics * self.nic_rate * min(per_node, self.node_ranks) / self.node_ranks
        return min(self.node_link, share)

    def to_dict(self) -> dict[str, Any]:
        """The figures as a dict for JSON; of measured seconds, what they were measured with."""
        return {**dataclasses.asdict(self), "rates": self.rates and self.rates.lines()[0]}


TABLE: dict[str, Hardware] = {
    "v100-32": Hardware(  # DGX-2
        name="V100 32 GB, DGX-2", memory_bytes=32 * GB, flops=125e12, flops_fp32=15.7e12, efficiency=0.33,
        memory_rate=900e9, node_ranks=16, node_link=150e9, nics=8, nic_rate=12.5e9, host_bytes=1500 * GB,
        pcie_rate=12e9, host_rate=200e9, disk_bytes=30_000 * GB, disk_rate=20e9,
    ),
    "a100-80": Hardware(  # DGX A100
        name="A100 80 GB, DGX", memory_bytes=80 * GB, flops=312e12, flops_fp32=19.5e12, efficiency=0.5,
        memory_rate=2000e9, node_ranks=8, node_link=300e9, nics=8, nic_rate=25e9, host_bytes=2000 * GB, pcie_rate=25e9,
        host_rate=350e9, disk_bytes=28_000 * GB, disk_rate=25e9,
    ),
    "h100-80": Hardware(  # DGX H100
        name="H100 80 GB, DGX", memory_bytes=80 * GB, flops=989e12, flops_fp32=67e12, efficiency=0.45,
        memory_rate=3350e9, node_ranks=8, node_link=450e9, nics=8, nic_rate=50e9, host_bytes=2000 * GB, pcie_rate=50e9,
        host_rate=500e9, disk_bytes=28_000 * GB, disk_rate=40e9,
    ),
    "h200": Hardware(
        name="H200 141 GB, HGX", memory_bytes=141 * GB, flops=989e12, flops_fp32=67e12, efficiency=0.45,
        memory_rate=4800e9, node_ranks=8, node_link=450e9, nics=8, nic_rate=50e9, host_bytes=2000 * GB, pcie_rate=50e9,
        host_rate=500e9, disk_bytes=28_000 * GB, disk_rate=40e9,
    ),
    "ethernet": Hardware(
        name="workstations, one 24 GB GPU each, 1 Gbit/s Ethernet", memory_bytes=24 * GB, flops=71e12,
        flops_fp32=35.6e12, efficiency=0.4,
        memory_rate=936e9, node_ranks=1, node_link=12e9, nics=1, nic_rate=0.125e9, latency_s=100e-6,
        host_bytes=64 * GB, pcie_rate=12e9, host_rate=40e9, disk_bytes=1000 * GB, disk_rate=3e9,
    ),
    "laptop": Hardware(
        name="laptop, CPU only", device="cpu", memory_bytes=16 * GB, flops=0.4e12, efficiency=0.6, memory_rate=60e9,
        node_ranks=2, node_link=4e9, nics=1, nic_rate=0.125e9, latency_s=50e-6,
        host_bytes=16 * GB, pcie_rate=60e9, host_rate=60e9, disk_bytes=500 * GB, disk_rate=2e9,
    ),
}  # fmt: skip


def hardware(name: str, memory_bytes: int | None = None) -> Hardware:
    """A row of the table, or the device of a file that `onefold measure` wrote; with other memory, if wanted.

    >>> hardware("v100-32").node_ranks
    16
    """
    found = TABLE.get(name.lower())
    if found is not None:
        found = dataclasses.replace(found, rates=shipped_rates(name.lower()))
    elif name.endswith(".json") or Path(name).is_file():
        found = recorded(read_rates(Path(name)))
    else:
        raise ConfigError(
            f"hardware {name!r} is unknown; use one of {', '.join(TABLE)}, measure, or a file of `onefold measure`"
        )
    if memory_bytes is not None and memory_bytes <= 0:
        raise ConfigError(f"{memory_bytes} bytes of device memory is not a positive number")
    return found if memory_bytes is None else dataclasses.replace(found, memory_bytes=memory_bytes)


def known_row(device: str) -> str | None:
    """The name of the table's row for a device that torch calls so."""
    return next((key for key, row in TABLE.items() if row.device == "cuda" and row.name.split()[0] in device), None)


def recorded(rates: Rates) -> Hardware:
    """The device and the machine of a record. What was not measured is as in the table's row of this device, or of a
    similar one."""
    record, cuda = rates.record, rates.record["kind"] == "cuda"
    known = known_row(rates.device) if cuda else None
    row = TABLE[known or ("a100-80" if cuda else "laptop")]
    flops = row.flops if known else rates.best_flops("bf16" if cuda else "fp32") or row.flops
    on_host = rates.update_rate("host", 26)
    link, cores, disk = rates.link_rate(), rates.cores, record.get("disk")
    return dataclasses.replace(
        row,
        name=rates.device,
        memory_bytes=record["memory_bytes"],
        flops=flops,
        flops_fp32=row.flops_fp32 if known else rates.best_flops("fp32") or None,
        efficiency=typical_rate(rates, 2 if cuda else 4) / flops if rates.computes else row.efficiency,
        memory_rate=rates.update_rate("device", 26 if cuda else 28) or row.memory_rate,
        node_ranks=record["links"]["ranks"] if link else row.node_ranks if known else 1,
        node_link=link.rate if link else row.node_link,
        latency_s=link.latency_s if link else row.latency_s,
        core_rate=cores.rate if cores else 0.0,
        core_latency_s=cores.latency_s if cores else 0.0,
        host_bytes=record["machine"]["memory_bytes"],
        pcie_rate=rates.copy_rate or row.pcie_rate,
        host_rate=on_host or row.host_rate,
        disk_rate=min(disk.values()) if disk else row.disk_rate,
        rates=rates if rates.computes else None,
    )
