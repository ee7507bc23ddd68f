"""What the kernels between the products of a block read and write, in bytes per token: norms, rotary positions, the
nonlinearity, sums. Numbers only.

These kernels are bound by the device's memory, so their bytes, at the rate of a copy, are their seconds. Compiled
blocks (`compile=True`) read and write each tensor once; torch without a compiler runs one kernel for every operator. A
GPT's operators are few, and `onefold measure` times them. A decoder's (Llama, Qwen) are written out as in transformers,
with norms in fp32: they are counted here, operator by operator.
"""

from __future__ import annotations

from typing import NamedTuple

from onefold.cost.decoders import Decoder
from onefold.cost.shapes import Shape

FP32 = 4  # bytes of an element in which transformers computes norms


class Moved(NamedTuple):
    """What kernels of one pass read and write, in bytes per token (in helpers, per element), and how many kernels."""

    bytes: float
    kernels: int

    def __add__(self, other: object) -> Moved:
        assert isinstance(other, Moved)
        return Moved(self.bytes + other.bytes, self.kernels + other.kernels)

    def __mul__(self, times: object) -> Moved:
        assert isinstance(times, int)
        return Moved(self.bytes * times, self.kernels * times)


class Passes(NamedTuple):
    forward: Moved
    backward: Moved


def fused(shape: Shape, width: int, tp: int = 1) -> Passes:
    """A compiled block: one kernel for all that lies between two products. `width` is the bytes of an element.

    Forward reads the input and writes its norm; reads the two parts of a residual sum and writes the sum and its norm;
    adds the last output. Backward of a norm reads a gradient, the input and the gradient that goes past the norm, and
    writes their sum; its weights' gradients are a pass of their own. The nonlinearity's backward also writes its output
    again, for the gradient of the matrix behind.
    """
    row, wide, rotated = shape.hidden, shape.widest_numel / tp, 0.0
    forward, backward = 2, 4  # of the nonlinearity: accesses to each element of its output
    qkv = (shape.attention_numel + 2 * shape.key_numel) / tp
    biases, sums = 2 * row + wide + qkv, 0
    if isinstance(shape, Decoder):
        forward, backward, rotated = 3, 6, (shape.attention_numel + shape.key_numel) / tp
        biases, sums = qkv * shape.qkv_bias, 3 * row  # the inputs' gradients of five products come separately
    return Passes(
        Moved(width * (9 * row + forward * wide + 2 * rotated), 4 + bool(rotated)),
        Moved(width * (12 * row + backward * wide + 2 * rotated + 2 * qkv + biases + sums), 6 + bool(rotated)),
    )


def written_out(shape: Decoder, width: int, tp: int = 1) -> Passes:
    """A block of transformers without a compiler, operator by operator."""
    row, wide = shape.hidden, shape.widest_numel / tp
    rotated = (shape.attention_numel + shape.key_numel) / tp
    qkv = (shape.attention_numel + 2 * shape.key_numel) / tp
    norm, turn = _norm(width), _rotary(width)
    add = Moved(3 * width * row, 1)
    forward = _over(row, norm.forward) * shape.norms + _over(rotated, turn.forward) + add * 2
    forward += Moved(5 * width * wide, 2)  # silu(gate), and its product with up
    backward = _over(row, norm.backward) * shape.norms + _over(rotated, turn.backward)
    backward += add * 5  # the inputs' gradients of queries, keys and values, of gate and up; gradients past the norms
    backward += Moved(9 * width * wide, 3) + Moved(width * qkv * shape.qkv_bias, 3 * shape.qkv_bias)
    return Passes(forward, backward)


def _over(numel: float, each: Moved) -> Moved:
    return Moved(numel * each.bytes, each.kernels)


def _norm(width: int) -> Passes:
    """Per element: x.float(), pow(2), mean, the product with its inverse root, the cast back, the product with weights.
    In backward: the weights' product and its sum; the product; the cast; both sides of the product with the inverse
    root, and a sum; mean; x.pow(1), times 2, times the gradient; the sum of both gradients of x; the cast."""
    cast = width + FP32
    forward = Moved(2 * cast + 5 * FP32 + 2 * width, 8)
    return Passes(forward, Moved(6 * width + 2 * cast + 17 * FP32, 16))


def _rotary(width: int) -> Passes:
    """Per element of queries and keys, for each its own kernels: x * cos + cat(-x2, x1) * sin. In backward: both
    products, -g of a half, each half into zeros, and two sums."""
    return Passes(Moved(10 * width, 10), Moved(15 * width, 18))
