"""What every test gets: what the marks `gpu` and `soak` mean, and no rank left running when pytest ends."""

import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, whatever was set: all ranks, however started, add up alike

import pytest
import torch
from hypothesis import settings

from tests.harness import shutdown_pools

# Files of 20 to 100 s each, the longest first: they begin before all others, so that at the end, when workers take the
# last files, none waits for another that has just begun a long one.
LONG = (
    "parity/test_examples.py", "security/test_listeners.py", "planner/test_command_line.py",
    "faults/test_every_point.py", "train/test_interrupted.py", "train/test_killed.py", "train/test_profile.py",
    "bench/test_runs.py", "faults/test_run_command.py", "faults/test_watcher.py", "train/test_going_on.py",
    "offload/test_memory.py", "planner/test_plan.py", "train/test_loop.py", "activations/test_bitwise.py",
    "checkpoint/test_any_to_any.py", "checkpoint/test_resume.py", "parity/test_wire.py",
    "train/test_bad_input.py", "train/test_data.py", "lightning/test_launches.py", "hf/test_launch.py",
)  # fmt: skip
settings.register_profile("onefold", deadline=None)  # a busy machine is no failure; what hangs meets other limits
settings.load_profile("onefold")
PLACES = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}


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
    items.sort(key=lambda item: PLACES.get(item.path, len(PLACES)))  # stable: the others keep their order


def pytest_sessionfinish() -> None:
    shutdown_pools()
