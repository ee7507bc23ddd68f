"""Whether a step fits into a budget of device memory, found before the first step by a rehearsal of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from onefold import ConfigError, Zero
from onefold.cost.states import StateCost
from onefold.cost.text import format_bytes
from onefold.observe.rehearsal import rehearse


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a rank does in a step: micro-batches like `sample`, and an update that keeps state of this cost."""

    model: nn.Module  # not sharded yet
    sample: Any  # a batch, by the names of the model's arguments
    cost: StateCost
    ranks: int
    micro_batches: int
    device: torch.device

    def peak_bytes(self, zero: Zero) -> int:
        """Bytes that a rank needs at the fullest instant of the step."""
        return rehearse(
            self.model, self.sample, replace(zero, mesh=None), self.cost, ranks=self.ranks,
            plays="nccl" if self.device.type == "cuda" else "gloo", micro_batches=self.micro_batches,
        ).peak_bytes  # fmt: skip


def check_fit(step: Step, zero: Zero, budget_bytes: int) -> None:
    """Raises if the step needs more than the budget, with what stage 3 and activation checkpointing would need."""
    needed = step.peak_bytes(zero)
    if needed <= budget_bytes:
        return
    least = replace(zero, stage=3, activations="checkpoint", overlap_param_gather=False)
    remedy = f"stage 3 with activations='checkpoint' needs {format_bytes(step.peak_bytes(least))}"
    if (zero.stage, zero.activations) == (3, "checkpoint"):
        remedy = "use more ranks, a smaller batch, or Zero(offload='host')"
    raise ConfigError(
        f"stage {zero.stage} will not fit: it needs {format_bytes(needed)} of {format_bytes(budget_bytes)} on each of "
        f"{step.ranks} ranks; {remedy}"
    )
