"""State of optimizers that need whole tensors is saved and loaded at any number of ranks, stage and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import onefold
from tests.checkpoint.runs import Case, Trainer, differing, digests, read, truth, write
from tests.harness import run_ranks

WRITERS = {
    1: [(0, "fp32"), (3, "split")],
    2: [(1, "fp32"), (3, "bf16")],
    3: [(2, "split"), (0, "fp16")],
}
READERS = {2: [(3, "split"), (0, "bf16")], 3: [(1, "fp16")]}


@pytest.mark.parametrize("optimizer", ["lamb", "muon", "shampoo"])
def test_any_number_of_ranks_and_stage_reads_any_other_bitwise(optimizer: str, tmp_path: Path) -> None:
    """LAMB has a count and two moments of each tensor; Muon stands beside an AdamW for vectors; Shampoo has matrices of
    other shapes than its tensors."""
    written: list[tuple[str, dict[str, Any]]] = []
    for ranks, pairs in WRITERS.items():
        cases = [Case(*pair, optimizer) for pair in pairs]
        folder = tmp_path / str(ranks)
        states = run_ranks(ranks, write, cases, str(folder))
        assert all(one == states[0] for one in states)
        written += [(str(folder / f"{c.stage}-{c.precision}"), s) for c, s in zip(cases, states[0], strict=True)]
    for ranks, pairs in READERS.items():
        asked = [(Case(*pair, optimizer), folder) for pair in pairs for folder, _ in written]
        for answer in run_ranks(ranks, read, asked):
            for (case, folder), (found, stale) in zip(asked, answer, strict=True):
                assert differing(found, dict(written)[folder]) == [], (ranks, case, folder)
                assert stale == []


def resumed(folder: str, stage: int, optimizer: str) -> list[str]:
    """On every rank: five steps at once, and three, saved and loaded, then two."""
    onefold.init()
    case = Case(stage, "split", optimizer)
    whole = truth(Trainer(case).train(5))
    Trainer(case).train(3).save(folder)
    again = truth(Trainer(case, seed=1).load(folder).train(2))
    return differing(digests(whole), digests(again))


def test_a_resumed_run_goes_on_bitwise(tmp_path: Path) -> None:
    for stage, optimizer in ((1, "lamb"), (3, "muon")):
        assert run_ranks(2, resumed, str(tmp_path / optimizer), stage, optimizer) == [[], []]
