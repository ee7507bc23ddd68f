"""What a sharded model costs: bytes in memory by category, bytes on the wire by purpose, beside the formula's value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from onefold.comm import Flow
from onefold.engine import Engine, engine_of
from onefold.memory import CATEGORIES, Tracker, storage_bytes, storage_key
from onefold.placement import Scope
from onefold.planner.sizes import Sizes, of_layout
from onefold.planner.states import StateCost, state_bytes
from onefold.planner.traffic import step_traffic
from onefold.rounds import IN_FLIGHT, WAITING

HOST = "checkpoints_host"


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

    def __str__(self) -> str:
        found = [(name, getattr(self, name)) for name in (*CATEGORIES[:-1], HOST)]
        shown = [(name, b) for name, b in found if name not in ("checkpoints", HOST) or b.measured or b.planned]
        rows = [(name, b.measured, b.planned) for name, b in shown if name != HOST] + [("total", self.total, None)]
        rows += [("checkpoints on the host", b.measured, b.planned) for name, b in shown if name == HOST]
        rows += [("fragmented", self.fragmented, None)] if self.fragmented is not None else []
        return _table("memory", rows)


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
    """Where one unit's states are, and what this rank holds of it when nothing is gathered."""

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
            return f"{unit:<32}{elements:>14}  {optimizer:<10}{gradients:<10}{parameters:<11}{held:>14}"

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
    for unit in engine.all_units:
        trained = unit in engine.units
        rows.append(
            PlacementRow(
                unit=unit.name,
                elements=unit.layout.used_numel,
                optimizer=unit.placement.optimizer.value if trained else "frozen",
                gradients=unit.placement.gradients.value if trained else "frozen",
                parameters=unit.placement.parameters.value,
                parameter_bytes=unit.values.resident_numel * unit.layout.itemsize,
            )
        )
    return PlacementReport(tuple(rows), engine.why)


def memory(model: nn.Module) -> MemoryReport:
    """Bytes of training state on this rank, measured by storage, with the layout's figure beside.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(64, 64, bias=False), stage=2)
    >>> onefold.memory(model).parameters.measured
    16384
    """
    engine = engine_of(model)
    measured = dict.fromkeys((*CATEGORIES, HOST), 0)
    for category, tensor in storages(engine).values():
        measured[category] += storage_bytes([tensor])
    plans = _planned_memory(engine)
    rows = {name: Bytes(measured[name], plans[name]) for name in (*CATEGORIES[:-1], HOST)}
    return MemoryReport(**rows, fragmented=_fragmented(engine.device))


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
    tracker = Tracker(partial(storages, engine), engine.checkpoints.host_storages if engine.checkpoints else ())
    tracker.watch(tensor for _, tensor in storages(engine).values())
    for unit in engine.passes.units:
        unit.values.on_resize = tracker.note
    try:
        with tracker:
            yield tracker
    finally:
        for unit in engine.passes.units:
            unit.values.on_resize = None


def held(engine: Engine) -> dict[str, list[Tensor]]:
    """All training state this rank holds, by category."""
    kept = list(engine.checkpoints.tensors()) if engine.checkpoints else []
    return {
        **{place: [tensor for where, tensor in kept if where == place] for place in ("checkpoints", HOST)},
        "buffers": list(engine.model.buffers()),
        "communication": engine.pool.buffers(),
        "gradients": [tensor for unit in engine.units for tensor in unit.gradients.tensors()],
        "optimizer": [tensor for unit in engine.units for tensor in unit.master.tensors()]
        + (engine.optimizer.state_tensors() if engine.optimizer is not None else []),
        "parameters": [t for unit in engine.all_units for t in unit.values.tensors()] + [p for _, p in engine.frozen],
    }


def storages(engine: Engine) -> dict[int, tuple[str, Tensor]]:
    """Storage -> its category and a tensor of it. A borrowed buffer that holds a local sum counts as gradients."""
    return {storage_key(tensor): (category, tensor) for category, tensors in held(engine).items() for tensor in tensors}


def _pool_limit_bytes(engine: Engine) -> int:
    """What rounds need at most: those on the way with their scratch, one filling, a few that wait for another. And
    where 16 bits compute, fp32 vectors of what is summed or updated."""
    sizes = [unit.layout.numel * unit.gradients.local_itemsize for unit in engine.units]
    wide = max((4 * unit.master.owned.numel for unit in engine.units if unit.dtypes.narrow), default=0)
    rounds = 2 * IN_FLIGHT + 1 + WAITING if engine.everyone.size > 1 else 3
    kept = sum(sizes) if engine.sums_kept and engine.placement.gradients is Scope.SHARD else 0
    return (rounds * max(sizes) if engine.everyone.size > 1 or engine.sums_kept or wide else 0) + 2 * wide + kept


def _sizes(engine: Engine) -> Sizes:
    """All units as the planner sees them, at the widths they have now."""
    rank, units = engine.comm.rank, []
    for unit in engine.all_units:
        widths = unit.dtypes.widths._replace(grad=unit.gradients.dtype.itemsize)
        units.append(of_layout(unit.layout, rank, widths, trained=unit.trained))
    return Sizes(tuple(units), engine.comm.size, flags=len(engine.params))


def _planned_memory(engine: Engine) -> dict[str, int | None]:
    placements = [unit.placement for unit in engine.all_units]
    states = state_bytes(_sizes(engine).units, placements, StateCost(0))
    frozen = storage_bytes([param for _, param in engine.frozen])
    has_gradients = any(unit.gradients.tensors() for unit in engine.units)
    return {
        "parameters": states.parameters + frozen,
        "gradients": states.gradients if has_gradients else 0,
        "optimizer": states.optimizer + (engine.optimizer.planned_bytes() if engine.optimizer is not None else 0),
        "buffers": storage_bytes(engine.model.buffers()),
        "communication": _pool_limit_bytes(engine),  # at most
        **dict.fromkeys(("checkpoints", HOST), 0),
        **(engine.checkpoints.planned() if engine.checkpoints else {}),
        "activations": None,
    }


def _planned_traffic(engine: Engine) -> dict[str, int]:
    """One forward and backward per step, over the units that the passes gather."""
    index = {id(unit): i for i, unit in enumerate(engine.all_units)}
    places = [index[id(unit)] for unit in engine.passes.units]
    others = engine.everyone.size - 1
    sent = step_traffic(
        _sizes(engine),
        [unit.placement for unit in engine.all_units],
        forward=[places[i] for i in engine.passes.gathers.forward],
        backward=[places[i] for i in engine.passes.gathers.backward],
        replicas=engine.everyone.size // engine.comm.size,
        clip=True,
    )
    planned = {purpose: row.bytes for purpose, row in sent.items()}
    planned["norm"] = 8 * engine.pipeline.most_units * (engine.comms.holders.size - 1)
    if engine.checkpoints and (gathered := engine.checkpoints.planned_gathers()):
        planned["activation"] = gathered
    if engine.zero.buffers == "rank0":
        planned["buffers"] = 0 if engine.everyone.rank else storage_bytes(engine.model.buffers()) * others
    return planned


def _table(title: str, rows: list[tuple[str, int, int | None]]) -> str:
    lines = [f"{title:<26}{'measured':>14}{'planned':>14}"]
    for name, measured, planned in rows:
        lines.append(f"  {name:<24}{measured:>14,}{'' if planned is None else format(planned, ','):>14}")
    return "\n".join(lines)
