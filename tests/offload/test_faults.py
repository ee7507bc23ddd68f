"""What goes wrong below the device is named: before the run where it can be known, and never half done in silence."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from onefold.comm import agreement
from onefold.offload.disk import Scratch
from onefold.offload.tiers import Tiers
from onefold.runtime.engine import engine_of
from tests.harness import fresh_ranks, run_ranks, start_ranks, tell
from tests.offload.runs import files_in


def built(path: str):
    onefold.init()
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    offload = onefold.Offload(optimizer="disk", parameters="disk", path=path)
    model = onefold.shard(layers, stage=3, precision="bf16", offload=offload, bucket_bytes=8 << 10)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)


def step(model: nn.Module, adam: onefold.Optimizer) -> None:
    model(torch.randn(4, 64).bfloat16()).float().square().sum().backward()
    adam.step()
    adam.zero_grad()


def said_by_all(ranks: int, call, *args) -> str:
    """The error of every rank, which is one."""
    found = run_ranks(ranks, caught, call, *args)
    assert len({kind for kind, _ in found}) == 1, found
    return f"{found[0][0]}: {found[0][1]}"


def caught(call, *args) -> tuple[str, str]:
    try:
        call(*args)
    except onefold.OnefoldError as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("fields", "stage", "said"),
    [
        ({"optimizer": "nvme"}, 3, "use 'host', 'disk', 'auto' or None"),
        ({"optimizer": "disk"}, 3, "needs path="),
        ({"optimizer": "host", "path": "/tmp"}, 3, "is for 'disk'"),
        ({"optimizer": "disk", "path": 7}, 3, "is not a path"),
        ({"optimizer": "disk", "path": ""}, 3, "is not a path"),
        ({"parameters": "host"}, 3, "set optimizer='host', 'disk' or 'auto' too"),
        ({"optimizer": "host", "parameters": "host"}, 2, "needs stage=3"),
        ({"optimizer": "host"}, 0, "use stage 1, 2 or 3"),
        ({"optimizer": "host", "device_bytes": 1 << 30}, 3, "ask for 'auto'"),
        ({"optimizer": "host", "spare_bytes": -1}, 3, "spare_bytes=-1. is not a number of bytes"),
        ({"optimizer": "host", "spare_bytes": "4G"}, 3, "spare_bytes=.4G.. is not a number of bytes"),
        ({"spare_bytes": 1 << 30}, 3, "is for optimizer='host' or 'auto'"),
        ({"optimizer": "auto", "device_bytes": -1}, 3, "not a positive number"),
        ({"optimizer": "auto", "path": "/tmp", "host_bytes": 0}, 3, "not a positive number"),
        ({"optimizer": "host", "host_bytes": 1 << 30}, 3, "ask for 'auto'"),
        ({"optimizer": "auto", "host_bytes": 1 << 30}, 3, "give path= too"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict, stage: int, said: str) -> None:
    with pytest.raises(onefold.ConfigError, match=said):
        onefold.Zero(stage=stage, offload=onefold.Offload(**fields))


def test_something_else_than_an_offload_is_refused() -> None:
    with pytest.raises(onefold.ConfigError, match="neither 'host'"):
        onefold.Zero(stage=3, offload=7)


def test_a_path_that_is_not_there_is_refused_before_the_run(tmp_path) -> None:
    assert "does not exist; give a folder" in said_by_all(2, built, str(tmp_path / "nowhere"))
    file = tmp_path / "file"
    file.touch()
    assert "is a file; give a folder" in said_by_all(2, built, str(file))


def test_a_path_may_begin_at_the_users_home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Scratch("~", needed_bytes=0).path == tmp_path


def huge(path: str | None) -> None:
    """A model whose states no machine has room for; on the meta device, so nothing of it is made."""
    onefold.init()
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(1 << 20, 1 << 20, bias=False) for _ in range(4)))
    where = {"optimizer": "disk", "path": path} if path else {"optimizer": "host"}
    onefold.shard(layers, stage=3, precision="bf16", offload=onefold.Offload(**where), device="cpu")


def test_too_little_host_memory_is_said_before_anything_is_made() -> None:
    said = said_by_all(2, huge, None)
    assert said.startswith("OffloadError") and "of host memory, but" in said and "move state to disk" in said


def test_too_small_a_disk_is_said_before_anything_is_made(tmp_path) -> None:
    said = said_by_all(2, huge, str(tmp_path))
    assert said.startswith("OffloadError") and str(tmp_path) in said and "larger disk" in said


def first_after_asking(path: Path, pipe: Path) -> str:
    """What rank 1 does first after it has asked for room. Rank 0 asks once it has heard what that is."""
    heard, asked = list[str](), list[bool]()
    reserve, file, agree = Tiers.reserve, Scratch.file, agreement.agree

    def reserves(*args: Any, **kwargs: Any) -> None:
        if torch.distributed.get_rank() == 0 and not heard:
            heard.append(pipe.read_text())
        reserve(*args, **kwargs)
        asked.append(True)

    def says(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def said(*args: Any, **kwargs: Any) -> Any:
            if torch.distributed.get_rank() == 1 and asked and not heard:
                heard.append(what)
                pipe.write_text(what)
            return call(*args, **kwargs)

        return said

    Tiers.reserve, Scratch.file = reserves, says("made a file", file)  # type: ignore[method-assign]
    agreement.agree = says("agreed", agree)
    built(str(path))
    return heard[0]


def test_no_rank_makes_files_before_all_have_asked_for_room(tmp_path) -> None:
    """They would count as taken, and a disk that has room for all ranks would be refused."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert [ended.value for ended in fresh_ranks(2, first_after_asking, tmp_path, pipe)] == ["agreed", "agreed"]


