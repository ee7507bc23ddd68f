"""The plan of cut sequences: what attention sends is what is metered, a stretch is 1/N, and longer sequences fit."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from onefold.cost.case import Choice
from onefold.cost.cut_sequences import attention_bytes, attention_calls
from onefold.cost.decoders import Decoder
from onefold.cost.hardware import TABLE
from onefold.cost.search import Question, longest_sequence
from onefold.cost.states import named_cost
from onefold.cost.work import Work, grid_of
from onefold.errors import ConfigError
from onefold.planner.answer import answer
from onefold.settings.widths import widths_of
from tests.sequence.test_attention import BATCH, EACH, WIDTH, Case, ring_bytes, ulysses_bytes


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("heads", "key_heads"), [(8, 8), (8, 4), (8, 2), (8, 1), (3, 3), (6, 2)])
def test_what_attention_sends_by_the_plan_is_what_its_meter_is_held_to(ranks: int, heads: int, key_heads: int) -> None:
    shape = Decoder(
        layers=1, hidden=heads * WIDTH, heads=heads, kv_heads=key_heads, intermediate=8, seq=ranks * EACH, vocab=8
    )
    ring = bool(heads % ranks)
    case = Case(heads, key_heads, dtype=torch.bfloat16, balanced=ring)
    formula = ring_bytes if ring else ulysses_bytes
    mean = sum(formula(case, ranks, rank) for rank in range(ranks)) / ranks
    assert attention_bytes(shape, BATCH, "keep", 1, ranks, 2) == mean
    assert attention_calls(shape, "keep", 1, ranks) == (3 * (ranks - 1) if ring else 4)
    assert mean < attention_bytes(shape, BATCH, "checkpoint", 1, ranks, 2) < 2 * mean


SHAPE = Decoder(layers=28, hidden=1536, heads=12, kv_heads=2, intermediate=8960, seq=65536, vocab=151936, tied=True)


def asked(sequence: int, ranks: int = 8) -> Question:
    work = Work(widths=widths_of("bf16", "split"), shape=SHAPE, auto_wire=True)
    return Question(
        work=work, ranks=ranks, hardware=TABLE["a100-80"], cost=named_cost("adamw"), sequence=sequence, batch=1
    )


def test_a_stretch_takes_its_share_of_activations_and_flops_and_longer_sequences_fit() -> None:
    choice = Choice(3, activations="checkpoint")
    whole, cut = (asked(n).price(choice, asked(n).grid(), 1) for n in (1, 4))
    assert cut.work.flops(1, "checkpoint", cut.grid) * 4 == whole.work.flops(1, "checkpoint", whole.grid)
    assert cut.work.activations(1, "checkpoint", cut.grid).kept_per_block * 4 == pytest.approx(
        whole.work.activations(1, "checkpoint", whole.grid).kept_per_block
    )
    assert cut.peak_bytes < whole.peak_bytes and cut.samples_per_step * 4 == whole.samples_per_step
    assert cut.memory.device_states == whole.memory.device_states and "sequence" not in whole.messages.traffic
    assert cut.messages.traffic["sequence"].bytes == cut.work.sequence_bytes(1, "checkpoint", cut.grid) > 0
    longest = [longest_sequence(asked(n), choice, asked(n).grid()) for n in (1, 4)]
    assert longest[1] > 3 * longest[0] > 0
    said = " ".join(answer(asked(4), "a model", "bf16", every_row=False).notes)
    assert "attention by Ulysses" in said and "longest sequence that fits" in said


def test_grids_that_cannot_be_are_named() -> None:
    assert str(grid_of(8, sequence=4)) == "2 shard × 4 sequence"
    with pytest.raises(ConfigError, match="tp × pp × replica × sequence = 1 × 1 × 1 × 3"):
        grid_of(8, sequence=3)
    with pytest.raises(ConfigError, match="a mesh with both is unsupported"):
        grid_of(8, sequence=2, pp=2)
    with pytest.raises(ConfigError, match="sequence=0"):
        dataclasses.replace(asked(1), sequence=0).grid()
