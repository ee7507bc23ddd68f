"""shard(model, device=…): the model is moved there, or every rank hears why it cannot be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onefold
from tests.harness import run_ranks, run_ranks_raises


def sharded_on(device: str, meta: bool = False) -> str:
    onefold.init()
    with torch.device("meta" if meta else "cpu"):
        model = nn.Linear(4, 4)
    onefold.shard(model, device=device)
    return str(model.weight.device)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ("cuda:4096", "is a GPU, and torch sees"),
        ("meta", "has no memory to train in"),
        ("gpu", "is no device; use 'cpu', 'cuda' or 'cuda:0'"),
    ],
)
def test_a_device_that_is_not_here_raises_on_every_rank(device: str, wanted: str, meta: bool) -> None:
    for error in run_ranks_raises(2, sharded_on, device, meta):
        assert error.type_name == "ConfigError", error
        assert f"device={device!r}" in error.message and wanted in error.message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused_and_not_ignored() -> None:
    for error in run_ranks_raises(2, sharded_on, "cuda"):
        assert error.type_name == "ConfigError" and "device='cuda' is a GPU, and torch sees none" in error.message


@pytest.mark.parametrize("meta", [False, True])
def test_the_device_where_a_model_is_may_be_named(meta: bool) -> None:
    assert run_ranks(2, sharded_on, "cpu", meta) == ["cpu", "cpu"]


@pytest.mark.gpu
def test_a_model_on_the_cpu_is_moved_to_the_gpu_that_was_asked_for() -> None:
    onefold.init()
    model = onefold.shard(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), device="cuda")
    assert all(tensor.is_cuda for tensor in model.state_dict().values())
    model(torch.ones(2, 4, device="cuda")).sum().backward()
