"""State of optimizers that need whole tensors is saved and loaded at any number of ranks, stage and precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onefold
from tests.checkpoint.runs import Case, Trainer, differing, digests, read, truth, write
from tests.harness import run_ranks
from tests.models import MODELS
from tests.parity.training import batch_for

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


def muon_of(fields: dict[str, Any], seed: int = 0) -> tuple[torch.nn.Module, onefold.Muon]:
    """After a step."""
    onefold.init()
    torch.manual_seed(seed)
    model = onefold.shard(MODELS["mlp"].build(), stage=2)
    optimizer = onefold.Muon(model, **fields)
    MODELS["mlp"].loss(model, batch_for(seed, 0, dist.get_rank()), 0).backward()
    optimizer.step()
    return model, optimizer


def momenta(optimizer: onefold.Muon) -> list[float]:
    """Of the matrices that this rank owns."""
    return [tensor.double().abs().sum().item() for tensor in optimizer.state_tensors() if tensor.ndim == 2]


def otherwise(folder: str) -> tuple[list[Any], list[Any], list[float], list[float], str]:
    """On every rank: the matrices of an Optimizer before and after it loads the state of one with others, the momenta
    of both, and what is said where another class is to have them."""
    first = next(name for name, param in MODELS["mlp"].build().named_parameters() if param.ndim == 2)
    model, optimizer = muon_of({"place": {"*.weight": "muon"}, "lr": 0.5})
    onefold.save(folder, model, optimizer)
    other, again = muon_of({"place": {"*.weight": "muon"}, "split": {first: 3}}, seed=1)
    before = [group.get("matrices") for group in again.param_groups]
    onefold.load(folder, other, again)
    after = [group.get("matrices") for group in again.param_groups]
    third, moved = muon_of({"place": {first: "adamw", "*.weight": "muon"}}, seed=2)
    with pytest.raises(onefold.CheckpointError) as caught:
        onefold.load(folder, third, moved)
    return before, after, momenta(optimizer), momenta(again), str(caught.value)


def test_matrices_are_those_of_the_program_and_classes_those_of_the_checkpoint(tmp_path: Path) -> None:
    answers = run_ranks(2, otherwise, str(tmp_path))
    saved, loaded = (sorted(value for answer in answers for value in answer[which]) for which in (2, 3))
    assert saved == loaded and saved
    for before, after, _, _, said in answers:
        assert before == after and len({one for one in before if one}) == 2
        assert "AdamW updates parameters of param group" in said and "Muon updated some of them" in said


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
