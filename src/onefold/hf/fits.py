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
from onefold.cost.case import Choice
from onefold.cost.run_summary import run_sentences
from onefold.cost.states import StateCost
from onefold.cost.text import format_bytes
from onefold.observe.rehearsal import Rehearsal, rehearse
from onefold.runtime.announce import say
from onefold.settings.offload import Offload

LOG = logging.getLogger("onefold")


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a rank does in a step: micro-batches like `sample`, and an update that keeps state of this cost."""

    model: nn.Module  # not sharded yet
    sample: Any  # a batch, by the names of the model's arguments
    cost: StateCost
    batch: int  # rows of a micro-batch
    ranks: int
    micro_batches: int
    plays: str  # the backend of the run

    def rehearsed(self, zero: Zero) -> Rehearsal:
        """What a rank needs in the step. Rehearsed on the CPU, whatever the device is: a kernel of Triton must not be
        launched on tensors without memory."""
        return rehearse(
            self.model, self.sample, replace(zero, mesh=None, device=None), self.cost, ranks=self.ranks,
            plays=self.plays, micro_batches=self.micro_batches, device=torch.device("cpu"),
        )  # fmt: skip

    def recomputes(self, zero: Zero) -> bool:
        """Whether blocks are computed again in backward: by Onefold, or by transformers' own checkpointing."""
        return zero.activations != "keep" or getattr(self.model, "is_gradient_checkpointing", False)


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


def refuse_too_large(step: Step, zero: Zero, budget_bytes: int, *, tells: bool) -> None:
    """Raises if the step needs more than the budget; else tells the plan, where this rank does."""
    found = step.rehearsed(zero)
    if (text := _shortage(step, zero, found.peak_bytes, budget_bytes)) is not None:
        raise ConfigError(text)
    if tells:
        _tell(step, zero, found, budget_bytes)


def warn_of_too_large(step: Callable[[], Step], zero: Zero, memory_bytes: int) -> None:
    """Tells the plan, and logs a warning if the step needs more than the device has. A step that cannot be rehearsed is
    trained as ever."""
    if not LOG.isEnabledFor(logging.WARNING):
        return
    try:
        planned = step()
        found = planned.rehearsed(zero)
        _tell(planned, zero, found, memory_bytes)
        text = _shortage(planned, zero, found.peak_bytes, memory_bytes)
    except Exception as error:
        LOG.debug("the first step was not rehearsed: %s: %s", type(error).__name__, error)
        return
    if text is not None:
        LOG.warning("%s", text)


def _tell(step: Step, zero: Zero, found: Rehearsal, memory_bytes: int) -> None:
    """Says in three sentences what is planned."""
    offload = Offload.of(zero.offload)
    choice = Choice(
        int(zero.stage), optimizer=offload.optimizer or "device", parameters=offload.parameters or "device",
        activations="checkpoint" if zero.activations == "keep" and step.recomputes(zero) else zero.activations,
    )  # fmt: skip
    say(run_sentences(choice, step.batch, found.states, found.peak_bytes, memory_bytes))


def _shortage(step: Step, zero: Zero, needed: int, budget_bytes: int) -> str | None:
    """None if the step fits, else what it needs, and what stage 3 with checkpointing would need."""
    if needed <= budget_bytes:
        return None
    recomputes = step.recomputes(zero)
    remedy = "use more ranks, a smaller batch, or Zero(offload='host')"
    if zero.stage != 3 or not recomputes:
        activations = zero.activations if recomputes else "checkpoint"
        least = replace(zero, stage=3, activations=activations, overlap_param_gather=False)
        remedy = f"stage 3 with checkpointing needs {format_bytes(step.rehearsed(least).peak_bytes)}"
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
