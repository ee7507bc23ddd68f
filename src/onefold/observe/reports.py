"""What a sharded model costs: bytes in memory by category, bytes on the wire by purpose, beside the formula's value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from onefold.comm.meter import Flow
from onefold.cost.states import parameter_bytes
from onefold.cost.traffic import step_traffic
from onefold.model.storage import storage_bytes
from onefold.observe.inventory import CHECKPOINTS_HOST as HOST
from onefold.observe.inventory import (
    DISK,
    PAGEABLE,
    PINNED,
    NotOnDevice,
    TierRow,
    elsewhere,
    on_device,
    planned_on_device,
    sizes_of,
)
from onefold.observe.tracker import CATEGORIES, Tracker
from onefold.runtime.engine import Engine, engine_of
from onefold.settings.placement import Scope, Tier


@dataclass(frozen=True)
class Bytes:
    """Found in memory or on the wire, and what the layout says it should be (None where it says nothing)."""

    measured: int
    planned: int | None


@dataclass(frozen=True)
class MemoryReport:
    """Bytes this rank holds now."""

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    buffers: Bytes
    communication: Bytes
    checkpoints: Bytes
    """Block inputs that wait for backward, on the device."""
    checkpoints_host: Bytes
    """The same in host memory: not in the total."""
    elsewhere: tuple[TierRow, ...] = ()
    """States and staging buffers in host memory or on disk: not in the total."""
    fragmented: int | None = None
    """CUDA: what the allocator has taken from the device and nobody uses."""

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer state: what ZeRO shards."""
        return self.parameters.measured + self.gradients.measured + self.optimizer.measured

    @property
    def total(self) -> int:
        """On the device."""
        return self.states + self.buffers.measured + self.communication.measured + self.checkpoints.measured

    @property
    def pinned(self) -> int:
        """Host memory that a GPU copies from and to."""
        return self._at(PINNED) + (self.checkpoints_host.measured if self.fragmented is not None else 0)

    @property
    def pageable(self) -> int:
        """Other host memory; on a CPU, all that would leave a device."""
        return self._at(PAGEABLE) + (self.checkpoints_host.measured if self.fragmented is None else 0)

    @property
    def host(self) -> int:
        return self.pinned + self.pageable

    @property
    def disk(self) -> int:
        return self._at(DISK)

    def _at(self, place: str) -> int:
        return sum(row.measured for row in self.elsewhere if row.place == place)

    def __str__(self) -> str:
        found = [(name, getattr(self, name)) for name in (*CATEGORIES[:-1], HOST)]
        shown = [(name, b) for name, b in found if name not in ("checkpoints", HOST) or b.measured or b.planned]
        rows = [(name, b.measured, b.planned) for name, b in shown if name != HOST] + [("total", self.total, None)]
        rows += [("checkpoints on the host", b.measured, b.planned) for name, b in shown if name == HOST]
        rows += [("fragmented", self.fragmented, None)] if self.fragmented is not None else []
        table = _table("memory", rows)
        if self.elsewhere:
            away: list[tuple[str, int, int | None]]
            away = [(f"{row.state}, {row.place}", row.measured, row.planned) for row in self.elsewhere]
            sums = [(f"total, {place}", self._at(place)) for place in (PINNED, PAGEABLE, DISK)]
            away += [(name, measured, None) for name, measured in sums if measured]
            table += "\n" + _table("not on the device", away)
        return table


@dataclass(frozen=True)
class TrafficReport:
    """Bytes this rank sent in the last step."""

    flows: dict[tuple[str, str], Flow]
    planned: dict[str, int]

    @property
    def by_purpose(self) -> dict[str, int]:
        sums: dict[str, int] = {}
        for (purpose, _), flow in self.flows.items():
            sums[purpose] = sums.get(purpose, 0) + flow.sent_bytes
        return sums

    @property
    def by_collective(self) -> dict[str, Flow]:
        sums: dict[str, Flow] = {}
        for (_, collective), flow in self.flows.items():
            seen = sums.get(collective, Flow())
            sums[collective] = Flow(seen.sent_bytes + flow.sent_bytes, seen.calls + flow.calls)
        return sums

    @property
    def total(self) -> int:
        return sum(flow.sent_bytes for flow in self.flows.values())

    def __str__(self) -> str:
        rows = [(purpose, sent, self.planned.get(purpose)) for purpose, sent in self.by_purpose.items()]
        return _table("traffic of the last step", [*rows, ("total", self.total, None)])


@dataclass(frozen=True)
class PlacementRow:
    """Where one unit's states are, and what this rank's device holds of its parameters when nothing is gathered."""

    unit: str
    elements: int
    optimizer: str
    gradients: str
    parameters: str
    parameter_bytes: int


@dataclass(frozen=True)
class PlacementReport:
    """The placement table of a model, as it was decided."""

    rows: tuple[PlacementRow, ...]
    why: str = ""  # stage="auto": what was chosen, and the reason

    def __str__(self) -> str:
        def line(unit: str, elements: str, optimizer: str, gradients: str, parameters: str, held: str) -> str:
            return f"{unit:<32}{elements:>14}  {optimizer:<13}{gradients:<13}{parameters:<13}{held:>14}"

        head = line("unit", "elements", "optimizer", "gradients", "parameters", "bytes here")
        body = [
            line(r.unit, f"{r.elements:,}", r.optimizer, r.gradients, r.parameters, f"{r.parameter_bytes:,}")
            for r in self.rows
        ]
        return "\n".join([self.why] * bool(self.why) + [head, *body])


