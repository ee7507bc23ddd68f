"""What a rank keeps for backward falls as 1/N of the sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import onefold
from tests.harness import run_ranks
from tests.models import LongLanguage
from tests.sequence.runs import Run, attention_over

ROWS, TOKENS, WIDTH, BLOCKS = 2, 64, 24, 2


def kept_bytes(ranks: int, heads: int) -> int:
    """On a rank: bytes that autograd keeps of a forward, each memory once, parameters left out."""
    run, mesh = Run(heads=heads, key_heads=heads), onefold.mesh(sequence=ranks)
    model = LongLanguage(attention_over(mesh, run), heads, heads, dim=WIDTH)
    batch = {"input_ids": torch.zeros(ROWS, TOKENS, dtype=torch.long)}
    mine = onefold.cut_sequence({**batch, "labels": batch["input_ids"]}, mesh)
    parameters, kept = {one.data_ptr() for one in model.parameters()}, dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = onefold.token_mean(model(**mine), TOKENS, mesh)
    of_head = model.head.weight.nbytes + loss.nbytes  # the tiled loss keeps the gradient of the head, on every rank
    return sum(kept.values()) - of_head


@pytest.mark.parametrize(("heads", "more"), [(4, 1), (3, 0)], ids=["ulysses", "ring"])
def test_what_is_kept_for_backward_falls_as_one_over_n(heads: int, more: int) -> None:
    """With Ulysses, each block keeps its attention's output twice: of some heads, and of some tokens."""
    whole = run_ranks(1, kept_bytes, 1, heads)[0] + more * BLOCKS * ROWS * TOKENS * WIDTH * 4
    for ranks in (2, 4):
        for kept in run_ranks(ranks, kept_bytes, ranks, heads):
            assert kept * ranks == pytest.approx(whole, rel=0.01)
