"""The lower bounds of the frameworks in pyproject.toml are the versions that were run: constraints-oldest.txt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOUNDS = dict(re.findall(r'"([a-z]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text()))
PINNED = dict(re.findall(r"^([a-z-]+)==([\d.]+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["accelerate", "lightning", "peft", "torchao", "transformers", "trl"])
def test_the_lower_bound_is_the_oldest_version_that_was_run(name: str) -> None:
    assert re.fullmatch(rf"{re.escape(BOUNDS[name])}(\.0)*", PINNED[name])
