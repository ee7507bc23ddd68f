"""What a sharded model costs: bytes in memory by category, bytes on the wire by purpose, beside the formula's value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from onefold.comm import Flow
from onefold.engine import Engine, engine_of
from onefold.memory import CATEGORIES, Tracker, storage_bytes
from onefold.placement import Scope
from onefold.schedule import IN_FLIGHT


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

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer state: what ZeRO shards."""
        return self.parameters.measured + self.gradients.measured + self.optimizer.measured

    @property
    def total(self) -> int:
        return self.states + self.buffers.measured + self.communication.measured

    def __str__(self) -> str:
        rows = [(name, getattr(self, name)) for name in CATEGORIES[:-1]]
        return _table("memory", [(name, b.measured, b.planned) for name, b in rows] + [("total", self.total, None)])


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


def memory(model: nn.Module) -> MemoryReport:
    """Bytes of training state on this rank, measured by storage, with the layout's figure beside.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(64, 64, bias=False), stage=2)
    >>> onefold.memory(model).parameters.measured
    16384
    """
    engine = engine_of(model)
    measured = dict.fromkeys(CATEGORIES, 0)
    for category, tensor in engine.storages().values():
        measured[category] += tensor.untyped_storage().nbytes()
    plans = _planned_memory(engine)
    return MemoryReport(**{name: Bytes(measured[name], plans[name]) for name in CATEGORIES[:-1]})


def traffic(model: nn.Module) -> TrafficReport:
    """Bytes this rank sent between the last two ends of `optimizer.step()`."""
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
    tracker = Tracker(engine.storages)
    tracker.watch(tensor for _, tensor in engine.storages().values())
    with tracker:
        yield tracker


def _planned_memory(engine: Engine) -> dict[str, int | None]:
    whole = sum(unit.layout.numel * unit.layout.itemsize for unit in engine.units)
    shard = sum(unit.layout.shard_numel * unit.layout.itemsize for unit in engine.units)
    frozen = storage_bytes([param for _, param in engine.frozen])
    has_gradients = any(unit.gradient_tensors() for unit in engine.units)
    gradients = whole if engine.placement.gradients is Scope.WHOLE else shard
    flats = IN_FLIGHT + 1 if engine.placement.gradients is Scope.SHARD else 0  # borrowed: on the way, and filling
    largest = max(unit.layout.numel * unit.layout.itemsize for unit in engine.units)
    scratch = max(engine.comm.scratch_numel(u.layout.shard_numel) * u.layout.itemsize for u in engine.units)
    return {
        "parameters": whole + frozen,
        "gradients": gradients if has_gradients else 0,
        "optimizer": engine.optimizer.planned_bytes() if engine.optimizer is not None else 0,
        "buffers": storage_bytes(engine.model.buffers()),
        "communication": (IN_FLIGHT * scratch + flats * largest) if engine.comm.size > 1 else 0,
        "activations": None,
    }


def _planned_traffic(engine: Engine) -> dict[str, int]:
    """One backward per step: every unit reduced once and gathered once, (N-1)/N of it sent each time."""
    n = engine.comm.size
    once = sum(unit.layout.shard_numel * unit.layout.itemsize for unit in engine.units) * (n - 1)
    gather = "gather-updated" if engine.placement.optimizer is Scope.SHARD else "gather-gradient"
    flags = (len(engine.params) + len(engine.units)) * (n - 1)
    return {"reduce": once, gather: once, "used-flags": flags, "norm": 4 * len(engine.units) * (n - 1)}


def _table(title: str, rows: list[tuple[str, int, int | None]]) -> str:
    lines = [f"{title:<26}{'measured':>14}{'planned':>14}"]
    for name, measured, planned in rows:
        lines.append(f"  {name:<24}{measured:>14,}{'' if planned is None else format(planned, ','):>14}")
    return "\n".join(lines)
