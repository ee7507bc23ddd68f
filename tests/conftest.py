"""What every test gets: what the marks `gpu` and `soak` mean, which tests share a worker, no rank left running."""

import gc
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, whatever was set: all ranks, however started, add up alike

import pytest
import torch
from hypothesis import settings

from tests.harness import shutdown_pools
from tests.harness.priorities import take_turns
from tests.harness.processes import preload_frameworks
from tests.harness.soak import Soak

# Tests that import transformers or Lightning, which takes seconds in each rank: all of one worker, in one set of ranks.
FRAMEWORKS = (
    "tests/hf/", "tests/peft/", "tests/lightning/", "tests/nccl/test_frameworks.py", "tests/parity/test_examples.py",
    "tests/planner/test_exact.py", "tests/parity/stage3/test_huggingface.py", "tests/tensor/test_huggingface.py",
    "tests/checkpoint/test_import_export.py", "tests/gpu/test_trainer_gpu.py",
)  # fmt: skip
# Files of 20 to 90 s each, the longest first: they begin before all others, so that at the end, when workers take the
# last files, none waits for another that has just begun a long one. `pytest --durations=0` says which they are.
LONG = (
    "checkpoint/test_remote.py", "integrations/test_import_checkpoint.py", "faults/test_watcher.py",
    "train/test_forked.py", "train/test_report.py", "parity/test_jobset.py", "planner/test_command_line.py",
    "parity/test_wire.py", "users/test_compile.py", "train/test_elastic_store.py", "parity/test_whole_tensor.py",
    "tensor/test_parity.py", "train/test_tokenizer.py", "parity/stage3/test_loops.py", "tensor/test_checkpoints.py",
    "train/test_profile.py", "parity/test_stages.py", "train/test_mesh.py", "train/test_interrupted.py",
    "offload/test_auto.py", "parity/stage3/test_branches.py", "security/test_planted.py",
    "parity/precision/test_stages_16bit.py", "train/test_everyday.py", "faults/test_harness_faults.py",
)  # fmt: skip
take_turns()
gc.disable()  # until all tests are imported: nothing of that is garbage
settings.register_profile("onefold", deadline=None)  # a busy machine is no failure; what hangs meets other limits
settings.load_profile("onefold")
SOAK = pytest.StashKey[Soak]()
PLACES = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="also run the tests marked soak, which take minutes")
    parser.addoption("--soak-record", type=Path, metavar="FILE", help="add to FILE what long-running tests tried")


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> Soak:
    (kind,) = request.node.get_closest_marker("trials_of").args
    return request.node.stash.setdefault(SOAK, Soak(kind, request.config.getoption("--soak")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    path, soak = item.config.getoption("--soak-record"), item.stash.get(SOAK, None)
    if path and soak and call.when == "call":
        soak.write(path, item.nodeid, report.outcome, call.duration)
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.getoption("--soak"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("soak")])
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    items.sort(key=place)  # stable: the others keep their order


def pytest_collection_finish() -> None:
    """What was imported stays for good: the garbage collector need not walk through it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.enable()  # here, as the process that only starts workers collects no tests


def needs_a_framework(nodeid: str) -> bool:
    return nodeid.startswith(FRAMEWORKS)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if needs_a_framework(item.nodeid):
        preload_frameworks()


def place(item: pytest.Item) -> int:
    """Those that one worker takes begin first."""
    return -1 if needs_a_framework(item.nodeid) else PLACES.get(item.path, len(PLACES))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker takes a file at a time, but all files of the frameworks together."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "frameworks" if needs_a_framework(nodeid) else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_sessionfinish() -> None:
    shutdown_pools()
