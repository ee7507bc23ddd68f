"""Settings of a training run for what may go wrong: steps that are spikes, replicas that differ."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.optim.spikes import Spikes


@dataclass(frozen=True, kw_only=True)
class FaultSettings:
    """What is looked after while a run trains."""

    skip_spikes: bool = False
    """Do not take steps whose loss or gradient norm is not finite, or far above the last good steps'; their batches are
    skipped."""

    spike_norm: float = 5.0
    """With --skip-spikes: a gradient norm above so many times the mean of good steps is a spike."""

    spike_loss: float = 2.0
    """With --skip-spikes: a loss above so many times the mean of good steps is a spike."""

    check_replicas: int = 0
    """Every so many steps, and before checkpoints, compare what ranks must hold alike; a rank that differs is named and
    ends the run. 0 compares nothing."""

    def spikes(self) -> Spikes | None:
        return Spikes(norm=self.spike_norm, loss=self.spike_loss) if self.skip_spikes else None
