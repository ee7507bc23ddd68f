"""Seconds of forward and backward of a shape, from what was measured of a device. Numbers only.

A block is its linear layers, attention, and what lies between them: norms, the nonlinearity, residual sums, gradients
of biases. Kernels together take another time than each alone: so that sum is multiplied by what whole blocks of about
the same size were measured to take, over the same sum for them; and by what the same blocks take when they run for
seconds without a pause, if that was measured. The host launches all of it; where that takes longer than the device
computes, it is what counts.
"""

from __future__ import annotations

from typing import NamedTuple

from onefold.cost.between import fused, written_out
from onefold.cost.cut_sequences import cut_shape
from onefold.cost.decoders import Decoder
from onefold.cost.rates import BYTES, Both, Rates, nearby
from onefold.cost.shapes import Shape
from onefold.cost.tiles import HALF, loss_moved

DTYPES = {4: "fp32", 2: "bf16"}  # by bytes per element of what computes
REFERENCE = Shape(layers=24, hidden=2048, heads=16)  # whose efficiency stands for a model of unknown shapes
REFERENCE_BATCH = 8


class ComputeSeconds(NamedTuple):
    """Seconds of the device for one micro-batch."""

    forward: float
    backward: float
    again: float  # of blocks that are recomputed

    @property
    def total(self) -> float:
        return sum(self)


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


def _between(shape: Shape, rates: Rates, dtype: str, tokens: float, tp: int, *, compiled: bool) -> Both:
    """The kernels between products: of compiled blocks and of decoders by the bytes that they move, of a GPT as they
    were measured: two norms, two residual sums, the nonlinearity; in backward also gradients of queries, keys and
    values that are put together, and those of biases."""
    width = BYTES[dtype]
    passes = fused(shape, width, tp) if compiled else None
    if passes is None and isinstance(shape, Decoder):
        passes = written_out(shape, width, tp)
    if passes is not None:
        return Both(*(shape.layers * rates.moved(dtype, tokens * one.bytes, one.kernels) for one in passes))
    row, wide = tokens * shape.hidden, tokens * shape.widest_numel / tp
    qkv = tokens * (shape.attention_numel + 2 * shape.key_numel) / tp
    norm, gelu = rates.elementwise(dtype, "norm", row), rates.elementwise(dtype, "gelu", wide)
    add = rates.elementwise(dtype, "add", row)
    forward = 2 * norm.forward + gelu.forward + 2 * add.forward
    backward = 2 * norm.backward + gelu.backward + 2 * add.backward
    backward += rates.elementwise(dtype, "copy", qkv).backward
    backward += sum(rates.elementwise(dtype, "sum", numel).backward for numel in (qkv, row, wide, row))
    return Both(shape.layers * forward, shape.layers * backward)


def _blocks(
    shape: Shape, rates: Rates, dtype: str, batch: float, tokens: float, tp: int, *, trained: bool = True,
    compiled: bool = False,
) -> Both:  # fmt: skip
    """All blocks, as the sum of their kernels. `batch` are sequences of the whole length, of which attention is."""
    parts = (
        _products(shape, rates, dtype, tokens, tp, trained=trained),
        _attention(shape, rates, dtype, batch, tp),
        _between(shape, rates, dtype, tokens, tp, compiled=compiled),
    )
    return Both(*(sum(part[at] for part in parts) for at in (0, 1)))


class Whole(NamedTuple):
    """A block that was measured whole: its size, and its seconds over the sum of its kernels'."""

    tokens: float
    hidden: float
    forward: float
    backward: float


