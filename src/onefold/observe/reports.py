"""What a sharded model costs: bytes in memory by category, bytes on the wire by purpose, beside the formula's value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from onefold.comm.meter import Flow
from onefold.comm.strategy import WIDE
from onefold.cost.states import parameter_bytes
from onefold.cost.traffic import NORM_BYTES, step_traffic
from onefold.model.storage import storage_bytes
from onefold.observe.inventory import DISK, TierRow, offloaded_rows, planned_on_device, sizes_of
from onefold.observe.tracker import CATEGORIES, Tracker
from onefold.runtime.attached import Update
from onefold.runtime.engine import Engine, engine_of
from onefold.runtime.held_tensors import CHECKPOINTS_HOST as HOST
from onefold.runtime.held_tensors import PAGEABLE, PINNED, NotOnDevice, on_device
from onefold.runtime.live_bytes import watching_sizes
from onefold.settings.placement import Scope, Tier

Shown = tuple[str, int, int | str | None]  # a row of a table: name, measured, planned
NAMES = {"buffers": "module buffers", "communication": "working buffers", HOST: "checkpoints on the host"}


@dataclass(frozen=True)
class Bytes:
    """A number of bytes as it was measured, and as the layout predicts it."""

    measured: int
    planned: int | None  # for working buffers: at most, at any time; None where nothing is predicted


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that this rank holds now, by category; print it for a table."""

    parameters: Bytes
    """Parameters that this rank holds now."""
    gradients: Bytes
    """Gradients between backward and zero_grad()."""
    optimizer: Bytes
    """Optimizer state, such as Adam's moments, and the fp32 master where 16 bits compute."""
    buffers: Bytes
    """Module buffers."""
    communication: Bytes
    """Working buffers: units that are reduced or gathered, gradients on their way to host updates, and, for units that
    the host updates, gradients that add up over micro-batches. One rank has them without any communication."""
    checkpoints: Bytes
    """Activation checkpoints on the device: block inputs that wait for backward."""
    checkpoints_host: Bytes
    """Activation checkpoints in host memory; not in `total`."""
    elsewhere: tuple[TierRow, ...] = ()
    """Offloaded states and their staging buffers, in host memory or on disk; not in `total`."""
    fragmented: int | None = None
    """CUDA: bytes that the allocator has reserved on the device and that no tensor uses."""

    @property
    def states(self) -> int:
        """Bytes of parameters, gradients and optimizer state on the device: what ZeRO shards."""
        return self.parameters.measured + self.gradients.measured + self.optimizer.measured

    @property
    def total(self) -> int:
        """Bytes of all categories on the device."""
        return self.states + self.buffers.measured + self.communication.measured + self.checkpoints.measured

    @property
    def pinned(self) -> int:
        """Bytes of offloaded state and activation checkpoints in pinned host memory."""
        return self._at(PINNED) + (self.checkpoints_host.measured if self.fragmented is not None else 0)

    @property
    def pageable(self) -> int:
        """Bytes of offloaded state and activation checkpoints in host memory that is not pinned."""
        return self._at(PAGEABLE) + (self.checkpoints_host.measured if self.fragmented is None else 0)

    @property
    def host(self) -> int:
        """Bytes in host memory: `pinned` and `pageable`."""
        return self.pinned + self.pageable

    @property
    def disk(self) -> int:
        """Bytes of offloaded state on disk."""
        return self._at(DISK)

    def _at(self, place: str) -> int:
        return sum(row.measured for row in self.elsewhere if row.place == place)

    def __str__(self) -> str:
        found = [(name, getattr(self, name)) for name in (*CATEGORIES[:-1], HOST)]
        shown = [(name, b) for name, b in found if name not in ("checkpoints", HOST) or b.measured or b.planned]
        rows: list[Shown] = [(NAMES.get(name, name), b.measured, b.planned) for name, b in shown if name != HOST]
        limit = f"≤ {self.communication.planned:,}"
        rows = [(name, measured, limit if name == "working buffers" else plan) for name, measured, plan in rows]
        rows += [("total", self.total, None)]
        rows += [(NAMES[HOST], b.measured, b.planned) for name, b in shown if name == HOST]
        rows += [("fragmented", self.fragmented, None)] if self.fragmented is not None else []
        table = _table("memory", rows)
        if self.elsewhere:
            away: list[Shown] = [(f"{row.state}, {row.place}", row.measured, row.planned) for row in self.elsewhere]
            sums = [(f"total, {place}", self._at(place)) for place in (PINNED, PAGEABLE, DISK)]
            away += [(name, measured, None) for name, measured in sums if measured]
            table += "\n" + _table("not on the device", away)
        return table


