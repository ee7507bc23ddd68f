"""A run that was interrupted goes on bit for bit as one that was not."""

import pytest

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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(ranks, tmp_path):
    cases = CASES if ranks > 1 else CASES[-4:]  # one rank has all there is, at every stage
    assert run_ranks(ranks, interrupted, cases, str(tmp_path), True) == [[]] * ranks


def test_a_run_resumed_from_a_save_in_the_background_is_bitwise_the_uninterrupted_one(tmp_path):
    """Training went on while the checkpoint was written: what is in it is the moment of the call."""
    cases = [Case(3, "split"), Case(0, "fp32", "nadam"), Case(2, "fp16", "sgd"), Case(1, "bf16")]
    assert run_ranks(2, interrupted, cases, str(tmp_path), False) == [[]] * 2
