"""What every test gets: what the marks `gpu` and `soak` mean, and no rank left running when pytest ends."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, whatever was set: all ranks, however started, add up alike

import pytest
import torch

from tests.harness import shutdown_pools


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run the tests marked soak, which take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.getoption("--soak"):
        left_out = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_sessionfinish() -> None:
    shutdown_pools()
