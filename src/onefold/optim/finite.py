"""Whether a step may be taken: gradients are finite, and it is no spike. If not, every rank skips it, or all raise.

Norms from clipping say so at no cost. With fp16 gradients are always checked, and an overflow lowers the loss scale.
Where all units are updated on a CUDA device, the flag stays there: kernels that see it set write nothing, and what a
class of torch wrote is taken back (guarded_step.py). The host reads the flag in the next step; in fp16 in the next
backward, which needs the loss scale. By then the device has the update and a whole forward to run, so it does not wait
for the host. Where the host updates units itself, it must know the flag first, and waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.comm.streams import StreamEvent, event_now
from onefold.errors import PrecisionError
from onefold.optim.clipping import Clipping
from onefold.optim.guarded_step import can_be_guarded
from onefold.optim.loss_scale import Scaler
from onefold.optim.spikes import SpikeCheck
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.runtime.engine import Engine

NOT_HERE = "(unknown here: its shards on this rank are finite)"
FLAG_STAYS_ON = {"cuda"}  # types of devices
TOO_LARGE = "(none: each is finite, and the norm of all together overflows)"


class Bad(NamedTuple):
    """Why a step must not be taken: gradients of a unit are not finite, or else the step is a spike."""

    unit: str = ""
    spike: str = ""

    def __str__(self) -> str:
        return self.spike or f"gradients were infinite or NaN, first in unit {self.unit}"


class FiniteCheck:
    def __init__(
        self, engine: Engine, by_unit: Sequence[UnitOptimizer], scaler: Scaler | None, policy: str, clipping: Clipping,
        spikes: SpikeCheck | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._by_unit, self._scaler, self._policy = engine, by_unit, scaler, policy
        self._clipping, self._spikes = clipping, spikes
        self.why, self.spikes = "", 0  # why the last skipped step was; skipped steps that are no overflow of fp16
        self._in_a_row = 0  # skipped, but for overflows of fp16
        self.follow_placement()
        self.skipped = 0
        self.taken_back = False  # the last step, by the device
        self._device_flags: tuple[Tensor, StreamEvent] | None = None  # copied from the device in the last step

    def follow_placement(self) -> None:
        """Units are updated on the device, or on the host, from now on."""
        updates = self._by_unit
        self._on_device = not any(one.unit.updated_on_host for one in updates) and _guardable(self._engine, updates)

    def reset(self, skipped: int) -> None:
        """Forgets the last step, after a load; `skipped` steps were counted before."""
        self._device_flags, self.skipped, self.taken_back = None, skipped, False
        self.why, self.spikes, self._in_a_row = "", 0, 0

    def flag_on_device(self) -> Tensor | None:
        """A flag on the device, 1 if gradients are not finite on some rank, else 0: updates that see it set change
        nothing. None where some update cannot see it, or where gradients are not checked: then `bad` decides.
        Collective with fp16, and where spikes are skipped."""
        self.taken_back = False
        if not self._on_device or (self._clipping.norms is None and self._scaler is None):
            return None
        if self._clipping.norms is None:
            units = self._finite_units()
            total = self._on_all_ranks(units.all())
        else:
            units, total = torch.isfinite(self._clipping.norms.units), torch.isfinite(self._clipping.norms.total)
        judged = self._judge(total)
        found = torch.cat([units, total.view(1)])
        found = found if judged is None else torch.cat([found.double(), judged])
        self._device_flags = found.to("cpu", non_blocking=True), event_now(total.device)
        return 1.0 - total.float() if judged is None else judged[0].float()

    def _judge(self, finite: Tensor) -> Tensor | None:
        """What is found of spikes, on the device; None where none are looked for. Collective."""
        if self._spikes is None or self._clipping.norms is None:
            return None
        return self._spikes.judge(self._clipping.norms.total / self._engine.scale.value, finite)

    def _finite_units(self) -> Tensor:
        """For each unit whether the gradients that this rank holds of it are finite."""
        self._engine.schedule.drain()
        norms = [unit.gradients.norms(2.0) if unit.gradients.reduced else [] for unit in self._engine.units]
        none = torch.zeros((), device=self._engine.device)
        return torch.stack([torch.stack(found).isfinite().all() if found else none == 0 for found in norms])

    def _on_all_ranks(self, mine: Tensor) -> Tensor:
        """Whether `mine` is true on every rank, as a tensor on the device. Collective."""
        comm = self._engine.comms.holders
        by_rank = torch.zeros(comm.size, device=mine.device)
        by_rank[comm.rank] = mine
        comm.all_gather(by_rank, Label("overflow", "step")).wait()
        return by_rank.all()

    def read_last_step(self) -> None:
        """Reads the flags that the last step left on the device, and counts that step as good or as skipped."""
        if self._device_flags is None:
            return
        (found, event), self._device_flags = self._device_flags, None
        event.wait()  # recorded before the update of the last step
        numbers, count = found.tolist(), len(self._engine.units)
        units, total, judged = numbers[:count], numbers[count], numbers[count + 1 :]
        spike = self._spike(judged) if total and judged else None
        if total and spike is None:
            self._in_a_row = 0
            if self._scaler:
                self._scaler.good()
            return
        self.taken_back = True
        for unit in self._by_unit:
            unit.undo_step()
        # Nothing is exchanged: a property of the optimizer may come here on one rank alone.
        self.skip(spike or Bad(self._first(bytes(not fine for fine in units)) or NOT_HERE))

    def _spike(self, judged: list[float]) -> Bad | None:
        verdict = SpikeCheck.read(judged)
        return Bad(spike=str(verdict)) if verdict.bad else None

    def _first(self, bad: bytes) -> str | None:
        """The first unit in backward order that has a flag."""
        return next((self._engine.units[index].name for index in self._engine.schedule.order if bad[index]), None)

    def bad(self) -> Bad | None:
        """Why this step must not be taken; None if it may, or if neither clipping nor fp16 asks for the check.
        Collective with fp16, where spikes are skipped, and where gradients are not finite."""
        found = self._found()
        if found is None:
            self._in_a_row = 0
        return found

    def _found(self) -> Bad | None:
        engine = self._engine
        if self._clipping.norms is not None:
            finite = torch.isfinite(self._clipping.norms.total)
            judged = self._judge(finite)
            if finite:
                return None if judged is None else self._spike(judged.tolist())
            by_unit = torch.isfinite(self._clipping.norms.units)
            label = Label("norm", "units that are not finite")
            return Bad(self._first_bad(engine.comms.holders, by_unit, label) or TOO_LARGE)
        if self._scaler:
            unit = self._first_bad(engine.comms.world, self._finite_units(), Label("overflow", "step"))
            return None if unit is None else Bad(unit)
        return None

    def _first_bad(self, comm: Comm, finite: Tensor, label: Label) -> str | None:
        """The first unit in backward order whose gradients are not finite on any rank. Collective."""
        mine = bytes(not fine for fine in finite.tolist())
        near, far = self._engine.pipeline.any_rank(comm, mine, label)
        return self._first(near) or ("of another pipeline stage" if far else None)

    def skip(self, bad: Bad) -> None:
        """Counts a skipped step and lowers the loss scale, or raises; the same on every rank. Nothing was updated."""
        self.skipped += 1
        self.why = str(bad)
        if self._scaler and not bad.spike:
            if not self._scaler.overflow():
                raise PrecisionError(
                    f"gradients overflow at the lowest loss scale ({self._scaler.scale:g}), first in unit {bad.unit}; "
                    f"look there for an exploding loss, train in bf16, or keep that module in fp32 "
                    f"(Precision(keep_fp32=…))"
                )
            return
        if self._policy == "raise" and self._spikes is None:
            raise PrecisionError(
                f"gradients are infinite or NaN, first in unit {bad.unit}; nothing was updated. Look there, or skip "
                f"such steps with Optimizer(on_nonfinite='skip')"
            )
        self.spikes += 1
        self._in_a_row += 1
        if self._spikes is not None and self._in_a_row >= self._spikes.settings.in_a_row:
            raise PrecisionError(
                f"{self._in_a_row} steps in a row were skipped as spikes, the last because {bad}: the batch is not "
                f"what is bad; load an earlier checkpoint, lower the learning rate, or allow more (Spikes(norm=…))"
            )


def _guardable(engine: Engine, by_unit: Sequence[UnitOptimizer]) -> bool:
    """Whether a step of the wrapped class can be taken back; found by making one, so that all ranks answer alike."""
    if engine.device.type not in FLAG_STAYS_ON or not by_unit:
        return False
    return all(can_be_guarded(sample) for sample in by_unit[0].samples())
