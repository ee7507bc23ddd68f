"""Loss and MLPs computed by tiles of tokens (`tiled_cross_entropy`, `tiled`), in closed form: memory and work.

What an MLP makes of its input, and the logits, exist for one tile at a time. What is left of a block in backward is
attention: queries, keys and values before and after their rotation, their gradients, what the kernel of attention's
backward keeps beside them, and the block's input, norms and sums. That was measured: see ROWS.
"""

from __future__ import annotations

from onefold.cost.activations import ActivationBytes
from onefold.cost.shapes import Shape
from onefold.errors import ConfigError

# Vectors of the hidden size per token that a block holds at most in backward, without MLP and moved inputs; and those
# that the block holds beside them whose backward comes first. Both follow from the peaks of two shapes on an H200, at
# the end and at the start of backward (docs/results/long-context-*-h200.json). These decoders have rotary positions and
# grouped queries, in plain torch; a GPT needs less.
ROWS, FIRST = 31, 6
MOVED = 3  # block inputs that are on their way: one restored, one prefetched, one copied out


def check_tile(tile: int | None, shape: Shape | None, tp: int = 1) -> None:
    if tile is None:
        return
    if type(tile) is not int or tile < 1:
        raise ConfigError(f"tile={tile!r}: a tile has at least one token; give a whole number from 1 on, or none")
    if shape is None:
        raise ConfigError(
            f"tile={tile} needs a shape, by --model or --layers: of a count neither MLPs nor logits are known"
        )
    if tp > 1:
        raise ConfigError(
            f"tile={tile} with tp={tp}: a tiled loss needs a head that is not split; use tp=1, or no tile"
        )


def with_tiles(
    found: ActivationBytes, shape: Shape, batch: int, policy: str, itemsize: int, tile: int
) -> ActivationBytes:
    """The activations of a shape whose loss and MLPs run by tiles, from those without."""
    tokens = batch * shape.seq
    few, row = min(tile, tokens), tokens * shape.hidden * itemsize
    mlp, table = shape.mlp_numel * itemsize, shape.vocab * shape.hidden * itemsize
    kept = found.kept_per_block - tokens * mlp if policy == "keep" else found.kept_per_block
    moved = MOVED if found.host_per_block else 0
    working = max(row, ROWS * row - kept) if policy == "keep" else (ROWS + moved) * row
    return found._replace(
        kept_per_block=kept,
        block=working + few * mlp,
        widest=few * shape.widest_numel * itemsize,
        head=3 * row + few * shape.vocab * itemsize + 2 * table,  # the last: the head's gradient, and a tile's part
        logits=2 * row + table,
        first_backward=FIRST * row,
    )
