"""What every test gets: what the marks `gpu`, `soak` and `open` mean, and no rank left running when pytest ends."""

import pytest
import torch

from tests.harness import shutdown_pools


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run the tests marked soak, which take minutes")
    parser.addoption("--open", action="store_true", help="also run the tests marked open, which fail today")


@pytest.hookimpl(trylast=True)  # after folders have put their own marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    for mark in ("soak", "open"):
        if not config.getoption(f"--{mark}"):
            left_out = [item for item in items if item.get_closest_marker(mark)]
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in left_out]


def pytest_sessionfinish() -> None:
    shutdown_pools()
