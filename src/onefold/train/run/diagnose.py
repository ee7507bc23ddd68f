"""Diagnoses of a run from its figures, each with a remedy. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from onefold.errors import OnefoldError

FALLS, FALLS_IN = 4, 50  # falls of the loss scale in so many steps: more than a good initial scale needs
LOST = 0.25  # of the elements that have a gradient: so many may stay as they were
LATENCY_SHARE = 0.15  # of a step
GIB = 1 << 30


class OutOfMemory(OnefoldError, MemoryError):
    """The device, or the machine, has no memory left; the message says what filled it."""


class Finding(NamedTuple):
    """A diagnosis, as it is shown to the user."""

    kind: str
    message: str


def falling_scale(scales: Sequence[float]) -> Finding | None:
    """Whether the loss scale keeps falling; `scales` are those of the last steps, oldest first."""
    recent = scales[-FALLS_IN - 1 :]
    falls = sum(after < before for before, after in pairwise(recent))
    if falls < FALLS:
        return None
    return Finding(
        "loss-scale",
        f"the loss scale fell {falls} times in {len(recent) - 1} steps, to {recent[-1]:g}: gradients overflow fp16 "
        f"again and again; train in --precision bf16, or lower --lr",
    )


def lost_updates(changed: int, expected: int, lr: float) -> Finding | None:
    """From a sample of master parameters: `expected` of them had a gradient, `changed` of these changed."""
    if not expected or 1 - changed / expected <= LOST:
        return None
    return Finding(
        "lost-updates",
        f"{1 - changed / expected:.0%} of the parameters that had a gradient did not change in this step: at a "
        f"learning rate of {lr:.1e} their updates are lost in rounding; raise --lr or --min-lr",
    )


def small_messages(calls: int, latency_s: float, step_s: float, *, cut: bool) -> Finding | None:
    """Whether latency dominates: a step makes `calls` calls, each of at least `latency_s`; `cut`: blocks are split into
    several units."""
    share = calls * latency_s / step_s if step_s > 0 else 0.0
    if share <= LATENCY_SHARE:
        return None
    remedy = "raise --bucket-mb, so that each block is one unit" if cut else "raise --micro-batch, or use fewer ranks"
    return Finding(
        "small-messages",
        f"{share:.0%} of a step is latency: {calls} messages of {latency_s * 1e6:.0f} µs each in {step_s * 1e3:.0f} "
        f"ms; {remedy}",
    )


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    known = "can't allocate memory", "not enough memory", "Cannot allocate memory", "bad_alloc", "out of memory"
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError | OSError) and any(part in text for part in known)
    )


def out_of_memory(sizes: Mapping[str, int], *, where: str, stage: int, micro_batch: int) -> OutOfMemory:
    """The error, from bytes by category when memory ran out (empty if they could not be counted)."""
    groups = {
        "activations": sizes.get("activations", 0),
        "model states": sum(sizes.get(name, 0) for name in ("parameters", "gradients", "optimizer")),
        "buffers": sum(sizes.get(name, 0) for name in ("buffers", "communication")),
    }
    grown = max(groups, key=lambda name: groups[name]) if any(groups.values()) else "model states"
    smaller = "use --micro-batch 1" if micro_batch == 2 else f"halve --micro-batch {micro_batch}"
    remedies = {
        "activations": f"{smaller} and double --accumulation" if micro_batch > 1 else
                       "compute blocks again in backward (--activations checkpoint), or shorten --seq",
        "model states": "use more ranks or a smaller model" if stage == 3 else f"use a higher --stage than {stage}",
        "buffers": "lower --bucket-mb",
    }  # fmt: skip
    told = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in groups.items())
    return OutOfMemory(f"out of memory in {where}, where {grown} grew ({told}); {remedies[grown]}")
