"""A model that does not attend across the cuts, and ranks that do not read the same sequences, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from tests.harness import run_ranks
from tests.models import LongLanguage
from tests.sequence.runs import Run, attention_over, masked_attention


def refused() -> dict[str, str]:
    """On a rank: what was raised."""
    mesh, rank = onefold.mesh(sequence=2), torch.distributed.get_rank()
    ids = torch.zeros(1, 8, dtype=torch.long)
    mine = onefold.cut_sequence({"input_ids": ids, "labels": ids}, mesh)
    encoder = nn.TransformerEncoderLayer(8, 2, batch_first=True)
    plain = onefold.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh=mesh)
    local = onefold.shard(LongLanguage(masked_attention, 4, 4), stage=3, mesh=mesh)
    good = onefold.shard(LongLanguage(attention_over(mesh, Run()), 4, 4), stage=3, mesh=mesh)
    heads = [torch.zeros(1, 2, 4, 4)] * 3
    calls: dict[str, Callable[[], Any]] = {
        "module": lambda: onefold.shard(encoder, mesh=mesh),
        "convolution": lambda: onefold.shard(nn.Sequential(nn.Conv1d(4, 4, 3)), mesh=mesh),
        "no attention": lambda: plain(torch.ones(2, 4)),
        "torch's attention": lambda: local(**mine),
        "other batches": lambda: onefold.cut_sequence({"input_ids": ids + rank}, mesh),
        "other labels": lambda: onefold.cut_sequence({"input_ids": ids, "labels": ids + rank}, mesh),
        "documents of one rank": lambda: onefold.sequence_attention(
            *heads, mesh, documents=None if rank else torch.zeros(1, 4, dtype=torch.int32)
        ),
        "other methods": lambda: onefold.sequence_attention(*heads, mesh, method=("ring", "ulysses")[rank]),
        "tile": lambda: onefold.sequence_attention(*heads, mesh, window=2, tile=-1),
        "shape": lambda: onefold.cut_sequence({"input_ids": ids, "pixels": torch.zeros(3, 3)}, mesh),
        "mask": lambda: onefold.cut_sequence({"input_ids": ids, "attention_mask": torch.ones(1, 1, 8, 8)}, mesh),
        "mask as a list": lambda: onefold.cut_sequence({"input_ids": ids, "attention_mask": [[1] * 8]}, mesh),
        "no names": lambda: onefold.cut_sequence(ids, mesh),  # type: ignore[arg-type]
        "no tokens": lambda: onefold.cut_sequence({"labels": ids}, mesh),
        "lengths": lambda: onefold.cut_sequence(
            {"input_ids": ids.expand(2, -1), "cu_seqlens": torch.tensor([0, 8])}, mesh
        ),
        "start": lambda: onefold.cut_sequence({"input_ids": ids, "cu_seqlens": torch.tensor([3, 8])}, mesh),
        "end": lambda: onefold.cut_sequence({"input_ids": ids, "cu_seqlens": torch.tensor([0, 3])}, mesh),
        "no scalar": lambda: onefold.token_mean(torch.zeros(2), 2, mesh),
        "afterwards": lambda: good(**mine),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = "nothing"
        except onefold.OnefoldError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


WANTED = {
    "module": "ModelError: self_attn is a MultiheadAttention, which reads other tokens",
    "convolution": "ModelError: 0 is a Conv1d",
    "no attention": "ModelError: the mesh cuts sequences over 2 ranks .* forward of Sequential did not call",
    "torch's attention": r"ModelError: blocks.0.attention \(GroupedAttention\) calls torch's scaled_dot_product",
    "other batches": "MismatchError: the ranks of one sequence differ: rank 0 has a batch .* same batch",
    "other labels": "MismatchError: the ranks of one sequence differ: rank 0 has a batch .* same batch",
    "documents of one rank": "MismatchError: .* documents; they need the same arguments",
    "other methods": "MismatchError: .* method='ring'.* method='ulysses'",
    "tile": r"ConfigError: sequence_attention\(tile=-1\): a tile has at least one token",
    "shape": r"ConfigError: cut_sequence\(\) got pixels \(3, 3\)",
    "mask": r"ConfigError: cut_sequence\(\) got attention_mask \(1, 1, 8, 8\)",
    "mask as a list": r"ConfigError: cut_sequence\(\) got attention_mask as list",
    "no names": r"ConfigError: cut_sequence\(\) needs a batch by names, .* was given Tensor",
    "no tokens": r"ConfigError: cut_sequence\(\) needs input_ids",
    "lengths": r"ConfigError: cut_sequence\(\) got cu_seqlens \(2,\) with a batch of 2",
    "start": r"ConfigError: cut_sequence\(\) got cu_seqlens \[3, 8\] for 8 tokens",
    "end": r"ConfigError: cut_sequence\(\) got cu_seqlens \[0, 3\] for 8 tokens",
    "no scalar": r"ConfigError: token_mean\(\) got \(2,\)",
    "afterwards": "nothing",
}


def test_what_would_train_something_else_is_refused_by_name_on_all_ranks() -> None:
    for found in run_ranks(2, refused):
        assert found.keys() == WANTED.keys()
        for name, message in WANTED.items():
            assert pytest.raises(ValueError, match=message).matches(ValueError(found[name])), found[name]
