"""Ranks that share GPU 0 over real NCCL, kept warm between tests as those of tests.harness are.

ONEFOLD_TEST_NCCL_ON=cpu python -m pytest tests/nccl     # the same tests among gloo ranks on a CPU
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.harness import device
from tests.harness.device import VARIABLE
from tests.harness.packed_calls import name_of, pack_call
from tests.harness.pool import run_ranks_over
from tests.harness.worlds import GLOO, SHARED_GPU, shared_gpu_environ

ON_CPU = os.environ.get("ONEFOLD_TEST_NCCL_ON") == "cpu"
MARKS = [] if ON_CPU else [pytest.mark.gpu]
RANKS = (2, 4)
# Of ranks that may be killed: start_ranks(n, fn, env=FRESH, init=False), where fn begins with be_a_host()
FRESH = {"CUDA_VISIBLE_DEVICES": ""} if ON_CPU else {VARIABLE: "cuda"}


def run_nccl(n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60, **kwargs: Any) -> list[Any]:
    """Call `fn(*args, **kwargs)` on every one of `n` ranks; return its value per rank, as `run_ranks` does."""
    call = pack_call(prepared, (fn, *args), kwargs)
    return run_ranks_over(GLOO if ON_CPU else SHARED_GPU, n, call, name_of(fn), timeout_s)


def prepared(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """On a rank: convolutions must give the same bits twice before stages can be compared."""
    torch.backends.cudnn.deterministic = True
    return fn(*args, **kwargs)


def be_a_host() -> None:
    """On a rank of `start_ranks`, before onefold.init(): NCCL takes it for a host of its own."""
    if device() == "cuda":
        os.environ.update(shared_gpu_environ(int(os.environ["RANK"])))


def assert_one_digest(found: list[dict[str, str]]) -> None:
    """Of every rank, a digest per case: all ranks and all cases must have the same."""
    digests = {digest for rank in found for digest in rank.values()}
    assert len(digests) == 1, "\n".join(f"rank {rank}: {cases}" for rank, cases in enumerate(found))
