"""sequence_attention(): exact attention over sequences that are cut over the ranks of the mesh axis "sequence"."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from onefold.comm.mesh import Mesh
from onefold.comm.sequence import SequenceGroup, sequence_group
from onefold.errors import ConfigError
from onefold.parallel.exact_attention import TILE, TiledAttention, Visible
from onefold.parallel.ring import RingAttention, RingOrder
from onefold.parallel.stretches import by_rank, in_order
from onefold.parallel.ulysses import HeadSplit, ToHeads, ToTokens

METHODS = ("auto", "ulysses", "ring")


@torch._disable_dynamo
def sequence_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh | None,
    *,
    causal: bool = True,
    documents: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    method: Literal["auto", "ulysses", "ring"] = "auto",
    balanced: bool = False,
    tile: int = TILE,
) -> Tensor:
    """Attention over whole sequences, of which each rank of the mesh axis "sequence" has one stretch, in rank order.

    Shapes are those of torch's scaled_dot_product_attention: `q` (batch, heads, tokens, width), `k` and `v` with as
    many heads or a divisor of them (grouped queries), all of this rank's stretch, which is equally long on all ranks.
    The result is this rank's stretch of the attention of one process, to rounding. Without a mesh, or without that
    axis, it is plain attention.

    `documents` (batch, tokens) numbers the documents of packed sequences: tokens see those of equal number, and
    negative numbers are padding, which sees nothing and is not seen. `window`: a token sees so many positions, its own
    and those before it, and also those after it where attention is not causal. `scale` is 1/√width by default.

    "ulysses" trades tokens for heads, in two all-to-alls, and needs heads that are a multiple of the ranks; "ring"
    sends keys and values round, for any number of heads; "auto" is the first where it can be. Documents, windows and
    the ring are computed over tiles of `tile` × `tile` scores, in fp32. `balanced` stretches are those of
    `cut_sequence(…, balanced=True)`, by which all ranks of a causal ring compute equally much. Collective over the
    axis.

    >>> import torch, onefold
    >>> onefold.init()
    >>> mesh = onefold.mesh(sequence=1)
    >>> q, k, v = torch.randn(3, 1, 4, 10, 8).unbind()
    >>> out = onefold.sequence_attention(q, k, v, mesh)
    >>> whole = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> torch.testing.assert_close(out, whole)
    """
    _check(q, k, v, documents, window, method, tile)
    group = group_of(mesh, q.device)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if group is None:
        return _attend(q, k, v, Visible(causal, window, documents), scale, tile)
    with _attending(group):
        asked = f"causal={causal}, window={window}, method={method!r}, balanced={balanced}"
        _compare_shapes(group, q, k, v, f"{asked}, {'no ' if documents is None else ''}documents")
        group.check_balance(q.shape[2], balanced)
        if documents is not None:
            documents = group.whole_documents(documents)
            documents = in_order(documents, group.size, 1) if balanced else documents
        visible, divides = Visible(causal, window, documents), q.shape[1] % group.size == 0
        if method == "ring" or (method == "auto" and not divides):
            order = RingOrder(group.comm, q.shape[2], visible, balanced)
            out: Tensor = RingAttention.apply(q, k, v, order, scale, tile)
            return out
        if not divides:
            raise ConfigError(
                f'sequence_attention(method="ulysses") divides {q.shape[1]} heads among {group.size} ranks of the axis '
                f'"sequence", which is no whole number of heads; use method="ring" or "auto", or another mesh'
            )
        return _ulysses(group, q, k, v, visible, scale, tile, balanced)


def group_of(mesh: Mesh | None, device: torch.device) -> SequenceGroup | None:
    """The ranks among which a mesh cuts sequences; None if it cuts none."""
    if mesh is None:
        return None
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh={mesh!r} is not a torch DeviceMesh; make one with onefold.mesh(sequence=…)")
    names = mesh.mesh_dim_names or ()
    if "sequence" not in names or mesh.size(names.index("sequence")) == 1:
        return None
    return sequence_group(mesh, device)


def _ulysses(
    group: SequenceGroup, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, tile: int, balanced: bool
) -> Tensor:
    split = HeadSplit(q.shape[1], k.shape[1], group.size)
    q, k, v = ToHeads.apply(q, k, v, group.comm, split)
    chosen = split.key_of_query(group.rank)
    if chosen is not None:  # key heads whose queries lie on two ranks
        k, v = (torch.stack([one[:, head] for head in chosen], dim=1) for one in (k, v))
    if balanced:
        q, k, v = (in_order(one, group.size, 2) for one in (q, k, v))
    whole = _attend(q, k, v, visible, scale, tile)
    out: Tensor = ToTokens.apply(by_rank(whole, group.size, 2) if balanced else whole, group.comm)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float, tile: int) -> Tensor:
    """Attention of whole sequences, of the heads that are here."""
    if visible.window is None and visible.documents is None:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=visible.causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    out: Tensor = TiledAttention.apply(q, k, v, visible, scale, tile)
    return out


@contextmanager
def _attending(group: SequenceGroup) -> Iterator[None]:
    """Counts the call. Inside, torch's own attention is called by us."""
    group.calls, group.attending = group.calls + 1, True
    try:
        yield
    finally:
        group.attending = False


def _compare_shapes(group: SequenceGroup, q: Tensor, k: Tensor, v: Tensor, asked: str) -> None:
    """Raises on all ranks if their stretches are not equal, or what they ask for."""
    mine = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} of {q.dtype}, {asked}"
    group.compare_shapes(
        mine,
        "they need the same arguments, and stretches of equal length, as onefold.cut_sequence makes them of one batch",
    )


def _check(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, method: str, tile: int
) -> None:
    if type(tile) is not int or tile < 1:
        raise ConfigError(
            f"sequence_attention(tile={tile!r}): a tile has at least one token; give a whole number from 1 on"
        )
    if method not in METHODS:
        raise ConfigError(f"sequence_attention(method={method!r}) is unsupported; use one of {', '.join(METHODS)}")
    if q.dim() != 4 or k.dim() != 4 or k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1]:
        raise ConfigError(
            f"sequence_attention() got q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}; it needs (batch, "
            f"heads, tokens, width) each, k and v of the same heads and tokens, q and k of the same width"
        )
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ConfigError(
            f"sequence_attention() got q {tuple(q.shape)} and k {tuple(k.shape)}: it attends within one sequence, so "
            f"both have the same batch and tokens; a cache of earlier keys is unsupported"
        )
    if q.shape[1] % k.shape[1]:
        raise ConfigError(
            f"sequence_attention() got {q.shape[1]} query heads and {k.shape[1]} key heads; each key head serves "
            f"equally many query heads"
        )
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise ConfigError(f"sequence_attention() got q {q.dtype}, k {k.dtype} and v {v.dtype}; give all one float type")
    if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise ConfigError(f"sequence_attention(window={window!r}): a window has at least one position; None has no end")
    if documents is not None and (documents.shape != (q.shape[0], q.shape[2]) or documents.is_floating_point()):
        raise ConfigError(
            f"sequence_attention() got documents {tuple(documents.shape)} of {documents.dtype}; it needs whole numbers "
            f"of shape (batch, tokens) = {(q.shape[0], q.shape[2])}, those of this rank's stretch"
        )
