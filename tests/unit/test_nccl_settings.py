"""Variables on which NCCL's messages depend: one is refused, others are set unless the user has set them."""

import os

import pytest

from onefold.comm.nccl_settings import prepare_nccl
from onefold.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE", "TORCH_GLOO_LAZY_INIT"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what prepare_nccl sets
        monkeypatch.delenv(name)


def test_one_hardware_queue_is_refused_with_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    prepare_nccl(1)
    with pytest.raises(ConfigError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1 .* deadlock .*; unset it"):
        prepare_nccl(2)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    prepare_nccl(2)


def test_a_setting_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    prepare_nccl(2)
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"


def test_sums_in_the_switch_are_off() -> None:
    prepare_nccl(2)
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
