"""Whether gradients are finite; if not, every rank skips the step, or every rank raises.

Norms from clipping say so at no cost. With fp16 gradients are always checked, and an overflow lowers the loss scale.
Where every update is one CUDA kernel, a flag on the device makes the kernels write nothing, and the host reads the
flag in the next step, so that no step waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.errors import PrecisionError
from onefold.optim.loss_scale import Scaler
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.runtime.engine import Engine


class FiniteCheck:
    def __init__(self, engine: Engine, by_unit: Sequence[UnitOptimizer], scaler: Scaler | None, policy: str) -> None:
        self._engine, self._by_unit, self._scaler, self._policy = engine, by_unit, scaler, policy
        self._on_device = not any(one.unit.updated_on_host for one in by_unit)
        self.norms: Tensor | None = None  # of each rank's shard of each unit, if clipping has computed them
        self.skipped = 0
        self._device_flags: tuple[Tensor, torch.cuda.Event] | None = None  # copied from the device in the last step

    def reset(self, skipped: int) -> None:
        """Forgets the last step, after a load; `skipped` steps were counted before."""
        self._device_flags, self.skipped = None, skipped

    def flag_on_device(self, groups: list[dict[str, Any]]) -> Tensor | None:
        """A flag on the device, not 0 if gradients are not finite, at which update kernels write nothing. None where
        some update is not one kernel, or no norms are known: then `bad_unit` must decide."""
        if self.norms is None or not self.norms.is_cuda or self._scaler or not self._on_device:
            return None
        if not all(unit.fused(group) for unit in self._by_unit for group in groups):
            return None
        finite = torch.isfinite(self.norms)
        self._device_flags = finite.to("cpu", non_blocking=True), torch.cuda.Event()
        self._device_flags[1].record()
        return 1.0 - finite.all().float()

    def read_last_step(self) -> None:
        """Reads the flags that the last step left on the device; if its kernels wrote nothing, counts it as skipped."""
        if self._device_flags is None:
            return
        (finite, event), self._device_flags = self._device_flags, None
        event.synchronize()  # does not wait: it was recorded a step ago
        bad = self._first_bad(self._engine.comms.holders, finite)
        if bad is not None:
            for unit in self._by_unit:
                unit.undo_step()
            self.skip(bad)

    def _first_bad(self, comm: Comm, finite: Tensor) -> str | None:
        """The first unit in backward order whose gradients are not finite; `finite` has a row for each rank."""
        engine = self._engine
        near = finite[engine.pipeline.rows(comm)].all(dim=0).tolist()
        first = next((engine.units[index].name for index in engine.schedule.order if not near[index]), None)
        return first if first or bool(finite.all()) else "of another pipeline stage"

    def bad_unit(self) -> str | None:
        """The first unit in backward order whose gradients are not finite on some rank. None if all are, or if neither
        clipping nor fp16 asks for the check. Collective with fp16."""
        engine, world = self._engine, self._engine.comms.world
        if self.norms is not None:
            return self._first_bad(engine.comms.holders, torch.isfinite(self.norms))
        if self._scaler:
            engine.schedule.drain()
            norms = [unit.gradients.norms(2.0) if unit.gradients.reduced else [] for unit in engine.units]
            none = torch.zeros((), device=engine.device)
            finite = torch.stack([torch.stack(found).isfinite().all() if found else none == 0 for found in norms])
            mine = bytes(not fine for fine in finite.tolist())
            rows = world.all_gather_bytes(mine.ljust(engine.pipeline.most_units, b"\0"), Label("overflow", "step"))
            return self._first_bad(world, torch.tensor([list(row) for row in rows]) == 0)
        return None

    def skip(self, bad: str) -> None:
        """Counts a skipped step and lowers the loss scale, or raises; the same on every rank. Nothing was updated."""
        self.skipped += 1
        if self._scaler:
            if not self._scaler.overflow():
                raise PrecisionError(
                    f"gradients overflow at the lowest loss scale ({self._scaler.scale:g}), first in unit {bad}; look "
                    f"there for an exploding loss, train in bf16, or keep that module in fp32 (Precision(keep_fp32=…))"
                )
        elif self._policy == "raise":
            raise PrecisionError(
                f"gradients are infinite or NaN, first in unit {bad}; nothing was updated. Look there, or skip such "
                f"steps with Optimizer(on_nonfinite='skip')"
            )
