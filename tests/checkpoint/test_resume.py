"""A run that was interrupted goes on bit for bit as one that was not."""

from typing import Any

import pytest
import torch
from torch import nn

import onefold
from tests.checkpoint.runs import PRECISIONS, Case, Trainer, differing, fingerprint
from tests.harness import run_ranks

CASES = [Case(stage, precision) for stage in range(4) for precision in PRECISIONS]


def interrupted(cases: list[Case], folder: str, wait: bool) -> list[str]:
    """On every rank: train three steps, save in the middle of an epoch, train two more; and from the checkpoint."""
    onefold.init()
    wrong = []
    for number, case in enumerate(cases):
        straight = Trainer(case).train(3)
        straight.save(f"{folder}/{number}", wait=wait)
        wanted = fingerprint(straight.train(2))
        onefold.finish_saves()
        resumed = Trainer(case, seed=7).load(f"{folder}/{number}").train(2)
        wrong += [f"{case}: {name}" for name in differing(fingerprint(resumed), wanted)]
        assert case.precision != "fp16" or straight.optimizer.skipped > 0
    return wrong


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, CASES[-4:]),
        (2, CASES[1::3]),
        (4, CASES[::5]),
        pytest.param(2, CASES, marks=pytest.mark.soak),
        pytest.param(4, CASES, marks=pytest.mark.soak),
    ],
    ids=["1", "2", "4", "2-all", "4-all"],
)  # one rank has all there is, at every stage; each third or fifth holds each stage and each precision
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(ranks, cases, tmp_path):
    assert run_ranks(ranks, interrupted, cases, str(tmp_path), True) == [[]] * ranks


def test_a_run_resumed_from_a_save_in_the_background_is_bitwise_the_uninterrupted_one(tmp_path):
    """Training went on while the checkpoint was written: what is in it is the moment of the call."""
    cases = [Case(3, "split"), Case(0, "fp32", "nadam"), Case(2, "fp16", "sgd"), Case(1, "bf16")]
    assert run_ranks(2, interrupted, cases, str(tmp_path), False) == [[]] * 2


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.ASGD, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adamax, {}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01)}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.Rprop, {}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
]


def interrupt_each(dtype: torch.dtype, before: int, folder: str) -> list[str]:
    onefold.init()
    wrong = []

    def start(seed: int) -> tuple[nn.Module, onefold.Optimizer]:
        torch.manual_seed(seed)
        model = onefold.shard(nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 5)).to(dtype), stage=2)
        return model, onefold.Optimizer(model, cls, **settings)

    def train(model: nn.Module, optimizer: onefold.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.backward(model(torch.randn(4, 9, dtype=dtype)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    for number, (cls, settings) in enumerate(OPTIMIZERS):
        straight, resumed = start(0), start(1)
        train(*straight, before)
        onefold.save(f"{folder}/{number}", *straight)
        train(*straight, 2)
        train(*resumed, 1)  # what is there is replaced
        onefold.load(f"{folder}/{number}", *resumed)
        train(*resumed, 2)
        pairs = zip(straight[0].parameters(), resumed[0].parameters(), strict=True)
        wrong += [f"{cls.__name__} {settings}"] * (not all(torch.equal(a, b) for a, b in pairs))
    return wrong


@pytest.mark.parametrize(("dtype", "before"), [(torch.float32, 2), (torch.float64, 2), (torch.float32, 0)])
def test_every_elementwise_optimizer_resumes_bitwise_also_before_its_first_step(dtype, before, tmp_path):
    assert run_ranks(2, interrupt_each, dtype, before, str(tmp_path)) == [[]] * 2


def save_every_turn(folder: str) -> tuple[list[str], int, int]:
    """The loop of docs/checkpoints.md, in fp16, whose first steps overflow."""
    onefold.init()
    trainer = Trainer(Case(2, "fp16"))
    names = []
    for _ in range(5):
        trainer.train(1)
        names.append(onefold.save(folder, trainer.model, trainer.optimizer, extra=trainer.extra).name)
    trainer.load(folder).train(1)
    names.append(onefold.save(folder, trainer.model, trainer.optimizer).name)
    return names, trainer.optimizer.skipped, trainer.optimizer.steps


def test_a_loop_that_saves_every_turn_goes_on_over_skipped_steps(tmp_path):
    names, skipped, steps = run_ranks(2, save_every_turn, str(tmp_path))[0]
    assert names == [f"step-{turn:08}" for turn in range(1, 7)]
    assert skipped and steps and skipped + steps == 6