def wholes(rates: Rates, dtype: str) -> list[Whole]:
    """All blocks that were measured whole."""
    found = []
    for tokens, hidden, head, length, forward, backward in rates.blocks(dtype):
        shape = Shape(layers=1, hidden=int(hidden), heads=int(hidden // head), seq=int(length))
        kernels = _blocks(shape, rates, dtype, tokens / length, tokens, 1)
        found.append(Whole(tokens, hidden, forward / kernels.forward, backward / kernels.backward))
    return found


def limits(rates: Rates, dtype: str) -> list[Whole]:
    """Of blocks that ran for seconds: their seconds over those of the same blocks in short timings."""
    short = {tuple(row[:2]): sum(row[4:]) for row in rates.blocks(dtype)}
    rows = rates.sustained(dtype)
    return [Whole(*row[:2], *[row[4] / short[tuple(row[:2])]] * 2) for row in rows if tuple(row[:2]) in short]


def together(rates: Rates, dtype: str, tokens: float, hidden: int) -> Both:
    """What the kernels of blocks of this size take together, over what each takes alone; 1 where no whole blocks were
    measured.

    Never below 1: at one clock, kernels do not take less time together than alone. A record in which they do must have
    timed its blocks at a higher clock than its products (on an H200, whole forwards that were timed after a pause took
    up to 6% less than their products alone), and training has no pauses. Where the record has blocks that ran for
    seconds, the factor is theirs, and may be below 1."""
    rows = rates.remember(("wholes", dtype), lambda: wholes(rates, dtype))
    if not rows:
        return Both(1.0, 1.0)
    long = rates.remember(("limits", dtype), lambda: limits(rates, dtype))
    found = _nearby(rows, tokens, hidden)
    if not long:
        return Both(max(1.0, found.forward), max(1.0, found.backward))
    more = _nearby(long, tokens, hidden)
    return Both(found.forward * more.forward, found.backward * more.backward)


def _nearby(rows: list[Whole], tokens: float, hidden: int) -> Both:
    sizes = [(row.tokens, row.hidden) for row in rows]
    return Both(*(nearby((tokens, hidden), sizes, [row[at] for row in rows]) for at in (2, 3)))


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
    compiled: bool = False,
    tile: int | None = None,
    tiled_mlps: bool = True,
    recomputed: float = 1.0,
) -> ComputeSeconds:
    """Of one micro-batch on one rank. `width` is the bytes per element of what computes; of a model that is not
    `trained` itself, no gradients of its matrices are computed. With `tile`, the loss runs by tiles of so many tokens;
    and MLPs too, which are then computed once more in backward, beside the recomputation of blocks. Where activations
    are not kept, this share of blocks is `recomputed`."""
    dtype, words = DTYPES[width], -(-shape.vocab // tp)
    tokens = batch * cut_shape(shape, sequence).seq
    more = together(rates, dtype, tokens, shape.hidden)
    kernels = _blocks(shape, rates, dtype, batch / sequence, tokens, tp, trained=trained, compiled=compiled)
    blocks = Both(kernels.forward * more.forward / pp, kernels.backward * more.backward / pp)
    head, loss = rates.product(dtype, tokens, shape.hidden, words), _loss(shape, rates, dtype, tokens, words, tile)
    norm = rates.elementwise(dtype, "norm", tokens * shape.hidden)
    embedding = rates.elementwise(dtype, "copy", tokens * shape.hidden).forward
    table = rates.elementwise(dtype, "copy", words * shape.hidden).backward * trained  # the gradient of the embedding
    forward = head.forward + loss.forward + norm.forward + embedding
    backward = head.input_grad + head.weight_grad * trained + loss.backward + norm.backward + embedding + table
    again = 0.0 if policy == "keep" else recomputed * blocks.forward
    if tile is not None and tiled_mlps:
        few = min(tile, tokens)
        mlps = sum(n * rates.product(dtype, few, a, b).forward for a, b, n in shape.mlp_products(tp))
        again += mlps * more.forward * tokens / few / pp
    return ComputeSeconds(blocks.forward + forward / pp, blocks.backward + backward / pp, again)


def _loss(shape: Shape, rates: Rates, dtype: str, tokens: float, words: int, tile: int | None) -> Both:
    """The cross entropy: torch's of fp32 logits, or the one by tiles, which on a GPU has a kernel for 16-bit logits."""
    if tile is None or not rates.cuda or BYTES[dtype] != HALF:
        return rates.loss(dtype, tokens, words)
    return Both(*(rates.moved(dtype, *part) for part in loss_moved(shape, tokens, tile, words)))


def typical_rate(rates: Rates, width: int = 2) -> float:
    """Flops per second of a model of middling size, for models of which only flops are known."""
    found = shape_seconds(REFERENCE, rates, REFERENCE_BATCH, "keep", width=width)
    tokens, attention = REFERENCE_BATCH * REFERENCE.seq, 2 * REFERENCE.layers * REFERENCE.seq * REFERENCE.hidden
    return 6 * tokens * (REFERENCE.matmul_numel + attention) / found.total


def step_compute_s(found: ComputeSeconds, rates: Rates, layers: int, sharded_units: int) -> float:
    """Seconds of a micro-batch: what the device computes, or the host's time to launch that, if it is more: of every
    block, and of the messages of every unit that is sharded. A CPU is its own host: messages add to its compute."""
    messages = sharded_units * rates.unit_host_s
    if not rates.cuda:
        return found.total + messages
    again = 4 / 3 if found.again else 1.0
    return max(found.total, layers * again * rates.block_host_s + messages)