@dataclass(frozen=True)
class TrafficReport:
    """Bytes that this rank sent in the last step; print it for a table."""

    flows: dict[tuple[str, str], Flow]
    """What was sent, by (purpose, collective)."""
    planned: dict[str, int]
    """Bytes of a step by purpose, as the layout predicts them for one forward and one backward."""

    @property
    def by_purpose(self) -> dict[str, int]:
        """Bytes sent, by purpose: "reduce", "gather-forward", "gather-backward", "gather-updated", "norm", …"""
        sums: dict[str, int] = {}
        for (purpose, _), flow in self.flows.items():
            sums[purpose] = sums.get(purpose, 0) + flow.sent_bytes
        return sums

    @property
    def by_collective(self) -> dict[str, Flow]:
        """Bytes sent and calls made, by collective."""
        sums: dict[str, Flow] = {}
        for (_, collective), flow in self.flows.items():
            seen = sums.get(collective, Flow())
            sums[collective] = Flow(seen.sent_bytes + flow.sent_bytes, seen.calls + flow.calls)
        return sums

    @property
    def total(self) -> int:
        """Bytes sent for all purposes."""
        return sum(flow.sent_bytes for flow in self.flows.values())

    def __str__(self) -> str:
        rows = [(purpose, sent, self.planned.get(purpose)) for purpose, sent in self.by_purpose.items()]
        return _table("traffic of the last step", [*rows, ("total", self.total, None)])


@dataclass(frozen=True)
class PlacementRow:
    """Where the states of one unit are kept: "sharded" or "replicated", with the tier if it is not the device, and the
    form of optimizer state if it is not fp32."""

    unit: str
    elements: int
    optimizer: str  # "frozen" where the unit is not trained
    gradients: str  # "frozen" where the unit is not trained
    parameters: str
    parameter_bytes: int  # of its parameters on this rank's device, while the unit is not gathered
    optimizer_tier: str = ""  # "device", "host" or "disk"; empty where the unit is not trained
    parameter_tier: str = "device"  # where this rank keeps the unit's parameters: "device", "host" or "disk"


@dataclass(frozen=True)
class PlacementReport:
    """Where the states of each unit are kept, as `shard` decided it; print it for a table."""

    rows: tuple[PlacementRow, ...]
    """One row for each unit."""
    why: str = ""
    """What "auto" settings chose, and the reason; empty where nothing was left to choose."""
    sums: str = ""
    """How gradients are summed over ranks; empty for one rank."""
    updates: tuple[Update, ...] = ()
    """What updates each parameter, if an optimizer such as Muon updates whole tensors."""

    @property
    def optimizer_tiers(self) -> dict[str, str]:
        """By the names of trained units, where their optimizer state is: "device", "host" or "disk"."""
        return {row.unit: row.optimizer_tier for row in self.rows if row.optimizer_tier}

    @property
    def parameter_tiers(self) -> dict[str, str]:
        """By the names of units, where their parameters are: "device", "host" or "disk"."""
        return {row.unit: row.parameter_tier for row in self.rows}

    def __str__(self) -> str:
        cells = [("unit", "elements", "optimizer", "gradients", "parameters", "bytes here")]
        cells += [
            (r.unit, f"{r.elements:,}", r.optimizer, r.gradients, r.parameters, f"{r.parameter_bytes:,}")
            for r in self.rows
        ]
        above = [f"gradients: {self.sums}"] * bool(self.sums) + [self.why] * bool(self.why)
        lines = above + _columns(cells, "<><<<>")
        return "\n".join(lines + (["", *_columns(_alike(self.updates), "<<><<<")] if self.updates else []))


def _alike(updates: Sequence[Update]) -> list[tuple[str, ...]]:
    """A line for parameters that all layers have, and that are updated alike; ranks that own any of them."""
    groups: dict[tuple[str, str, str, str], list[Update]] = {}
    for one in updates:
        name = ".".join("*" if part.isdigit() else part for part in one.name.split("."))
        shape = " x ".join(map(str, one.shape))
        groups.setdefault((name, shape, one.cls, one.why), []).append(one)
    cells: list[tuple[str, ...]] = [("parameter", "shape", "tensors", "updated by", "on rank", "because")]
    for (name, shape, cls, why), alike in groups.items():
        ranks = sorted({one.owner for one in alike if one.owner is not None})
        some = ", ".join(map(str, ranks)) if len(ranks) < 5 else f"{ranks[0]} … {ranks[-1]}"
        cells.append((name, shape, f"{len(alike)}", cls, some or "all", why or "a param group"))
    return cells


