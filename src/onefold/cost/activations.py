"""Bytes of activations of a GPT-like shape, in closed form: kept until backward, and needed while one block computes.

A block of GPT-2 keeps 16·h elements per token: what its two norms read and write, queries, keys and values, what
attention gives, and 4·h on each side of the nonlinearity. (The paper counts about 12.) Checkpointing keeps the block's
input alone, h, in an arena, and computes the rest again. With tensor parallelism every rank of the group holds the same
block input; P_a ("partition") keeps 1/tp of it on each, and P_a+cpu ("partition+host") moves that to host memory.
Inside a block, tensor parallelism divides all but what norms read and write.

`choose_activations` is the decision between them, for plans and for activations="auto" alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onefold.cost.layout import part_numel
from onefold.cost.shapes import Shape
from onefold.errors import ConfigError
from onefold.settings.values import ACTIVATIONS

SPEED_TOLERANCE = 0.05  # choices whose speeds differ by less count as equally fast
NORMS = 4  # statistics per token: a mean and a deviation of each of two norms


class ActivationBytes(NamedTuple):
    """Bytes of activations on one rank for one micro-batch. What is needed while a module computes comes on top of what
    is kept."""

    kept_per_block: int  # on the device, from forward to backward
    host_per_block: int
    block: int  # needed while a block computes, or is recomputed, without `widest`
    widest: int  # the largest gradient of an activation inside it
    head: int  # the last norm, logits, their softmax and its gradients
    logits: int  # of that, the gradient of the logits, from which those of weights are made
    outside: int  # needed by a layer that is neither block nor head
    arena: bool = False  # whether kept inputs are in one buffer, whose length stays when backward empties it
    first_backward: int = 0  # in addition to `block`, in the backward of the last block, which runs first


NOTHING = ActivationBytes(0, 0, 0, 0, 0, 0, 0)


def check_policy(policy: str, tp: int) -> None:
    if policy not in ACTIVATIONS:
        raise ConfigError(f"activations={policy!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    if policy.startswith("partition") and tp == 1:
        raise ConfigError(
            f"activations={policy!r} shares block inputs among tensor-parallel ranks, and tp=1 has none; use "
            f"'checkpoint', or a tp above 1"
        )


def shape_activations(shape: Shape, batch: int, policy: str, tp: int = 1, itemsize: int = 2) -> ActivationBytes:
    """The activations of a shape for `batch` sequences with this policy.

    >>> paper = Shape(layers=48, hidden=1600, heads=16)
    >>> shape_activations(paper, 32, "checkpoint").kept_per_block * 48 / 1e9
    5.0331648
    """
    check_policy(policy, tp)
    tokens = batch * shape.seq
    row = tokens * shape.hidden * itemsize
    unsplit, split = shape.block_numel
    sums = 4 * tokens * (shape.heads // tp + NORMS)  # in fp32: statistics of attention's and the norms' rows
    kept = tokens * unsplit * itemsize + tokens * split * itemsize // tp + sums
    logits = tokens * -(-shape.vocab // tp)
    kept_all = ActivationBytes(
        kept_per_block=kept,
        host_per_block=0,
        block=row,  # the gradient of its output
        widest=tokens * shape.widest_numel * itemsize // tp,
        head=2 * row + 3 * 4 * logits,  # the loss is computed in fp32: softmax, and the gradients of both
        logits=2 * row + itemsize * logits,
        outside=2 * row,
    )
    if policy == "keep":
        return kept_all
    shared = policy.startswith("partition")
    part = part_numel(tokens * shape.hidden, tp if shared else 1) * itemsize
    moved = 2 * row if shared or policy.endswith("+host") else 0  # the restored input and the prefetched one
    if policy.endswith("+host"):
        return kept_all._replace(kept_per_block=0, host_per_block=part, block=kept + moved + part)  # and one copied out
    return kept_all._replace(kept_per_block=part, block=kept + moved, arena=True)


def partly_recomputed(kept: ActivationBytes, recomputed: ActivationBytes, share: float) -> ActivationBytes:
    """The activations of a model that recomputes this share of its blocks, the first ones, from those of one that keeps
    all and one that recomputes all. Backward comes to the kept blocks first, so it is fullest when it begins."""
    per_block = [round((1 - share) * a + share * b) for a, b in ((kept[0], recomputed[0]), (kept[1], recomputed[1]))]
    return kept._replace(kept_per_block=per_block[0], host_per_block=per_block[1])


class Option(NamedTuple):
    """A policy with its cost."""

    policy: str
    fits: bool
    speed: float  # samples per second, or relative to the others
    needs: str  # what it takes, for the reason


def choose_activations(options: Sequence[Option]) -> tuple[str, str]:
    """The policy and the reason: the simplest of those that fit and are as fast as the fastest. `options` come from the
    simplest on. So inputs are shared (P_a) where activations bound the batch, and go to the host (P_a+cpu) where
    nothing else fits, or where what the larger batch saves is worth more than the transfer.

    >>> choose_activations([Option("checkpoint", False, 2.0, "40 GB"), Option("partition", True, 1.9, "16 GB")])
    ('partition', 'checkpoint needs 40 GB; partition fits with 16 GB')
    """
    fitting = [option for option in options if option.fits]
    if not fitting:
        last = options[-1]
        return last.policy, f"nothing fits: {last.policy} comes closest and needs {last.needs}"
    fastest = max(option.speed for option in fitting)
    chosen = next(option for option in fitting if option.speed >= (1 - SPEED_TOLERANCE) * fastest)
    parts = [f"{chosen.policy} fits with {chosen.needs}"]
    if chosen is not options[0]:
        simpler = options[options.index(chosen) - 1]
        slower = f"would be {100 * (chosen.speed / simpler.speed - 1):.0f}% slower" if simpler.speed else "is slower"
        parts.insert(0, f"{simpler.policy} {slower if simpler.fits else f'needs {simpler.needs}'}")
    return chosen.policy, "; ".join(parts)


def flops_per_sample(shape: Shape, policy: str) -> float:
    """Flops of forward and backward of one sequence, with a second forward where blocks are recomputed."""
    attention = 4 * shape.layers * shape.seq * shape.attention_numel
    forward = shape.seq * (2 * shape.matmul_numel + attention)
    return forward * (3 if policy == "keep" else 4)


def tensor_parallel_elements(shape: Shape, batch: int, policy: str, tp: int) -> int:
    """Elements that one rank sends per block for tensor parallelism: an all-reduce sends its message twice; two in
    forward, two in backward, two more where blocks are recomputed. P_a adds one all-gather."""
    if tp == 1:
        return 0
    message = batch * shape.seq * shape.hidden
    return message * ((8 if policy == "keep" else 12) + policy.startswith("partition"))
