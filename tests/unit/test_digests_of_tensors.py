"""Digests of what tensors hold: equal bits have equal digests, and any edit that users make changes them."""

from __future__ import annotations

import pytest
import torch

from onefold.state.digests import CHUNK, digests


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize("numel", [1, 7, CHUNK + 5])
def test_every_edit_changes_the_digest_and_a_copy_has_the_same(dtype: torch.dtype, numel: int) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)
    edits = [vector.clone() for _ in range(4)]
    edits[0][0] += 1
    edits[1][-1] = -edits[1][-1] - 1
    edits[2].zero_()
    edits[3].copy_(vector.roll(1) if numel > 1 else vector + 2)
    untouched = vector.clone()
    found = digests([vector, vector.clone(), *edits]).tolist()
    assert torch.equal(vector, untouched), "to look at a tensor is not to change it"
    assert found[0] == found[1] and len(set(found)) == 1 + len(edits)


def test_swapped_chunks_and_swapped_rows_have_other_digests() -> None:
    vector = torch.cat([torch.zeros(CHUNK), torch.ones(CHUNK)])
    assert len(set(digests([vector, vector.flip(0), vector.view(4, -1)[[0, 2, 1, 3]].view(-1)]).tolist())) == 3


def test_a_nan_and_a_signed_zero_count_by_their_bits() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert digests([nan]) == digests([nan.clone()]) and digests([zero]) != digests([-zero])
    assert digests([]).tolist() == [] and digests([zero[:0]]).tolist() == [0]
