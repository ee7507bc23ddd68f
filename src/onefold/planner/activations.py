"""Bytes of activations of a GPT-like shape, in closed form: what stays until backward, and what one block works with.

A block keeps about 12·h elements per token. Checkpointing keeps its input alone, h, and computes the rest again. With
tensor parallelism every rank of the group holds the same block input; P_a ("partition") keeps 1/tp of it on each, and
P_a+cpu ("partition+host") moves that to host memory. Inside a block, tensor parallelism divides ten of the twelve.
"""

from __future__ import annotations

from typing import NamedTuple

from onefold.errors import ConfigError
from onefold.planner.shapes import Shape

POLICIES = ("keep", "checkpoint", "checkpoint+host", "partition", "partition+host")
PER_BLOCK = 12  # elements kept per token and hidden unit
WHOLE = 2  # of these, what tensor parallelism leaves whole: the inputs of attention and MLP


class ActivationBytes(NamedTuple):
    """On one rank, for one micro-batch."""

    kept_per_block: int  # on the device, from forward to backward
    host_per_block: int
    block: int  # what a block holds while it computes, or is computed again
    head: int  # logits and their softmax


NOTHING = ActivationBytes(0, 0, 0, 0)


def check_policy(policy: str, tp: int) -> None:
    if policy not in POLICIES:
        raise ConfigError(f"activations={policy!r} is unknown; use one of {', '.join(POLICIES)}")
    if policy.startswith("partition") and tp == 1:
        raise ConfigError(
            f"activations={policy!r} shares block inputs among tensor-parallel ranks, and tp=1 has none; use "
            f"'checkpoint', or a tp above 1"
        )


def of_shape(shape: Shape, batch: int, policy: str, tp: int = 1, itemsize: int = 2) -> ActivationBytes:
    """Per block, for `batch` sequences.

    >>> paper = Shape(layers=48, hidden=1600, heads=16)
    >>> of_shape(paper, 32, "keep").kept_per_block * 48 / 1e9
    60.3979776
    """
    check_policy(policy, tp)
    tokens = batch * shape.seq
    row = tokens * shape.hidden * itemsize
    block = WHOLE * row + (PER_BLOCK - WHOLE) * row // tp
    head = tokens * -(-shape.vocab // tp) * (itemsize + 4)  # the loss is taken in fp32
    if policy == "keep":
        return ActivationBytes(block, 0, 0, head)
    part = row // tp if policy.startswith("partition") else row
    if policy.endswith("+host"):
        return ActivationBytes(0, part, block + 2 * part, head)  # one on its way, one in use
    return ActivationBytes(part, 0, block, head)


def flops_per_sample(shape: Shape, policy: str) -> float:
    """Forward and backward of one sequence over the whole model, forward twice where blocks are computed again."""
    matrices = 12 * shape.layers * shape.hidden**2 + shape.vocab * shape.hidden
    forward = shape.seq * (2 * matrices + 4 * shape.layers * shape.seq * shape.hidden)
    return forward * (3 if policy == "keep" else 4)


def tensor_parallel_elements(shape: Shape, batch: int, policy: str, tp: int) -> int:
    """Elements one rank moves per block for tensor parallelism: an all-reduce is twice its message, two in forward, two
    in backward, two more where forward runs twice. P_a adds one gather."""
    if tp == 1:
        return 0
    message = batch * shape.seq * shape.hidden
    return message * ((8 if policy == "keep" else 12) + policy.startswith("partition"))
