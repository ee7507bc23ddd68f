"""`onefold measure` on a GPU: every part works there, and all of it takes two minutes at most."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("tyro")  # the command line needs it

from onefold.cli.main import main
from onefold.cost.hardware import recorded
from onefold.cost.rates import read_rates

pytestmark = pytest.mark.gpu


def test_every_part_is_measured(tmp_path: Path) -> None:
    assert main(["measure", "--quick", "--device", "cuda", "--out", str(tmp_path / "a.json")]) == 0
    rates = read_rates(tmp_path / "a.json")
    assert rates.record["left_out"] == ["links", "sustained", "disk"] and rates.computes
    assert set(rates.record["products"]) == {"fp32", "tf32", "bf16", "fp16"}
    assert recorded(rates).pcie_rate == rates.copy_rate


@pytest.mark.soak
def test_all_sizes_take_two_minutes_and_large_products_are_the_fastest(tmp_path: Path) -> None:
    began = time.monotonic()
    assert main(["measure", "--device", "cuda", "--out", str(tmp_path / "a.json")]) == 0
    assert time.monotonic() - began < 120
    rates = read_rates(tmp_path / "a.json")
    small, large = (rates.product("bf16", *sides) for sides in ((1024, 512, 512), (16384, 4096, 16384)))
    assert large.forward / (16384 * 4096 * 16384) < small.forward / (1024 * 512 * 512)
