"""Optimizers that need whole tensors, over NCCL: the same bits at every stage, and checkpoints that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onefold
from onefold.optim.kernels import cuda_muon
from tests.checkpoint.runs import Case, differing, read, write
from tests.gpu.test_muon_gpu import layers, train
from tests.nccl.ranks import MARKS, ON_CPU, run_nccl
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


def gradients_as_reduced(precision: Any, clip: float | None) -> list[str]:
    """What is wrong with owners' kernels, which scale gradients as they are reduced, beside torch's operations."""

    def trained() -> list[Tensor]:
        model = onefold.shard(layers(), stage=3, precision=precision)
        scale = onefold.LossScale(initial=256.0) if precision == "fp16" else None
        optimizer = onefold.Muon(model, place={"*": "muon"}, loss_scale=scale)
        read.clear()  # of trials
        train(model, optimizer, clip)
        with onefold.full_parameters(model):
            return [param.detach().clone() for param in model.parameters()]

    def reading(grad: Tensor, *rest: Any) -> Tensor:
        read.append(grad.dtype)
        return moving(grad, *rest)

    onefold.init()
    read: list[torch.dtype] = []
    moving, triton = cuda_muon.move_momentum, cuda_muon.triton
    cuda_muon.move_momentum = reading
    try:
        found, dtypes = trained(), list(read)
        cuda_muon.triton = None
        wanted = trained()
    finally:
        cuda_muon.move_momentum, cuda_muon.triton = moving, triton
    wrong = [f"{number} differs" for number, pair in enumerate(zip(found, wanted)) if not torch.equal(*pair)]
    narrow = {"fp32": torch.float32, "fp16": torch.float16}.get(str(precision), torch.bfloat16)
    return wrong + [f"read as {dtypes}"] * (set(dtypes) != {narrow}) + ["kernels without Triton"] * bool(read)


@pytest.mark.skipif(ON_CPU, reason="the kernels are CUDA's")
@pytest.mark.parametrize("precision", [onefold.Precision(compute="bf16", master="fp32"), "bf16", "fp16", "fp32"])
def test_owners_read_gradients_as_they_are_reduced(precision: Any) -> None:
    for clip in (None, 1e-3):
        assert run_nccl(2, gradients_as_reduced, precision, clip) == [[]] * 2, clip


@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
def test_checkpoints_of_two_ranks_are_read_by_four(optimizer: str, tmp_path: Path) -> None:
    case = Case(3, "split", optimizer)
    written = run_nccl(2, write, [case], str(tmp_path))
    for [(found, stale)] in run_nccl(4, read, [(Case(1, "bf16", optimizer), str(tmp_path / "3-split"))]):
        assert differing(found, written[0][0]) == [] and stale == []
