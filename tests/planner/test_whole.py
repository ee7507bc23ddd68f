"""Plans of optimizers that update whole tensors: bytes, messages and seconds, by formula and by rehearsal."""

from __future__ import annotations

import torch

import onefold
from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate
from onefold.cost.hardware import hardware
from onefold.cost.search import Question
from onefold.cost.shapes import Shape
from onefold.cost.states import named_cost
from onefold.cost.traffic import to_owners
from onefold.cost.work import Work
from onefold.optim.muon_placement import MUON, decide
from onefold.settings.widths import widths_of
from onefold.train.run.model import GPT

SHAPE = Shape(layers=4, hidden=64, heads=4, seq=32, vocab=128)
WHOLE = ("whole-gradient", "whole-direction")


def estimate(optimizer: str, stage: int, ranks: int, tp: int = 1) -> Estimate:
    work, cost = Work(widths=widths_of("fp32", None), shape=SHAPE), named_cost(optimizer)
    asked = Question(work=work, ranks=ranks, hardware=hardware("h100-80"), cost=cost, batch=1, tp=tp)
    return asked.price(Choice(stage), asked.grid(), 1)


def test_the_formula_knows_the_matrices_that_muon_takes() -> None:
    model = GPT(SHAPE)
    found = decide(model, [f"blocks.{i}" for i in range(4)], {}, {})
    taken = {name: tuple(p.shape) for name, p in model.named_parameters() if found[id(p)].by == MUON}
    assert taken == SHAPE.matrices()


def test_a_plan_by_formula_and_one_by_rehearsal_agree() -> None:
    tokens = torch.zeros(1, SHAPE.seq, dtype=torch.long)
    plan = onefold.plan(GPT(SHAPE), (tokens, tokens), ranks=4, hardware="h100-80", optimizer=onefold.Muon)
    for row, stage in zip(plan.stages, range(4), strict=True):
        formula = estimate("muon", stage, 4)
        assert (
            abs(row.optimizer_bytes / formula.memory.states.optimizer - 1) < 0.05
        )  # owners have not quite equal parts
        sent = {message.purpose: message.bytes for message in row.messages}
        assert {name for name in sent if name.startswith("whole-")} == (set(WHOLE) if stage else set())
        for name in WHOLE if stage else ():
            assert sent[name] <= 4 * formula.messages.traffic[name].bytes + 1  # this rank's part of what all ranks send


def test_muon_keeps_less_state_and_its_update_takes_longer() -> None:
    for stage in range(4):
        muon, adamw = estimate("muon", stage, 4), estimate("adamw", stage, 4)
        assert muon.memory.states.optimizer < adamw.memory.states.optimizer
        assert muon.time.step.update > adamw.time.step.update and muon.time.step.compute == adamw.time.step.compute


def test_a_step_in_16_bits_sends_at_most_half_of_what_one_more_psi_takes() -> None:
    for ranks in (2, 3, 8):
        work = Work(widths=widths_of("bf16", "split"), shape=SHAPE)
        asked = Question(work=work, ranks=ranks, hardware=hardware("h100-80"), cost=named_cost("muon"), batch=1)
        found = asked.price(Choice(3), asked.grid(), 1)
        sent = sum(row.bytes for row in to_owners(found.sizes.units, ranks).values())
        matrices = sum(unit.whole_numel for unit in found.sizes.units)
        assert 0 < ranks * sent <= 4 * matrices and sent <= matrices  # one more Ψ in 16 bits is twice as much


def test_matrices_split_over_tp_travel_to_owners_on_all_ranks() -> None:
    """Of the bytes that a run on two by two ranks sends (tests/tensor/test_whole_tensors.py), by the formula."""
    matrices = sum(torch.Size(shape).numel() for shape in SHAPE.matrices().values())
    for stage, holders in ((0, 2), (1, 4), (3, 4)):
        found = estimate("muon", stage, 4, tp=2)
        for name in WHOLE:  # each rank sends its pieces of tensors that others own, and as an owner theirs
            pieces = (2 if name == "whole-direction" else 4) * matrices // holders
            assert abs(found.messages.traffic[name].bytes / (pieces * (holders - 1) / holders) - 1) < 0.01, (
                stage,
                name,
            )
        assert found.time.step.update > estimate("adamw", stage, 4, tp=2).time.step.update
