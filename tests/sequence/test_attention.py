"""sequence_attention() gives every rank its stretch of one process's attention, and sends what the formulas say."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import onefold
from onefold.comm.meter import Meter
from onefold.comm.sequence import sequence_group
from onefold.parallel.exact_attention import TiledAttention, Visible
from onefold.parallel.ulysses import HeadSplit
from tests.harness import device, run_ranks, run_ranks_raises

BATCH, WIDTH, EACH, TILE = 2, 4, 6, 4  # EACH tokens a rank; a tile that divides neither them nor the whole


class Case(NamedTuple):
    heads: int
    key_heads: int
    causal: bool = True
    window: int | None = None
    packed: bool = False
    method: str = "auto"
    dtype: torch.dtype = torch.float64
    balanced: bool = False


def cases(ranks: int) -> list[Case]:
    """Heads that the ranks divide, with key heads that they divide, share evenly or unevenly; and heads they do not."""
    divided, shared, odd = ((4, 4), (12, 3), (6, 2)) if ranks == 4 else ((4, 2), (6, 3), (3, 1))
    kinds = list(product((True, False), (None, 5), (False, True)))  # causal, window, packed
    found = [Case(*shared, *kind) for kind in kinds] + [Case(*odd, *kind) for kind in kinds]
    found += [Case(*divided), Case(8, 1, False), Case(8, 2, True, 5, True), Case(*divided, True, 5, method="ring")]
    found += [Case(*odd, *kind, balanced=True) for kind in kinds]
    found += [Case(*shared, *kind, balanced=True) for kind in kinds if all(kind) or not any(kind)]
    return [*found, Case(4, 2, dtype=torch.bfloat16), Case(3, 1, dtype=torch.bfloat16, balanced=True)]


def drawn(case: Case, tokens: int) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """The same on every rank: q, k and v of the whole sequence, documents, and a gradient for the output."""
    torch.manual_seed(1)
    shapes = [(BATCH, n, tokens, WIDTH) for n in (case.heads, case.key_heads, case.key_heads, case.heads)]
    *qkv, grad = (torch.randn(shape, dtype=torch.float64).to(case.dtype) for shape in shapes)
    documents = (torch.rand(BATCH, tokens) < 0.3).cumsum(1) if case.packed else None
    if documents is not None:
        documents[0, -3:] = -1  # padding
        grad[0, :, -3:] = 0
    return [one.requires_grad_() for one in qkv], documents, grad


def whole(case: Case, qkv: list[Tensor], documents: Tensor | None) -> Tensor:
    """One process, by torch, with a mask of tokens × tokens."""
    at = torch.arange(qkv[0].shape[2])
    apart = at[:, None] - at
    seen = apart >= 0 if case.causal else torch.ones_like(apart, dtype=torch.bool)
    if case.window is not None:
        seen = seen & (apart.abs() < case.window)
    if documents is not None:
        seen = seen & ((documents[:, :, None] == documents[:, None]) & (documents >= 0)[:, :, None])[:, None]
    out = F.scaled_dot_product_attention(*qkv, attn_mask=seen, enable_gqa=True)
    return out if documents is None else torch.where((documents >= 0)[:, None, :, None], out, 0)


def ulysses_bytes(case: Case, ranks: int, rank: int) -> int:
    """Of a forward and a backward: queries and output, and the key and value heads that each peer needs."""
    split = HeadSplit(case.heads, case.key_heads, ranks)
    peers = [one for one in range(ranks) if one != rank]
    needed = sum(split.keys(one).stop - split.keys(one).start for one in peers)
    mine = (split.keys(rank).stop - split.keys(rank).start) * len(peers)
    per_head = BATCH * EACH * WIDTH * case.dtype.itemsize
    return per_head * (4 * case.heads * len(peers) // ranks + 2 * needed + 2 * mine)


def tokens_of(case: Case, ranks: int, rank: int) -> list[int]:
    """The positions of a rank's tokens."""
    if not case.balanced:
        return list(range(rank * EACH, (rank + 1) * EACH))
    half = EACH // 2
    return [*range(rank * half, (rank + 1) * half), *range((2 * ranks - 1 - rank) * half, (2 * ranks - rank) * half)]


def ring_bytes(case: Case, ranks: int, rank: int) -> int:
    """Pieces of keys and values to ranks that see some of them, twice; and gradients, in fp32 at least, to ranks whose
    keys were seen."""

    def seen(queries: int, keys: int) -> int:
        """How many tokens the pieces of one rank have of which another sees some."""
        theirs, half = tokens_of(case, ranks, keys), EACH // 2 if case.balanced else EACH
        gaps = [[at - other for at in tokens_of(case, ranks, queries)] for other in theirs]
        found = [any((gap >= 0 or not case.causal) and abs(gap) < (case.window or 99) for gap in row) for row in gaps]
        return sum(half * any(found[start : start + half]) for start in range(0, EACH, half))

    per_token = 2 * BATCH * WIDTH * case.key_heads
    peers = [one for one in range(ranks) if one != rank]
    there, back = sum(seen(one, rank) for one in peers), sum(seen(rank, one) for one in peers)
    return per_token * (2 * there * case.dtype.itemsize + back * max(4, case.dtype.itemsize))


