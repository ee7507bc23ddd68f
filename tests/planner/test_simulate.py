"""One rank of many: what of its step is compute, and what the host adds."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch
from torch import nn

from onefold.cli.main import main
from onefold.cli.simulate import as_dict, show
from onefold.comm.mesh import simulated_axes
from onefold.observe.simulation import Simulation, simulate
from onefold.observe.utilization import Busy, busy
from onefold.optim.kernels.cpu import available, update
from onefold.optim.kernels.rule import next_step
from onefold.settings.zero import Zero
from tests.models import Thinker

CPU = torch.device("cpu")


def taken(kind: type[nn.Sequential], ranks: int, precision: str = "fp32") -> Simulation:
    def build() -> nn.Module:
        return kind(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)

    return simulate(build, torch.ones(8, 64), Zero(stage=3, precision=precision), ranks=ranks, device="cpu", init=init)


def test_what_only_the_host_does_is_launch_overhead_and_not_compute():
    found = taken(Thinker, ranks=4)
    assert found.launch_s >= 0.5 * Thinker.THOUGHT_S  # its two terms are of two steps, on a machine that may be busy
    assert 0 < found.compute_s < Thinker.THOUGHT_S
    assert found.compute_s + found.launch_s + found.busy.stand_ins_s == pytest.approx(found.steps_s[-1])


def test_launch_overhead_that_a_slow_profile_hides_is_not_said_to_be_none(capsys):
    found = taken(nn.Sequential, ranks=4)
    level = dataclasses.replace(found, busy=Busy(found.steps_s[-1], 0.01 * found.steps_s[-1]))
    assert level.launch_s == 0, "steps differ by so much, and all of it was compute"
    hidden = dataclasses.replace(found, busy=Busy(found.steps_s[-1], 0.1 * found.steps_s[-1]))
    assert hidden.launch_s is None and as_dict(hidden)["launch_s"] is None
    show("a model", hidden)
    said = " ".join(capsys.readouterr().out.split())
    assert "launch overhead " not in said.rpartition(";")[0] and said.endswith("so launch overhead is unknown")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_line(capsys):
    assert main(["simulate", "--model", "gpt-tiny", "--ranks", "8", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "onefold: device 'cuda': torch finds no CUDA device on this machine; use cpu\n"


def test_one_rank_has_no_message_to_stand_for_and_several_have():
    assert taken(nn.Sequential, ranks=1).busy.stand_ins_s == 0
    assert taken(nn.Sequential, ranks=4).busy.stand_ins_s > 0


@pytest.mark.skipif(not available(), reason="the update kernel needs a compiler")
def test_an_update_in_c_is_compute():
    numel = 1 << 22
    grad, copy = (torch.ones(numel, dtype=torch.bfloat16) for _ in range(2))
    moments = {name: torch.zeros(numel) for name in ("exp_avg", "exp_avg_sq")}
    group = dict(torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).param_groups[0])
    state = {"step": torch.tensor(0.0), **moments}
    master, seconds = torch.ones(numel), []

    def step() -> None:
        start = time.perf_counter()
        update(next_step(torch.optim.AdamW, group, state, grad.numel(), grad.device), grad, copy, master, 1.0, 1)
        seconds.append(time.perf_counter() - start)

    assert busy(step, CPU).compute_s > 0.5 * seconds[0]


def test_the_profilers_own_words_stay_off_the_screen(capfd):
    busy(lambda: torch.ones(4).sum(), CPU)
    print("seen")
    assert capfd.readouterr() == ("seen\n", "")


def test_a_rank_without_peers_hears_itself():
    shard = simulated_axes(4, 1, plays="nccl").shard
    flat = torch.arange(8.0)
    shard.group._allgather_base(flat, flat.view(4, -1)[1]).wait()
    assert flat.tolist() == [2.0, 3.0] * 4
    part = torch.empty(2)
    shard.group._reduce_scatter_base(part, torch.arange(8.0), None).wait()
    assert part.tolist() == [2.0, 3.0]
    shard.group.recv([part], 0, 7).wait()
    assert part.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("form", ["json", "text"])
def test_compute_and_launch_overhead_are_reported(form, capsys):
    arguments = ["--model", "gpt-tiny", "--layers", "1", "--ranks", "8", "--precision", "fp32", "--device", "cpu"]
    assert main(["simulate", *arguments, *(["--json"] if form == "json" else [])]) == 0
    said = capsys.readouterr().out
    if form == "text":  # on a busy machine the step under the profiler may take longer than the step without
        assert "the last step: compute " in said and "launch overhead " in said
        return
    found = json.loads(said)
    compute_s, launch_s, copies_s, step_s = (
        *(found[name] for name in ("compute_s", "launch_s", "stand_ins_s")), found["steps_s"][-1],
    )  # fmt: skip
    assert compute_s > 0 and copies_s > 0
    if launch_s is None:
        assert compute_s + copies_s > step_s
    else:
        assert launch_s == pytest.approx(max(0.0, step_s - compute_s - copies_s))
