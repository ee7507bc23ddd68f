"""Whether a step fits into device memory, found before the first step by a rehearsal of it."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from onefold import ConfigError, Zero
from onefold.cost.states import StateCost
from onefold.cost.text import format_bytes
from onefold.observe.rehearsal import rehearse

LOG = logging.getLogger("onefold")


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a rank does in a step: micro-batches like `sample`, and an update that keeps state of this cost."""

    model: nn.Module  # not sharded yet
    sample: Any  # a batch, by the names of the model's arguments
    cost: StateCost
    ranks: int
    micro_batches: int
    plays: str  # the backend of the run

    def peak_bytes(self, zero: Zero) -> int:
        """Bytes that a rank needs at the fullest instant of the step. Rehearsed on the CPU, whatever the device is: a
        kernel of Triton must not be launched on tensors without memory."""
        return rehearse(
            self.model, self.sample, replace(zero, mesh=None, device=None), self.cost, ranks=self.ranks,
            plays=self.plays, micro_batches=self.micro_batches, device=torch.device("cpu"),
        ).peak_bytes  # fmt: skip


def stretch_of(sample: Any, ranks: int) -> Any:
    """A batch as long as one rank's stretch, where so many ranks share each sequence."""
    if ranks == 1 or not isinstance(sample, Mapping):
        return sample
    tokens = max((one.shape[1] for one in sample.values() if isinstance(one, Tensor) and one.dim() > 1), default=0)
    return {
        name: one[:, : -(-tokens // ranks)] if isinstance(one, Tensor) and one.dim() > 1 else one
        for name, one in sample.items()
    }


def total_bytes(device: torch.device) -> int | None:
    """The memory of a CUDA device; None for other devices, whose memory a run shares with others."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def refuse_too_large(step: Step, zero: Zero, budget_bytes: int) -> None:
    """Raises if the step needs more than the budget."""
    if (text := _shortage(step, zero, budget_bytes)) is not None:
        raise ConfigError(text)


def warn_of_too_large(step: Callable[[], Step], zero: Zero, memory_bytes: int) -> None:
    """Logs a warning if the step needs more than the device has. A step that cannot be rehearsed is trained as ever."""
    if not LOG.isEnabledFor(logging.WARNING):
        return
    try:
        text = _shortage(step(), zero, memory_bytes)
    except Exception as error:
        LOG.debug("the first step was not rehearsed: %s: %s", type(error).__name__, error)
        return
    if text is not None:
        LOG.warning("%s", text)


def _shortage(step: Step, zero: Zero, budget_bytes: int) -> str | None:
    """None if the step fits, else what it needs, and what stage 3 with checkpointing would need."""
    needed = step.peak_bytes(zero)
    if needed <= budget_bytes:
        return None
    recomputes = zero.activations != "keep" or getattr(step.model, "is_gradient_checkpointing", False)
    remedy = "use more ranks, a smaller batch, or Zero(offload='host')"
    if zero.stage != 3 or not recomputes:
        activations = zero.activations if recomputes else "checkpoint"
        least = replace(zero, stage=3, activations=activations, overlap_param_gather=False)
        remedy = f"stage 3 with checkpointing needs {format_bytes(step.peak_bytes(least))}"
    return (
        f"stage {zero.stage} will not fit: it needs {format_bytes(needed)} of {format_bytes(budget_bytes)} on each of "
        f"{step.ranks} ranks; {remedy}"
    )


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Inside, rows may be drawn and augmented; outside, random numbers go on as if they had not been."""
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