def compare_all() -> list[str]:
    """On every rank: what differs from one process, or from the formulas."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    mesh, wrong = onefold.mesh(sequence=ranks, device=device()), list[str]()
    group = sequence_group(mesh, torch.device(device()))
    group.balanced = None  # of a batch that another test has cut
    for case in cases(ranks):
        qkv, documents, grad = drawn(case, ranks * EACH)
        mine = tokens_of(case, ranks, rank)
        wanted = whole(case, qkv, documents)
        gradients = torch.autograd.grad(wanted, qkv, grad)
        local = [one.detach()[:, :, mine].to(device()).requires_grad_() for one in qkv]
        group.serve(meter := Meter(), 60)
        out = onefold.sequence_attention(
            *local, mesh, causal=case.causal, window=case.window, method=case.method, tile=TILE, balanced=case.balanced,
            documents=None if documents is None else documents[:, mine].to(device()),
        )  # fmt: skip
        found = torch.autograd.grad(out, local, grad[:, :, mine].to(device()))
        tolerance = 1e-12 if case.dtype is torch.float64 else 3e-2
        for name, ours, theirs in zip(("out", "q", "k", "v"), (out, *found), (wanted, *gradients), strict=True):
            error = float((ours.cpu() - theirs[:, :, mine]).detach().abs().max())
            if not error <= tolerance:
                wrong.append(f"{case}: {name} differs by {error:g}")
        ring = case.method == "ring" or case.heads % ranks
        formula = (ring_bytes if ring else ulysses_bytes)(case, ranks, rank)
        sent = meter.running["sequence", "all-to-all"].sent_bytes
        if sent != formula:
            wrong.append(f"{case}: sent {sent} bytes, by formula {formula}")
        calls = meter.running["sequence", "all-to-all"].calls
        if calls != (3 * (ranks - 1) if ring else 4):
            wrong.append(f"{case}: {calls} calls")
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_and_its_gradients_are_one_process_s_and_bytes_are_by_formula(ranks: int) -> None:
    assert [row for rank in run_ranks(ranks, compare_all) for row in rank] == []


@pytest.mark.parametrize("packed", [False, True])
def test_tiles_of_any_size_give_torch_s_attention(packed: bool) -> None:
    for case in (Case(6, 2, *rest, packed) for rest in product((True, False), (None, 5))):
        qkv, documents, grad = drawn(case, 13)
        visible = Visible(case.causal, case.window, documents)
        wanted = whole(case, qkv, documents)
        gradients = torch.autograd.grad(wanted, qkv, grad)
        for tile in (1, 5, 64):
            out = TiledAttention.apply(*qkv, visible, WIDTH**-0.5, tile)
            torch.testing.assert_close(out, wanted)
            torch.testing.assert_close(torch.autograd.grad(out, qkv, grad), gradients)


def documents_once() -> list[int]:
    """How often documents were sent: by two blocks that are given the same tensor, after it changed, and another."""
    mesh = onefold.mesh(sequence=2)
    group = sequence_group(mesh, torch.device("cpu"))
    group.serve(meter := Meter(), 60)
    q = torch.randn(1, 2, 4, 4)
    documents, calls = torch.zeros(1, 4, dtype=torch.long), []
    for turn in range(4):
        if turn == 2:
            documents[0, 0] = 1 - torch.distributed.get_rank()
        if turn == 3:
            documents = documents.clone()
        onefold.sequence_attention(q, q, q, mesh, documents=documents)
        calls.append(meter.running["sequence-documents", "all-gather"].calls)
    assert meter.running["sequence-documents", "all-gather"].sent_bytes == 3 * 4 * 4  # three times four int32
    return calls


def test_documents_travel_once_for_all_blocks_of_a_batch() -> None:
    assert run_ranks(2, documents_once) == [[1, 1, 2, 3]] * 2


def unequal() -> None:
    q = torch.randn(1, 2, 4 + torch.distributed.get_rank(), 4)
    onefold.sequence_attention(q, q, q, onefold.mesh(sequence=2))


def test_stretches_of_unequal_length_raise_on_all_ranks() -> None:
    for error in run_ranks_raises(2, unequal):
        assert error.type_name == "MismatchError" and "stretches of equal length" in error.message


def otherwise_cut() -> None:
    mesh, q = onefold.mesh(sequence=2), torch.randn(1, 2, 4, 4)
    onefold.cut_sequence({"input_ids": torch.zeros(1, 8, dtype=torch.long)}, mesh)
    onefold.sequence_attention(q, q, q, mesh, balanced=True)


def test_stretches_that_were_cut_otherwise_raise() -> None:
    for error in run_ranks_raises(2, otherwise_cut):
        assert error.type_name == "ConfigError" and "cut_sequence(balanced=False) cut the batch" in error.message


def not_divided() -> None:
    q = torch.randn(1, 3, 4, 4)
    onefold.sequence_attention(q, q, q, onefold.mesh(sequence=2), method="ulysses")


def test_heads_that_ulysses_cannot_divide_are_named() -> None:
    for error in run_ranks_raises(2, not_divided):
        assert error.type_name == "ConfigError" and "divides 3 heads among 2 ranks" in error.message


Q = torch.zeros(1, 4, 6, 8)


@pytest.mark.parametrize(
    ("arguments", "more", "message"),
    [
        ((Q, Q[:, :3], Q[:, :3]), {}, "4 query heads and 3 key heads"),
        ((Q, Q[..., :4], Q), {}, "q and k of the same width"),
        ((Q[:, :, :1], Q, Q), {}, "a cache of earlier keys is unsupported"),
        ((Q, Q, Q.double()), {}, "give all one float type"),
        ((Q, Q, Q), {"window": 0}, "a window has at least one position"),
        ((Q, Q, Q), {"method": "tree"}, "use one of auto, ulysses, ring"),
        ((Q, Q, Q), {"documents": torch.zeros(1, 7, dtype=torch.long)}, r"\(batch, tokens\) = \(1, 6\)"),
    ],
)
def test_what_attention_cannot_take_is_named(arguments, more, message) -> None:
    with pytest.raises(onefold.ConfigError, match=message):
        onefold.sequence_attention(*arguments, None, **more)
