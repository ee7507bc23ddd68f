"""Seconds of forward and backward of a shape, from what was measured of a device. Numbers only.

A block is its linear layers, attention, and what lies between them: norms, the nonlinearity, residual sums, gradients
of biases. What lies between is counted from measured kernels, times what whole measured blocks take beyond their
products and attention. The host launches all of it; where that takes longer than the device computes, it is what
counts.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

from onefold.cost.cut_sequences import cut_shape
from onefold.cost.rates import Both, Rates
from onefold.cost.shapes import Shape

DTYPES = {4: "fp32", 2: "bf16"}  # by bytes per element of what computes
REFERENCE = Shape(layers=1, hidden=2048, heads=16)  # whose efficiency stands for a model of unknown shapes
REFERENCE_BATCH = 8


class ComputeSeconds(NamedTuple):
    """Seconds of the device for one micro-batch."""

    forward: float
    backward: float
    again: float  # of blocks that are recomputed

    @property
    def total(self) -> float:
        return sum(self)


class Beyond(NamedTuple):
    """What lies between a block's products takes so many times what its kernels take alone."""

    forward: float
    backward: float


def _products(shape: Shape, rates: Rates, dtype: str, tokens: float, tp: int, *, trained: bool) -> Both:
    forward = backward = 0.0
    for inputs, outputs, times in shape.products(tp):
        found = rates.product(dtype, tokens, inputs, outputs)
        forward += times * found.forward
        backward += times * (found.input_grad + found.weight_grad * trained)
    return Both(forward, backward)


def _attention(shape: Shape, rates: Rates, dtype: str, batch: float, tp: int) -> Both:
    rows = batch * shape.heads / tp * shape.seq
    found = rates.attention(dtype, shape.seq, shape.head_numel, rows)
    return Both(shape.layers * found.forward, shape.layers * found.backward)


def _between(shape: Shape, rates: Rates, dtype: str, tokens: float, tp: int) -> Both:
    """Two norms, two residual sums, the nonlinearity; in backward also gradients of queries, keys and values that are
    put together, and those of biases."""
    row, wide = tokens * shape.hidden, tokens * shape.widest_numel / tp
    mixed = tokens * (shape.attention_numel + 2 * shape.key_numel) / tp
    norm, gelu = rates.elementwise(dtype, "norm", row), rates.elementwise(dtype, "gelu", wide)
    add = rates.elementwise(dtype, "add", row)
    forward = 2 * norm.forward + gelu.forward + 2 * add.forward
    backward = 2 * norm.backward + gelu.backward + 2 * add.backward
    backward += rates.elementwise(dtype, "copy", mixed).backward
    backward += sum(rates.elementwise(dtype, "sum", numel).backward for numel in (mixed, row, wide, row))
    return Both(shape.layers * forward, shape.layers * backward)


def beyond(rates: Rates, dtype: str) -> Beyond:
    """From the blocks that were measured whole; 1 if there are none."""
    ratios: tuple[list[float], list[float]] = ([], [])
    for tokens, hidden, head, length, *seconds in rates.blocks(dtype):
        shape = Shape(layers=1, hidden=int(hidden), heads=int(hidden // head), seq=int(length))
        known = [
            a + b
            for a, b in zip(
                _products(shape, rates, dtype, tokens, 1, trained=True),
                _attention(shape, rates, dtype, tokens / length, 1),
            )
        ]
        rest = _between(shape, rates, dtype, tokens, 1)
        for at in (0, 1):
            ratios[at].append((seconds[at] - known[at]) / rest[at])
    return Beyond(*(max(0.0, statistics.median(found)) if found else 1.0 for found in ratios))


def shape_seconds(
    shape: Shape,
    rates: Rates,
    batch: int,
    policy: str,
    *,
    width: int = 2,
    tp: int = 1,
    pp: int = 1,
    sequence: int = 1,
    trained: bool = True,
) -> ComputeSeconds:
    """Of one micro-batch on one rank. `width` is the bytes per element of what computes; of a model that is not
    `trained` itself, no gradients of its matrices are computed."""
    dtype, words = DTYPES[width], -(-shape.vocab // tp)
    tokens = batch * cut_shape(shape, sequence).seq
    more = rates.remember(("beyond", dtype), lambda: beyond(rates, dtype))
    between = _between(shape, rates, dtype, tokens, tp)
    parts = (
        _products(shape, rates, dtype, tokens, tp, trained=trained),
        _attention(shape, rates, dtype, batch / sequence, tp),
        Both(between.forward * more.forward, between.backward * more.backward),
    )
    blocks = Both(*(sum(part[at] for part in parts) / pp for at in (0, 1)))
    head, loss = rates.product(dtype, tokens, shape.hidden, words), rates.loss(dtype, tokens, words)
    norm = rates.elementwise(dtype, "norm", tokens * shape.hidden)
    embedding = rates.elementwise(dtype, "copy", tokens * shape.hidden).forward
    table = rates.elementwise(dtype, "copy", words * shape.hidden).backward * trained  # the gradient of the embedding
    forward = head.forward + loss.forward + norm.forward + embedding
    backward = head.input_grad + head.weight_grad * trained + loss.backward + norm.backward + embedding + table
    again = 0.0 if policy == "keep" else blocks.forward
    return ComputeSeconds(blocks.forward + forward / pp, blocks.backward + backward / pp, again)


def typical_rate(rates: Rates, width: int = 2) -> float:
    """Flops per second of a block of middling size, for models of which only flops are known."""
    found = shape_seconds(REFERENCE, rates, REFERENCE_BATCH, "keep", width=width)
    tokens = REFERENCE_BATCH * REFERENCE.seq
    return 6 * tokens * (REFERENCE.matmul_numel + 2 * REFERENCE.seq * REFERENCE.hidden) / found.total


def step_compute_s(found: ComputeSeconds, rates: Rates, layers: int, *, sharded: bool) -> float:
    """Seconds of a micro-batch: what the device computes, or the host's time to launch that, if it is more."""
    again = 4 / 3 if found.again else 1.0
    return max(found.total, rates.block_host_s(sharded=sharded) * layers * again)
