"""Loss and MLPs computed tile by tile (`tiled_cross_entropy`, `tiled`), in closed form: activations, and bytes moved.

The intermediate activations of an MLP, and the logits, exist for one tile at a time. The rest of a block was measured:
in backward it holds queries, keys and values before and after their rotation, their gradients, what the kernel of
attention's backward keeps beside them, and the block's input, norms and sums.
"""

from __future__ import annotations

import math

from onefold.cost.activations import ActivationBytes
from onefold.cost.between import Moved
from onefold.cost.shapes import Shape
from onefold.errors import ConfigError

# In backward a block holds up to so many activations of tokens × hidden, and of tokens × the width of all queries,
# without its MLP and without block inputs in transfer; the first block of backward holds FIRST_BLOCK_ROWS more. The sum
# of the first two, and the third, are fitted to peaks of Qwen2.5's 1.5B and 7B shapes on an H200
# (docs/results/long-context-*-h200.json). Their queries are as wide as the hidden size; how the sum divides is counted.
HIDDEN_ROWS, QUERY_ROWS, FIRST_BLOCK_ROWS = 15, 16, 6
IN_TRANSFER = 3  # block inputs on the device with "+host": one restored, one prefetched, one copied out
MLP_KERNELS, LOSS_KERNELS = 22, 5  # that the host launches for one tile, in forward and backward
LAUNCH_S = 6e-6  # of the host, for one kernel, where it was not measured: about that of the H200's record
FP32, HALF = 4, 2  # bytes of an element in which the gradient of the head is summed over tiles, and of logits


def check_tile(tile: int | None, shape: Shape | None, tp: int = 1) -> None:
    if tile is None:
        return
    if type(tile) is not int or tile < 1:
        raise ConfigError(f"tile={tile!r}: a tile has at least one token; give a whole number from 1 on, or none")
    if shape is None:
        raise ConfigError(
            f"tile={tile} needs a shape, by --model or --layers: a number of parameters does not give the sizes of "
            f"MLPs and logits"
        )
    if tp > 1:
        raise ConfigError(
            f"tile={tile} with tp={tp}: a tiled loss needs a head that is not split; use tp=1, or no tile"
        )


def with_tiled_loss(
    found: ActivationBytes, shape: Shape, batch: int, itemsize: int, tile: int, *, trained: bool = True
) -> ActivationBytes:
    """The activations of a shape whose loss runs by tiles, from those without. If the head is not `trained`, it has no
    gradient."""
    tokens = batch * shape.seq
    tile_tokens, hidden_bytes = min(tile, tokens), tokens * shape.hidden * itemsize
    head_numel = shape.vocab * shape.hidden * trained
    rounded = head_numel * itemsize if itemsize < FP32 else 0  # the sum of the head's gradient, in its dtype
    return found._replace(
        head=3 * hidden_bytes + FP32 * head_numel + max(tile_tokens * shape.vocab * itemsize, rounded),
        logits=2 * hidden_bytes + head_numel * itemsize,
    )


def with_tiled_mlps(
    found: ActivationBytes, shape: Shape, batch: int, policy: str, itemsize: int, tile: int
) -> ActivationBytes:
    """The activations of a shape whose MLPs run by tiles, from those without."""
    tokens = batch * shape.seq
    tile_tokens, hidden_bytes, mlp_bytes = (
        min(tile, tokens),
        tokens * shape.hidden * itemsize,
        shape.mlp_numel * itemsize,
    )
    kept = found.kept_per_block - tokens * mlp_bytes if policy == "keep" else found.kept_per_block
    working = HIDDEN_ROWS * hidden_bytes + QUERY_ROWS * tokens * shape.attention_numel * itemsize
    if policy == "keep":
        working = max(hidden_bytes, working - kept)
    elif found.host_per_block:
        working += IN_TRANSFER * hidden_bytes
    return found._replace(
        kept_per_block=kept,
        block=working + tile_tokens * mlp_bytes,
        widest=tile_tokens * shape.widest_numel * itemsize,
        first_backward=FIRST_BLOCK_ROWS * hidden_bytes,
    )


def loss_moved(shape: Shape, tokens: float, tile: int, words: int) -> tuple[Moved, Moved]:
    """What a loss by tiles reads and writes beside its products in 16 bits on a GPU, in all: one kernel reads the
    logits of a tile twice and writes their gradient over them; the head's gradient is set to zero and added up in fp32,
    rounded, and multiplied by the gradient that arrives."""
    tiles, head = math.ceil(tokens / tile), words * shape.hidden
    return Moved(3 * HALF * tokens * words, tiles), Moved(head * (2 * FP32 + 3 * HALF), 3)


def launch_s(tokens: float, tile: int, mlps: float, launch: float) -> float:
    """Seconds of the host to launch a loss and this many MLPs by tiles: with small tiles more than the device takes.

    >>> round(launch_s(tokens=1000, tile=1, mlps=2, launch=6e-6), 3)
    0.294
    """
    return math.ceil(tokens / tile) * (MLP_KERNELS * mlps + LOSS_KERNELS) * launch
