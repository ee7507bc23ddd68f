"""cut_sequence(): this rank's stretch of a batch whose sequences are cut over the mesh axis "sequence".

1 labels are shifted, so that each token's target lies beside it  2 positions and documents are numbered in the whole
sequence  3 all is padded to equal stretches  4 each rank takes its own. Ranks of one sequence are given the same batch,
so nothing is sent but a digest, by which ranks find out that they were given different ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn.functional import pad

from onefold.comm.mesh import Mesh
from onefold.comm.sequence import sequence_group
from onefold.errors import ConfigError
from onefold.parallel.stretches import Span, pieces

TOKENS = ("input_ids", "inputs_embeds")  # one of them says how many tokens there are
LENGTHS = ("cu_seqlens", "cu_seq_lens_q")  # where documents begin, and the end of the last
DROPPED = (*LENGTHS, "cu_seq_lens_k", "max_length_q", "max_length_k", "attention_mask", "labels")
PADDING = -1  # the document of padding
SAME = (
    'give all ranks that differ along the mesh axis "sequence" alone the same batch: read data by the coordinates '
    '"shard" and "replica"'
)


def cut_sequence(
    batch: Mapping[str, Any],
    mesh: Mesh | None,
    *,
    causal: bool = True,
    balanced: bool = False,
    pad_token_id: int = 0,
    ignore_index: int = -100,
) -> dict[str, Any]:
    """This rank's stretch of a batch of whole sequences, along the mesh axis "sequence".

    All ranks of one sequence give the same batch, as transformers has it: `input_ids` (batch, tokens), or
    `inputs_embeds`. Other tensors (batch, tokens, …) are cut too. Sequences that the ranks do not divide are padded at
    their end. The result has

    - `shift_labels` instead of `labels`: the target of each token, `ignore_index` where there is none; labels are
      shifted before they are cut. A batch that has `shift_labels` already keeps them.
    - `position_ids`: as given, or counted from the start of the sequence.
    - `documents`, for `sequence_attention`, where tokens do not all see each other: numbered from `documents`,
      `cu_seqlens`, or `position_ids` that start again; padding, by `attention_mask` (batch, tokens), is -1.

    With `balanced` a stretch is two pieces, as far from the start of the sequence as from its end, so that all ranks of
    a causal ring compute equally much: give `sequence_attention` the same `balanced`.

    Give it tensors in host memory: a mask or positions on a device are taken to say something. Without a mesh, or
    without that axis, the stretch is the whole. Collective: ranks compare their batches, by a digest in host memory and
    for the first, else by their shapes.

    >>> import torch, onefold
    >>> onefold.init()
    >>> tokens = torch.arange(6).view(1, 6)
    >>> stretch = onefold.cut_sequence({"input_ids": tokens, "labels": tokens}, onefold.mesh(sequence=1))
    >>> stretch["shift_labels"].tolist()
    [[1, 2, 3, 4, 5, -100]]
    """
    rank, ranks = place_along(mesh)
    rows, tokens = _tokens(batch)
    whole = _shifted(batch, ignore_index)
    device = next(batch[name].device for name in TOKENS if name in batch)
    whole["position_ids"] = _positions(batch, rows, tokens, device)
    if ranks > 1 and mesh is not None:
        _compare(batch, mesh, balanced)
    halves = 2 if balanced and ranks > 1 else 1
    each = -(-tokens // (ranks * halves)) * halves
    documents = _documents(batch, rows, tokens, device)
    if documents is None and each * ranks > tokens and not causal:
        documents = torch.zeros(rows, tokens, dtype=torch.int32, device=device)
    if documents is not None:
        whole["documents"] = documents
    fill = {"shift_labels": ignore_index, "documents": PADDING, "input_ids": pad_token_id}
    mine = pieces(rank, ranks, each, balanced=halves == 2)
    return {
        name: _stretch(name, one, (rows, tokens), each * ranks, mine, fill.get(name, 0)) for name, one in whole.items()
    }


def place_along(mesh: Mesh | None) -> tuple[int, int]:
    """This rank's place along "sequence", and the ranks there."""
    names = mesh.mesh_dim_names or () if mesh is not None else ()
    if mesh is None or "sequence" not in names:
        return 0, 1
    axis, coordinate = names.index("sequence"), mesh.get_coordinate()
    assert coordinate is not None, "this rank is not in the mesh"
    return coordinate[axis], mesh.size(axis)


def note_stretches(mesh: Mesh | None, *, balanced: bool) -> None:
    """Says how the next batch is cut, for a model that cuts its batches without cut_sequence()."""
    if mesh is not None and place_along(mesh)[1] > 1:
        sequence_group(mesh, torch.device(mesh.device_type)).balanced = balanced


def _compare(batch: Mapping[str, Any], mesh: Mesh, balanced: bool) -> None:
    """Raises on all ranks if those of one sequence were given different batches."""
    given = next(batch[name] for name in TOKENS if name in batch)
    group, mine = sequence_group(mesh, torch.device(mesh.device_type)), f"a batch {tuple(given.shape)}"
    if not given.is_cuda or group.batches == 0:  # on a device the host would wait for it, in every step
        mine += f" of digest {_digest(batch):08x}"
    group.batches, group.balanced = group.batches + 1, balanced
    group.compare(mine, SAME)


