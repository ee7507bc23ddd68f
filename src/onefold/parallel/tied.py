"""Parameters tied across pipeline stages: held by the first and the last stage, such as an embedding tied to the head.

Both stages start with the same values and make the same updates, so only gradients are exchanged: once per step, when
each stage has reduced its own, the two sums are added, the first stage's first, so that both stages get the same bits.
A tied parameter is a unit of its own, so that both stages shard it in the same way and send shards only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from onefold.comm.agreement import agree, agree_on_salt, compare_values
from onefold.comm.communicator import Comm
from onefold.comm.mesh import Axis
from onefold.comm.meter import Label, Meter
from onefold.errors import ModelError
from onefold.runtime.engine import Engine
from onefold.runtime.untied import NoTiedParameters


class Tied(NoTiedParameters):
    def __init__(self, engine: Engine, ends: Axis, names: Sequence[str]) -> None:
        self._engine, self.names = engine, tuple(names)
        self._comm = Comm(ends, engine.device, engine.resolved.settings.timeout_s, engine.comm.meter)
        error: Exception | None = None
        try:
            self.units = tuple(_alone(engine, name) for name in names)
        except ModelError as mistake:
            error = mistake
        lines = [f"tied {engine.units[i].layout.slots[0]}, {engine.units[i].layout.numel} elements" for i in self.units]
        meter, self._comm.meter = self._comm.meter, Meter()
        agree(self._comm, lines, error, where="PipelineStage()")
        self._comm.salt = agree_on_salt(self._comm)
        if not self._comm.simulated:
            masters = [(name, self._master(index)) for name, index in zip(names, self.units, strict=True)]
            compare_values(self._comm, masters)
        self._comm.meter = meter
        engine.tie(self)

    def _master(self, index: int) -> torch.Tensor:
        unit = self._engine.units[index]
        out = torch.empty(unit.master.owned.numel, dtype=torch.float32, device=self._engine.device)
        unit.master.read(unit.master.owned, out)
        return out

    def saves(self, name: str) -> bool:
        return name not in self.names or self._comm.rank == 0

    def counts(self, index: int) -> bool:
        return index not in self.units or self._comm.rank == 0

    def sum(self) -> None:
        for index in self.units:
            unit = self._engine.wait_reduced(index)
            mine = unit.gradients.mine()
            both = self._engine.pool.take(2 * mine.numel(), mine.dtype)
            halves = both.view(2, -1)
            halves[self._comm.rank].copy_(mine)
            self._comm.all_gather(both, Label("sum-tied", unit.name)).wait()
            mine.copy_(halves[0].float() + halves[1].float())
            self._engine.pool.give(both)
        self.summed = True

    def forget(self) -> None:
        self.summed = False


def _alone(engine: Engine, name: str) -> int:
    for index, unit in enumerate(engine.units):
        names = [slot.name for slot in unit.layout.slots]
        if name in names and len(names) > 1:
            raise ModelError(
                f"tied parameter {name} shares its unit with {names[names[0] == name]}, so the stages would shard it "
                f"differently; make its module a unit of its own: shard(part, units=lambda name, module: ...)"
            )
        if name in names:
            return index
    raise ModelError(f"tied parameter {name} is not a trained parameter of this stage; it has {engine.names[:3]} …")
