"""Steps whose loss or gradient norm is far above that of the steps before: found before the update, on the device.

Nothing is rolled back: a step that is a spike is not taken, so that parameters and optimizer state stay those of the
last good step, and its batch is gone. The means of good steps stay on the device, where the decision falls; the norm
and the mean loss over ranks have the same bits on all ranks, so all decide alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.comm.meter import Label
from onefold.errors import ConfigError
from onefold.runtime.engine import Engine

WINDOW = 32  # good steps: older ones fade from the mean
WHAT = ("gradient norm", "loss")


@dataclass(frozen=True, kw_only=True)
class Spikes:
    """Which steps are skipped as spikes: the setting `skip_spikes` of `Optimizer`.

    A step is a spike if its gradient norm, or its loss, is that many times the mean of the last good steps, or is not
    finite. `step` then changes nothing, on any rank: a run that skips a batch has the bits of a run that never had it
    (random numbers that its forward drew stay drawn). The loss is the mean over ranks of what `Optimizer.backward` was
    given; without such calls only norms are compared. `Optimizer.why_skipped` says what was found.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(4, 4), stage=2)
    >>> optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3, skip_spikes=onefold.Spikes(norm=5.0, after=1))
    >>> for scale in (1.0, 1.0, 1e6):
    ...     optimizer.backward(model(torch.ones(1, 4)).sum() * scale)
    ...     optimizer.step(); optimizer.zero_grad()
    >>> optimizer.skipped
    1
    """

    norm: float = 5.0
    """A gradient norm above so many times the mean is a spike; `math.inf` compares no norms."""

    loss: float = 2.0
    """A loss above so many times the mean, if that is positive, is a spike; `math.inf` compares no losses."""

    after: int = 20
    """Good steps before anything is compared with their mean; until then only what is not finite is skipped."""

    in_a_row: int = 20
    """So many skipped steps in a row raise `PrecisionError`: then it is not the batch that is bad."""

    def __post_init__(self) -> None:
        for name in ("norm", "loss"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not value > 1:
                raise ConfigError(f"Spikes({name}={value!r}) is not a number above 1")
        for name in ("after", "in_a_row"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"Spikes({name}={value!r}) is not a positive whole number")


class Verdict(NamedTuple):
    """What was found of one step, on the host."""

    bad: bool
    spiked: tuple[bool, bool]  # the norm, the loss
    seen: tuple[float, float]
    means: tuple[float, float]  # of the good steps before

    def __str__(self) -> str:
        found = [
            f"the {what} was {seen:.4g}, {seen / mean:.1f} times the mean of the last good steps ({mean:.4g})"
            for what, spiked, seen, mean in zip(WHAT, self.spiked, self.seen, self.means, strict=True)
            if spiked
        ]
        return " and ".join(found) or f"the loss was {self.seen[1]:g}"


class SpikeCheck:
    """The means of good steps, and the losses of the step under way. Vectors have two elements: the norm, the loss."""

    def __init__(self, engine: Engine, settings: Spikes) -> None:
        self._engine, self.settings = engine, settings
        self._factors = torch.tensor([settings.norm, settings.loss], dtype=torch.float64, device=engine.device)
        self._mean, self._count = torch.zeros_like(self._factors), torch.zeros_like(self._factors)
        self._loss: Tensor | None = None

    def add_loss(self, loss: Tensor) -> None:
        """Adds the loss of a micro-batch, already divided by their number."""
        mine = loss.detach().double()
        self._loss = mine if self._loss is None else self._loss + mine

    def forget_losses(self) -> None:
        self._loss = None

    def judge(self, norm: Tensor, finite: Tensor) -> Tensor:
        """What `read` reads, on the device; its first element is 1 for a step that must not be taken. Counts a step
        that may. `finite` says whether the norm is. Collective."""
        loss, told = self._mean_loss()
        seen, there = torch.stack([norm.double(), loss]), torch.stack([finite, told])
        spiked = there & (self._count >= self.settings.after) & (self._mean > 0) & (seen > self._mean * self._factors)
        bad = ~finite | (told & ~torch.isfinite(loss)) | spiked.any()
        before, good = self._mean, there & ~bad
        rate = 1.0 / (self._count + 1.0).clamp(max=WINDOW)
        self._mean = torch.where(good, before + (seen - before) * rate, before)
        self._count = self._count + good
        return torch.cat([bad.view(1).double(), spiked.double(), seen, before])

    @staticmethod
    def read(judged: list[float]) -> Verdict:
        bad, norm_spiked, loss_spiked, norm, loss, norm_mean, loss_mean = judged
        return Verdict(bool(bad), (bool(norm_spiked), bool(loss_spiked)), (norm, loss), (norm_mean, loss_mean))

    def _mean_loss(self) -> tuple[Tensor, Tensor]:
        """The mean of the losses of all ranks that have one, and whether any has. Collective."""
        comm = self._engine.comms.world
        rows = torch.zeros(comm.size, 2, dtype=torch.float64, device=self._engine.device)
        if self._loss is not None:
            rows[comm.rank, 0], rows[comm.rank, 1] = self._loss.to(rows.device), 1.0
        comm.all_gather(rows.view(-1), Label("loss", "step")).wait()
        total, count = rows.sum(0).unbind()
        return total / count.clamp(min=1.0), count > 0

    def state(self) -> dict[str, list[float]]:
        return {"mean": self._mean.tolist(), "count": self._count.tolist()}

    def load(self, state: Any) -> None:
        """Loads what `state` gave; anything else leaves the means as they are."""
        rows = [state.get(key) for key in ("mean", "count")] if isinstance(state, dict) else []
        if len(rows) == 2 and all(_two_numbers(row) for row in rows):
            self._mean, self._count = (torch.tensor(row).to(self._factors) for row in rows)


def _two_numbers(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 2 and all(type(one) is float and math.isfinite(one) for one in row)