def placement(model: nn.Module) -> PlacementReport:
    """Which states of which unit are whole and which are sharded.

    >>> import torch, onefold
    >>> onefold.init()
    >>> onefold.placement(onefold.shard(torch.nn.Linear(8, 8), stage=3)).rows[0].elements
    72
    """
    engine = engine_of(model)
    rows = []
    for unit, size in zip(engine.all_units, sizes_of(engine).units, strict=True):
        trained = unit in engine.units
        offloaded = Tier.HOST if unit.updated_on_host else Tier.DEVICE
        rows.append(
            PlacementRow(
                unit=unit.name,
                elements=unit.layout.used_numel,
                optimizer=_told(unit.placement.optimizer, unit.placement.optimizer_tier) if trained else "frozen",
                gradients=_told(unit.placement.gradients, offloaded) if trained else "frozen",
                parameters=_told(unit.placement.parameters, unit.placement.parameters_tier),
                parameter_bytes=parameter_bytes(size, unit.placement),
            )
        )
    return PlacementReport(tuple(rows), engine.why)


def _told(scope: Scope, tier: Tier) -> str:
    return scope.value if tier is Tier.DEVICE else f"{scope.value}, {tier.value}"


def memory(model: nn.Module) -> MemoryReport:
    """Bytes of training state on this rank, measured by storage, with the layout's figure beside.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(64, 64, bias=False), stage=2)
    >>> onefold.memory(model).parameters.measured
    16384
    """
    engine = engine_of(model)
    away = elsewhere(engine)
    measured = dict.fromkeys((*CATEGORIES, HOST), 0)
    kept = [tensor for place, tensor in engine.checkpoints.tensors() if place == HOST] if engine.checkpoints else []
    measured[HOST] = storage_bytes(kept)
    for category, tensor in on_device(engine).values():
        measured[category] += storage_bytes([tensor])
    plans = planned_on_device(engine)
    rows = {name: Bytes(measured[name], plans[name]) for name in (*CATEGORIES[:-1], HOST)}
    return MemoryReport(**rows, elsewhere=away, fragmented=_fragmented(engine.device))


def _fragmented(device: torch.device) -> int | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def traffic(model: nn.Module) -> TrafficReport:
    """Bytes this rank sent between the last two ends of `optimizer.step()`, by purpose and by collective.

    >>> import torch, onefold
    >>> onefold.init()
    >>> onefold.traffic(onefold.shard(torch.nn.Linear(8, 8), stage=2)).total
    0
    """
    engine = engine_of(model)
    return TrafficReport(flows=dict(engine.comm.meter.last_step), planned=_planned_traffic(engine))


@contextmanager
def track_memory(model: nn.Module) -> Iterator[Tracker]:
    """Watch every tensor made inside; `peak()` then says what filled memory at the fullest instant. Slow.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(64, 64), stage=2)
    >>> with onefold.track_memory(model) as tracker:
    ...     model(torch.ones(8, 64)).sum().backward()
    >>> tracker.peak()["activations"] > 0
    True
    """
    engine = engine_of(model)
    tracker = Tracker(partial(on_device, engine), NotOnDevice(engine))
    tracker.watch(tensor for _, tensor in on_device(engine).values())
    for unit in engine.unsharding.units:
        unit.flat_params.on_resize = tracker.note
    try:
        with tracker:
            yield tracker
    finally:
        for unit in engine.unsharding.units:
            unit.flat_params.on_resize = None


def _planned_traffic(engine: Engine) -> dict[str, int]:
    """One forward and backward per step, over the units that the passes gather."""
    index = {id(unit): i for i, unit in enumerate(engine.all_units)}
    places = [index[id(unit)] for unit in engine.unsharding.units]
    others = engine.everyone.size - 1
    sent = step_traffic(
        sizes_of(engine),
        [unit.placement for unit in engine.all_units],
        forward=[places[i] for i in engine.unsharding.gathers.forward],
        backward=[places[i] for i in engine.unsharding.gathers.backward],
        replicas=engine.everyone.size // engine.comm.size,
        clip=True,
    )
    planned = {purpose: row.bytes for purpose, row in sent.items()}
    planned["norm"] = 8 * engine.pipeline.most_units * (engine.comms.holders.size - 1)
    if engine.checkpoints and (gathered := engine.checkpoints.planned_gathers()):
        planned["activation"] = gathered
    if engine.resolved.settings.buffers == "rank0":
        planned["buffers"] = 0 if engine.everyone.rank else storage_bytes(engine.model.buffers()) * others
    return planned


def _table(title: str, rows: list[tuple[str, int, int | None]]) -> str:
    shown = [(name, f"{measured:,}", "" if planned is None else f"{planned:,}") for name, measured, planned in rows]
    width = max([12, *(len(text) for row in shown for text in row[1:])]) + 2
    lines = [f"{title:<26}{'measured':>{width}}{'planned':>{width}}"]
    lines += [f"  {name:<24}{measured:>{width}}{planned:>{width}}" for name, measured, planned in shown]
    return "\n".join(lines)
