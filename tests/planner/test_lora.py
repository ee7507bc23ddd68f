"""`onefold plan --lora`: a frozen model with adapters takes what the plan says, at every stage."""

from __future__ import annotations

import torch

import onefold
from onefold.cli.main import main
from onefold.cli.plan import PlanCommand
from onefold.cost.case import Choice
from onefold.cost.shapes import Shape
from onefold.observe.simulation import train_step
from tests.harness import run_ranks
from tests.models.adapters import adapted

SHAPE = Shape(layers=3, hidden=64, heads=2, seq=16, vocab=101)
RANK, RANKS = 4, 2


def measured() -> list[tuple[int, int, int]]:
    """Bytes of parameters, gradients and optimizer state of a rank at stages 1 to 3."""
    onefold.init()
    found = []
    tokens = torch.zeros(2, SHAPE.seq, dtype=torch.long)
    for stage in (1, 2, 3):
        model = onefold.shard(adapted(SHAPE, RANK), stage=stage)
        optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
        for _ in range(2):
            train_step(model, optimizer, (tokens, tokens))
        now = onefold.memory(model)
        found.append((now.parameters.measured, now.gradients.measured, now.optimizer.measured))
    return found


def test_adapters_over_a_frozen_model_take_the_planned_bytes_at_stages_1_to_3():
    command = PlanCommand(
        layers=3, hidden=64, heads=2, seq=16, vocab=101, lora=RANK, ranks=RANKS, hardware="laptop", precision="fp32"
    )
    question = command.question()
    assert question.work.parameters == sum(param.numel() for param in adapted(SHAPE, RANK).parameters())
    for rank in run_ranks(RANKS, measured):
        for stage, states in zip((1, 2, 3), rank, strict=True):
            assert states == tuple(question.price(Choice(stage), question.grid(), 2).memory.device_states), (
                f"stage {stage}"
            )


def test_a_well_known_model_has_the_adapters_that_peft_gives_it():
    question = PlanCommand(model="llama-3-8b", lora=16).question()
    assert question.work.parameters - question.work.shape.numel == 41_943_040  # target_modules="all-linear"


def test_adapters_where_there_are_none_are_one_line(capsys):
    for given in (["--params", "1e9", "--lora", "8"], ["--model", "gpt2", "--lora", "-1"],
                  ["--model", "gpt2", "--lora", "8", "--tp", "2", "--ranks", "2"]):  # fmt: skip
        assert main(["plan", *given]) == 2
        assert "lora=" in capsys.readouterr().err
