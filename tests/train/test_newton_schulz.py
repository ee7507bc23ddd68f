"""`onefold train --optimizer muon` runs Newton-Schulz in one dtype on all ranks."""

import pytest
import torch
import torch.distributed as dist

from onefold.comm.communicator import Comm
from onefold.comm.mesh import axes_of
from onefold.comm.meter import Meter
from onefold.train.run.optimizers import newton_schulz_dtype
from tests.harness import run_ranks

CPU = torch.device("cpu")


def chosen(fast: list[bool]) -> str:
    comm = Comm(axes_of(None).everyone, CPU, 60.0, Meter())
    return newton_schulz_dtype(comm, CPU, fast=fast[dist.get_rank()])


@pytest.mark.parametrize(("fast", "dtype"), [([True, True], "bf16"), ([True, False], "fp32"), ([False, True], "fp32")])
def test_a_rank_whose_cpu_multiplies_bf16_slowly_decides_for_all(fast: list[bool], dtype: str) -> None:
    assert run_ranks(2, chosen, fast) == [dtype, dtype]