def limited(path: str) -> None:
    """Files may not grow beyond what the values take."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (12 << 10, 12 << 10))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    model, adam = built(path)
    for _ in range(2):
        step(model, adam)


def test_a_disk_that_takes_no_more_is_named_and_all_ranks_end(tmp_path) -> None:
    with start_ranks(2, limited, str(tmp_path), timeout_s=60) as group:
        outcomes = group.join()
    assert all(outcome.exitcode == 1 for outcome in outcomes)
    assert any("OffloadError" in (o.error or "") and str(tmp_path) in (o.error or "") for o in outcomes)
    assert not any(tmp_path.iterdir())


def truncated(path: str) -> None:
    model, adam = built(path)
    step(model, adam)
    engine_of(model).updates.wait()
    if torch.distributed.get_rank() == 0:
        for file in files_in(path):
            os.ftruncate(file.fileno(), 0)
    step(model, adam)
    step(model, adam)


def broken(path: str) -> None:
    """The kernel itself answers EIO for addresses that are not mapped."""
    model, adam = built(path)
    step(model, adam)
    engine_of(model).updates.wait()
    if torch.distributed.get_rank() == 0:
        memory = os.open("/proc/self/mem", os.O_RDWR)
        for file in files_in(path):
            os.dup2(memory, file.fileno())
    step(model, adam)
    step(model, adam)


@pytest.mark.parametrize(("fault", "said"), [(truncated, "cut"), (broken, "Input/output error")])
def test_a_file_that_fails_underneath_is_named_and_all_ranks_end(fault, said: str, tmp_path) -> None:
    with start_ranks(2, fault, str(tmp_path), timeout_s=60) as group:
        outcomes = group.join()
    assert all(outcome.exitcode == 1 for outcome in outcomes)
    assert "OffloadError" in outcomes[0].error and said in outcomes[0].error, outcomes[0].error
    assert not any(tmp_path.iterdir())


def failed_once(path: str) -> list[str]:
    """After an update that failed the values are of two steps, and the model says so."""
    model, adam = built(path)
    step(model, adam)
    engine_of(model).updates.wait()
    for file in files_in(path):
        os.ftruncate(file.fileno(), 0)
    said = []
    for _ in range(2):
        try:
            step(model, adam)
            engine_of(model).updates.wait()
        except onefold.OnefoldError as error:
            said.append(str(error))
    try:
        onefold.save(path, model, adam)
    except onefold.OnefoldError as error:
        said.append(str(error))
    return said


def test_a_model_whose_update_failed_is_not_saved(tmp_path) -> None:
    (said,) = run_ranks(1, failed_once, str(tmp_path))
    assert len(said) == 3
    assert not any(tmp_path.glob("step*"))


def endless(path: str, how: str) -> None:
    model, adam = built(path)
    while True:
        step(model, adam)
        tell(sorted(os.listdir(path)))
        if how == "error":
            raise ValueError("a mistake of the user's")
        if how == "exit":
            return


@pytest.mark.parametrize("how", ["exit", "error", "SIGTERM", "SIGKILL"])
def test_no_file_is_ever_left_behind(how: str, tmp_path) -> None:
    with start_ranks(2, endless, str(tmp_path), how, timeout_s=60) as group:
        assert [group.message(rank) for rank in range(2)] == [[], []], "a file has a name"
        for rank in range(2) if how.startswith("SIG") else ():
            group.kill(rank, getattr(signal, how))
        group.join()
    assert not any(tmp_path.iterdir())
