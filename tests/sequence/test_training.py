"""Training with cut sequences is training with whole ones: losses and parameters of one process, at every stage."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.harness import run_ranks
from tests.parity.training import same_bits
from tests.sequence.runs import Run, Trained, alone, train_all

KINDS = {
    "causal": Run(),
    "odd lengths": Run("odd"),
    "odd lengths, seen from both sides": Run("odd", causal=False),
    "packed, by positions": Run("packed"),
    "packed, by lengths": Run("lengths"),
    "padded": Run("padded"),
    "padded, grouped, with a window": Run("padded", key_heads=2, window=3),
    "one key head": Run(key_heads=1),
    "ring": Run("odd", heads=3, key_heads=1),
    "ring, packed, with a window": Run("packed", heads=3, key_heads=3, window=4),
    "balanced ring, packed": Run("packed", heads=3, key_heads=1, balanced=True),
    "balanced": Run("odd", balanced=True),
}
ALL_STAGES = ("causal", "balanced ring, packed")
WITH = {
    "accumulated": dataclasses.replace(KINDS["packed, by positions"], micro=2),
    "recomputed": dataclasses.replace(KINDS["packed, by positions"], fields=(("activations", "checkpoint"),)),
    "recomputed ring": dataclasses.replace(KINDS["ring"], fields=(("activations", "checkpoint"),)),
}


def assert_as_one_process(by_rank: list[Trained], wanted: Trained) -> None:
    for rank in by_rank:
        assert rank.losses == by_rank[0].losses, "the loss is the same on all ranks"
    assert by_rank[0].losses == pytest.approx(wanted.losses, rel=2e-6)
    for name, value in wanted.params.items():
        torch.testing.assert_close(
            by_rank[0].params[name], value, rtol=2e-5, atol=2e-6, msg=lambda s, name=name: f"{name}: {s}"
        )


MESHES = {  # which kinds are trained on which; those of ALL_STAGES at all stages on the first
    (("sequence", 2),): [*KINDS, *WITH],
    (("sequence", 4),): ["odd lengths", "padded, grouped, with a window", "ring, packed, with a window", "balanced"],
    (("shard", 2), ("sequence", 2)): ["causal", "packed, by lengths", "ring", "accumulated"],
    (("replica", 2), ("sequence", 2)): ["one key head"],
}


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_every_kind_of_batch_trains_as_in_one_process_and_stages_agree_bitwise(
    axes: tuple[tuple[str, int], ...],
) -> None:
    kinds, listed = KINDS | WITH, list[tuple[str, Run]]()
    for number, name in enumerate(MESHES[axes]):
        every = name in ALL_STAGES and axes == (("sequence", 2),)
        run = dataclasses.replace(kinds[name], axes=axes, steps=2 if every else 1)
        listed += [(name, run.at(stage)) for stage in ((0, 1, 2, 3) if every else (3 - number % 2,))]
    ranks = math.prod(dict(axes).values())
    found = list(zip(*run_ranks(ranks, train_all, [run for _, run in listed]), strict=True))
    first: dict[str, Trained] = {}
    for (name, run), by_rank in zip(listed, found, strict=True):
        if name not in first:
            first[name] = by_rank[0]
            assert_as_one_process(list(by_rank), alone(run))
        assert by_rank[0].losses == first[name].losses, (name, run.stage)
        differing = [key for key, value in by_rank[0].params.items() if not same_bits(value, first[name].params[key])]
        assert differing == [], (name, run.stage)
    if "recomputed" in first:
        plain, again = first["packed, by positions"].params, first["recomputed"].params
        assert all(same_bits(value, again[name]) for name, value in plain.items()), "recomputed"