def _columns(cells: Sequence[tuple[str, ...]], sides: str) -> list[str]:
    """Rows of cells as lines; `sides` has < for text and > for numbers."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rows = ([f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in cells)
    return ["  ".join(row).rstrip() for row in rows]


def placement(model: nn.Module) -> PlacementReport:
    """Which states of which unit are sharded and which are replicated, and on which tier they are kept.

    >>> import torch, onefold
    >>> onefold.init()
    >>> onefold.placement(onefold.shard(torch.nn.Linear(8, 8), stage=3)).rows[0].elements
    72
    """
    engine = engine_of(model)
    forms = dict.fromkeys(optimizer.state_form for optimizer in engine.optimizers)
    form = f", {' and '.join(forms)}" if forms.keys() - {"fp32"} else ""
    rows = []
    for unit, size in zip(engine.all_units, sizes_of(engine).units, strict=True):
        trained = unit in engine.units
        offloaded = Tier.HOST if unit.updated_on_host else Tier.DEVICE
        rows.append(
            PlacementRow(
                unit=unit.name,
                elements=unit.layout.used_numel,
                optimizer=_text(unit.placement.optimizer, unit.placement.optimizer_tier, form) if trained else "frozen",
                gradients=_text(unit.placement.gradients, offloaded) if trained else "frozen",
                parameters=_text(unit.placement.parameters, unit.placement.parameters_tier),
                parameter_bytes=parameter_bytes(size, unit.placement),
                optimizer_tier=unit.placement.optimizer_tier.value if trained else "",
                parameter_tier=unit.placement.parameters_tier.value,
            )
        )
    updates = tuple(update for optimizer in engine.optimizers for update in optimizer.updates())
    return PlacementReport(tuple(rows), engine.why, _sums(engine), updates)


def _sums(engine: Engine) -> str:
    """How gradients are summed over the ranks that share the states."""
    if engine.everyone.size == 1:
        return ""
    return engine.comm.strategy.text(min((unit.dtypes.wire.itemsize for unit in engine.units), default=WIDE))


def _text(scope: Scope, tier: Tier, form: str = "") -> str:
    return (scope.value if tier is Tier.DEVICE else f"{scope.value}, {tier.value}") + form


def memory(model: nn.Module) -> MemoryReport:
    """How many bytes this rank holds now, by category, beside the number that the layout predicts.

    Storages of tensors are counted, each once. Activations are not counted; `track_memory` does that.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(64, 64, bias=False), stage=2)
    >>> onefold.memory(model).parameters.measured
    16384
    """
    engine = engine_of(model)
    engine.freezing.follow()
    away = offloaded_rows(engine)
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
    """How many bytes this rank sent in the last step, by purpose and by collective.

    The last step is what lies between the ends of the last two calls of `optimizer.step`.

    >>> import torch, onefold
    >>> onefold.init()
    >>> onefold.traffic(onefold.shard(torch.nn.Linear(8, 8), stage=2)).total
    0
    """
    engine = engine_of(model)
    return TrafficReport(flows=dict(engine.comm.meter.last_step), planned=_planned_traffic(engine))


@contextmanager
def track_memory(model: nn.Module) -> Iterator[Tracker]:
    """Watch every tensor that is made inside this context, to find what fills memory at the fullest instant.

    The tracker's `peak()` gives bytes by category at that instant, activations included, and `peak_bytes` their sum.
    Slow: use it for a step or two.

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
    tracker.add(tensor for _, tensor in on_device(engine).values())
    with watching_sizes(engine, tracker), tracker:
        yield tracker


def _gathered_places(engine: Engine, order: Sequence[int]) -> list[int]:
    """The places in `all_units` of the units that a pass gathers: replicated ones, which may be hidden, need none."""
    place = {id(unit): i for i, unit in enumerate(engine.all_units)}
    units = (engine.unsharding.units[index] for index in order)
    return [place[id(unit)] for unit in units if unit.placement.parameters is Scope.SHARDED]


def _planned_traffic(engine: Engine) -> dict[str, int]:
    """Predicted bytes by purpose of a step of one forward and one backward, with the recorded gather schedule."""
    gathers, others = engine.unsharding.gathers, engine.everyone.size - 1
    forward, backward = (_gathered_places(engine, order) for order in (gathers.forward, gathers.backward))
    sent = step_traffic(
        sizes_of(engine),
        [unit.placement for unit in engine.all_units],
        forward=forward,
        backward=backward,
        replicas=engine.everyone.size // engine.comm.size,
        clip=True,
        strategy=engine.comm.strategy,
    )
    planned = {purpose: row.bytes for purpose, row in sent.items()}
    for optimizer in engine.optimizers:
        for purpose, sent_bytes in optimizer.planned_traffic().items():
            planned[purpose] = planned.get(purpose, 0) + sent_bytes
    if engine.units:
        planned["norm"] = NORM_BYTES * (engine.comms.holders.size - 1)
    if engine.checkpoints and (gathered := engine.checkpoints.planned_gathers()):
        planned["activation"] = gathered
    if engine.resolved.settings.buffers == "rank0":
        planned["buffers"] = 0 if engine.everyone.rank else storage_bytes(engine.model.buffers()) * others
    return planned


def _table(title: str, rows: Sequence[Shown]) -> str:
    shown = [
        (name, f"{measured:,}", planned if isinstance(planned, str) else "" if planned is None else f"{planned:,}")
        for name, measured, planned in rows
    ]
    width = max([12, *(len(text) for row in shown for text in row[1:])]) + 2
    lines = [f"{title:<26}{'measured':>{width}}{'planned':>{width}}"]
    lines += [f"  {name:<24}{measured:>{width}}{planned:>{width}}" for name, measured, planned in shown]
    return "\n".join(lines)
