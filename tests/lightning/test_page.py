"""The code of docs/lightning.md runs on two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch

from tests.harness import run_ranks
from tests.lightning.lit import as_if_launched, weights

PAGE = Path(__file__).parents[2] / "docs" / "lightning.md"


def run_page(folder: str) -> int:
    """On a rank: all blocks, one after the other, in one namespace."""
    as_if_launched()
    before = os.getcwd()
    os.chdir(folder)
    try:
        blocks = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        names: dict[str, Any] = {}
        for block in blocks:
            exec(compile(block, PAGE.name, "exec"), names)
        averages, trained = names["averages"], weights(names["averaged"].lightning_module)
        assert not any(torch.equal(averages[name], trained[name]) for name in averages)
        assert averages.keys() == trained.keys() or torch.distributed.get_rank() > 0
        return len(blocks)
    finally:
        os.chdir(before)


def test_the_code_on_the_page_runs(tmp_path):
    assert run_ranks(2, run_page, str(tmp_path)) == [4, 4]
    assert (tmp_path / "all.ckpt").is_dir() and (tmp_path / "weights.ckpt").is_file() and (tmp_path / "loop").is_dir()