def _digest(batch: Mapping[str, Any]) -> int:
    """A checksum of all tensors in a batch, and of their names."""
    found = 0
    for name in sorted(name for name, one in batch.items() if isinstance(one, Tensor)):
        flat = batch[name].detach().cpu().contiguous().view(-1)
        found = crc32(flat.view(torch.uint8).numpy(), crc32(name.encode(), found))
    return found


def _tokens(batch: Mapping[str, Any]) -> tuple[int, int]:
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"cut_sequence() needs a batch by names, such as {{'input_ids': …}}, and was given {type(batch).__name__}"
        )
    for name in TOKENS:
        if isinstance(batch.get(name), Tensor) and batch[name].dim() >= 2:
            return batch[name].shape[0], batch[name].shape[1]
    raise ConfigError(
        f"cut_sequence() needs input_ids (batch, tokens) or inputs_embeds (batch, tokens, width), and the batch has "
        f"{', '.join(batch) or 'nothing'}"
    )


def _shifted(batch: Mapping[str, Any], ignore_index: int) -> dict[str, Any]:
    """The batch with shifted labels, without what documents and positions are made of."""
    whole = {name: one for name, one in batch.items() if name not in (*DROPPED, "documents") and one is not None}
    labels = batch.get("labels")
    if labels is not None and "shift_labels" not in whole:
        whole["shift_labels"] = pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return whole


def _positions(batch: Mapping[str, Any], rows: int, tokens: int, device: torch.device) -> Tensor:
    given = batch.get("position_ids")
    if given is None:
        return torch.arange(tokens, device=device).expand(rows, -1)
    if given.shape[-1] != tokens or given.dim() > 2:
        raise ConfigError(
            f"cut_sequence() got position_ids {tuple(given.shape)} for input_ids of {(rows, tokens)} tokens, "
            f"and needs the same shape: positions of several dimensions are unsupported"
        )
    found: Tensor = given.view(-1, tokens).expand(rows, -1)
    return found


def _documents(batch: Mapping[str, Any], rows: int, tokens: int, device: torch.device) -> Tensor | None:
    """The document of each token; None if all are in one, and nothing is padding."""
    found = _numbered(batch, rows, tokens, device)
    mask = batch.get("attention_mask")
    if mask is None:
        return found
    if not isinstance(mask, Tensor):
        raise ConfigError(
            f"cut_sequence() got attention_mask as {type(mask).__name__}; it needs a tensor (batch, tokens)"
        )
    if mask.shape != (rows, tokens):
        raise ConfigError(
            f"cut_sequence() got attention_mask {tuple(mask.shape)}; it needs (batch, tokens) = {(rows, tokens)}, 0 "
            f"for padding. Other masks are unsupported: documents, causal attention and windows need none"
        )
    if not mask.is_cuda and bool((mask != 0).all()):
        return found
    some = torch.zeros(rows, tokens, dtype=torch.int32, device=mask.device) if found is None else found
    return torch.where(mask != 0, some, PADDING)


def _numbered(batch: Mapping[str, Any], rows: int, tokens: int, device: torch.device) -> Tensor | None:
    given = batch.get("documents")
    if given is not None:
        if given.shape != (rows, tokens):
            raise ConfigError(
                f"cut_sequence() got documents {tuple(given.shape)}; it needs (batch, tokens) = {(rows, tokens)}"
            )
        found: Tensor = given.to(torch.int32)
        return found
    for name in LENGTHS:
        if batch.get(name) is not None:
            return _by_lengths(name, batch[name], rows, tokens, device)
    positions = batch.get("position_ids")
    if positions is None:
        return None
    again = _positions(batch, rows, tokens, device).diff(dim=1) != 1  # a document starts here
    if not again.is_cuda and not bool(again.any()):
        return None
    return pad(again.cumsum(1, dtype=torch.int32), (1, 0))


def _by_lengths(name: str, ends: Tensor, rows: int, tokens: int, device: torch.device) -> Tensor:
    if rows != 1 or ends.dim() != 1:
        raise ConfigError(
            f"cut_sequence() got {name} {tuple(ends.shape)} with a batch of {rows}; documents of a batch of one "
            f"sequence are numbered by it. For more, give documents (batch, tokens)"
        )
    if not ends.is_cuda and (not len(ends) or ends[0] != 0 or ends[-1] != tokens or bool((ends.diff() < 0).any())):
        raise ConfigError(
            f"cut_sequence() got {name} {ends.tolist()} for {tokens} tokens; it needs the first token of each document "
            f"and the end of the last, in order: 0 first, {tokens} last"
        )
    at = torch.arange(tokens, device=device)
    return torch.bucketize(at, ends.to(device), right=True).to(torch.int32).sub_(1).view(1, tokens)


def _stretch(name: str, one: Any, shape: tuple[int, int], length: int, mine: Sequence[Span], value: int) -> Any:
    """The pieces of this rank of a sequence padded to a length: a copy, so that the whole can be freed."""
    if not isinstance(one, Tensor) or one.dim() == 0:
        return one
    if tuple(one.shape[:2]) != shape:
        raise ConfigError(
            f"cut_sequence() got {name} {tuple(one.shape)}; it cuts tensors of (batch, tokens, …) = {shape}, and "
            f"leaves numbers as they are; take {name} out of the batch"
        )
    missing = length - shape[1]
    padded = pad(one, (0, 0) * (one.dim() - 2) + (0, missing), value=value) if missing else one
    return torch.cat([padded[:, slice(*piece)] for piece in mine], dim=1)
