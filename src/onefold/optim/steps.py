"""The steps of one Optimizer: how many were tried, which were skipped and why, and the loss scale that follows.

A CUDA device may skip a step by itself, by a flag that it computes. Figures that depend on the flag read it first, and
so wait until the device has computed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onefold.optim.clipping import Clipping
from onefold.optim.finite import Bad, FiniteCheck
from onefold.optim.loss_scale import Scaler
from onefold.optim.spikes import SpikeCheck
from onefold.optim.unit_optimizer import UnitOptimizer
from onefold.runtime.engine import Engine


class Steps:
    """Counts steps, and decides whether the next one may be taken (`check`)."""

    def __init__(
        self,
        engine: Engine,
        by_unit: Sequence[UnitOptimizer],
        *,
        scaler: Scaler | None,
        spikes: SpikeCheck | None,
        on_nonfinite: str,
        clipping: Clipping,
    ) -> None:
        self._engine, self._on_nonfinite, self._clipping = engine, on_nonfinite, clipping
        self.scaler, self.spikes = scaler, spikes
        self._tried = 0  # steps, taken or skipped
        self._last_taken = False  # the host did not skip the last step; the device may have
        self.check_units(by_unit)

    def check_units(self, by_unit: Sequence[UnitOptimizer]) -> None:
        """These are the units whose gradients are checked from now on."""
        self.check = FiniteCheck(
            self._engine, by_unit, self.scaler, self._on_nonfinite, self._clipping, self.spikes
        )  # fmt: skip

    def follow_units(self, by_unit: Sequence[UnitOptimizer]) -> None:
        """The model has other units; the count of skipped steps goes on. The last step's flag has been read."""
        skipped = self.check.skipped
        self.check_units(by_unit)
        self.check.reset(skipped)

    def take(self) -> None:
        """A step is about to be taken, unless the device skips it."""
        self._last_taken = True
        self._tried += 1

    def skip(self, bad: Bad) -> None:
        """The host skips a step, or raises."""
        self._last_taken = False
        self._tried += 1
        self.check.skip(bad)

    @property
    def stepped(self) -> bool:
        """Whether the last step was taken."""
        if self._last_taken:
            self.check.read_last_step()
        return self._last_taken and not self.check.taken_back

    @property
    def skipped(self) -> int:
        self.check.read_last_step()
        return self.check.skipped

    @property
    def tried(self) -> int:
        """The number of steps, taken or skipped: waits for nothing."""
        return self._tried

    @property
    def taken(self) -> int:
        """The number of steps that were not skipped."""
        return self._tried - self.skipped

    @property
    def loss_scale(self) -> float:
        if self.scaler:
            self.check.read_last_step()
        return self.scaler.scale if self.scaler else 1.0

    # -- saved and loaded --------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, Any]:
        """What one rank's state_dict() holds: the number of steps tried, and `outcome`."""
        return {"tried": self._tried, **self.outcome()}

    def outcome(self) -> dict[str, Any]:
        """What is saved of steps beside their number: how many were skipped, the loss scale, and spikes."""
        skipped = self.skipped  # may change the loss scale
        scale = self.scaler.state() if self.scaler else None
        return {
            "skipped": skipped, "loss_scale": scale, **({"spikes": self.spikes.state()} if self.spikes else {}),
        }  # fmt: skip

    def load(self, saved: dict[str, Any], tried: int) -> None:
        """Continues from a saved `outcome`, after so many steps, taken or skipped."""
        self.check.reset(saved["skipped"])
        self._tried = tried
        if self.scaler and saved["loss_scale"]:
            self.scaler.load(saved["loss_scale"])
        if self.spikes:
            self.spikes.load(saved.get("spikes"))
