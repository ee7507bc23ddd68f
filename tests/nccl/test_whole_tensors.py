"""Optimizers that need whole tensors, over NCCL: the same bits at every stage, and checkpoints that others read."""

from __future__ import annotations

from pathlib import Path

import pytest

import onefold
from tests.checkpoint.runs import Case, differing, read, write
from tests.nccl.ranks import MARKS, run_nccl
from tests.parity.test_whole_tensor import compare
from tests.parity.training import Run
from tests.parity.whole import MUON

pytestmark = MARKS


def test_stages_are_bitwise_equal() -> None:
    split = ("precision", onefold.Precision(compute="bf16", master="split"))
    runs = [
        Run(optimizer="muon", clip=0.05),
        Run(optimizer="lamb", micro=2, reduce="each"),
        Run(optimizer=MUON, clip=0.05),
        Run(optimizer=MUON, model="experts", fields=(split,)),
    ]
    verdicts = run_nccl(2, compare, runs)
    assert all(len(one) == len(runs) for one in verdicts), verdicts[0]
    assert verdicts[0] == verdicts[1], "ranks ended with different parameters"


@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
def test_checkpoints_of_two_ranks_are_read_by_four(optimizer: str, tmp_path: Path) -> None:
    case = Case(3, "split", optimizer)
    written = run_nccl(2, write, [case], str(tmp_path))
    for [(found, stale)] in run_nccl(4, read, [(Case(1, "bf16", optimizer), str(tmp_path / "3-split"))]):
        assert differing(found, written[0][0]) == [] and stale == []
