"""A profile of real ranks: every unit's spans as its placement says, one inside the other, and times that add up."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

import onefold
from onefold.comm.spans import SpanName, read
from onefold.errors import ConfigError, OnefoldError, StateError
from onefold.observe.profiling.profile import FILE
from onefold.runtime.engine import engine_of
from tests.harness import fresh_ranks, run_ranks
from tests.models import GPT, GPT_DIM, GPT_SEQ, GPT_VOCAB, AttentionBlock

STEPS = 2


class Profiled(NamedTuple):
    """What one rank found."""

    units: list[str]
    gathered: list[str]  # units that a pass gathers
    spans: list[tuple[SpanName, bool]]  # and whether the training thread has it
    nests: bool
    parts: list[tuple[int, int]]  # of each step: the sum of its parts, and its wall time
    sent: list[tuple[int, int]]
    traffic: dict[str, int]
    text: str

    def of(self, verb: str, what: str, *, here: bool | None = None) -> set[str]:
        """Units that have such a span."""
        return {said.of for said, main in self.spans if said[:2] == (verb, what) and here in (None, main)}

    def whats(self, *verbs: str) -> set[str]:
        return {said.what for said, _ in self.spans if said.verb in verbs}


def profiled(folder: str, optimizer: dict[str, Any] | None = None, **fields: Any) -> Profiled:
    """On a rank: train a small GPT, and read its trace as a viewer would."""
    torch.manual_seed(0)
    model = onefold.shard(GPT(), units=AttentionBlock, **fields)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3, **(optimizer or {}))
    with onefold.profile(model, folder, steps=STEPS, warmup=2) as found:
        while not found.done:
            with found.step():
                model(torch.randint(0, GPT_VOCAB, (2, GPT_SEQ))).float().square().mean().backward()
                adam.step()
                adam.zero_grad()
    engine = engine_of(model)
    engine.updates.wait()
    assert found.path == Path(folder) / FILE.format(dist.get_rank())
    events = [e for e in json.loads(gzip.decompress(found.path.read_bytes()))["traceEvents"] if e["ph"] == "X"]
    ours = [(said, event["tid"]) for event in events if (said := read(event["name"])) is not None]
    main = next(thread for said, thread in ours if said.verb == "profile")
    report = found.report
    return Profiled(
        units=[unit.name for unit in engine.units],
        gathered=[unit.name for unit in engine.unsharding.units],
        spans=[(said, thread == main) for said, thread in ours],
        nests=nests(events),
        parts=[(sum(step.parts_ns.values()), step.wall_ns) for step in report.steps],
        sent=[(step.gathered_bytes, step.reduced_bytes) for step in report.steps],
        traffic=onefold.traffic(model).by_purpose,
        text=found.summary(),
    )


def nests(events: list[dict[str, Any]]) -> bool:
    """Whether on each thread every event ends before the one around it does."""
    threads: dict[Any, list[tuple[int, int]]] = {}
    for event in events:
        if event["cat"] in ("cpu_op", "user_annotation"):
            start = round(event["ts"] * 1000)
            threads.setdefault(event["tid"], []).append((start, start + round(event["dur"] * 1000)))
    for times in threads.values():
        around: list[int] = []
        for start, stop in sorted(times, key=lambda time: (time[0], -time[1])):
            while around and around[-1] <= start:
                around.pop()
            if around and stop > around[-1]:
                return False
            around.append(stop)
    return True


def traced(ranks: int, fn: Any, folder: str) -> list[Any]:
    """What `fn` returned on each of so many new ranks: in ranks that have run for minutes, and profiled before, events
    of a trace were seen that did not nest."""
    outcomes = fresh_ranks(ranks, fn, folder)
    assert [outcome.exitcode for outcome in outcomes] == [0] * ranks, outcomes
    return [outcome.value for outcome in outcomes]


def every_stage(folder: str) -> list[Profiled]:
    onefold.init()
    return [profiled(f"{folder}/{stage}", stage=stage) for stage in range(4)]


def messages(found: Profiled) -> set[str]:
    return {what for what in found.whats("start", "wait", "sum") if what.startswith(("gather", "reduce"))}


def well(found: Profiled) -> None:
    assert found.nests
    assert len(found.parts) == STEPS and all(parts == wall > 0 for parts, wall in found.parts)
    assert {said.of for said, _ in found.spans if said.verb == "profile"} == {"3", "4"}
    assert "clip and update" in found.text
    assert found.of("forward", "block") == {"layers.0", "layers.1", "layers.2"}


def test_each_stage_shows_the_messages_of_its_placement_for_every_unit(tmp_path: Path) -> None:
    moved = [{"gather-gradient"}, {"gather-updated"}, {"gather-updated"}, {"gather-forward", "gather-backward"}]
    for by_stage in traced(2, every_stage, str(tmp_path)):
        for found, gathers in zip(by_stage, moved, strict=True):
            well(found)
            assert messages(found) == {"reduce", *gathers}
            for verb in ("start", "wait"):
                assert found.of(verb, "reduce") == set(found.units)
                for what in gathers - {"gather-backward"}:
                    assert found.of(verb, what) == set(found.units)
            assert found.of("sum", "reduce") == found.of("update", "step") == set(found.units)
            gathered = sum(sent for purpose, sent in found.traffic.items() if purpose.startswith("gather"))
            assert found.sent == [(gathered, found.traffic["reduce"])] * STEPS
        last = by_stage[3]
        assert set() < last.of("wait", "gather-backward") < set(last.gathered)  # all but the one that forward kept


def test_alone_nothing_is_gathered_or_reduced(tmp_path: Path) -> None:
    for found in traced(1, every_stage, str(tmp_path))[0]:
        well(found)
        assert messages(found) == set() and found.sent == [(0, 0)] * STEPS
        assert found.of("update", "step") == set(found.units)


def offloaded(folder: str) -> dict[str, Profiled]:
    onefold.init()
    common = {"stage": 3, "precision": "bf16"}
    return {
        "beside forward": profiled(f"{folder}/late", offload="host", **common),
        "inside backward": profiled(f"{folder}/inside", {"step_in_backward": True}, offload="host", **common),
        "again": profiled(f"{folder}/again", activations="checkpoint+host", **common),
    }


def test_updates_on_the_host_are_seen_in_their_thread_and_blocks_computed_again_in_theirs(tmp_path: Path) -> None:
    for found in traced(2, offloaded, str(tmp_path)):
        for one in found.values():
            well(one)
        for name in ("beside forward", "inside backward"):
            away = found[name]
            assert away.of("update", "host", here=False) == set(away.units)
            assert away.of("update", "host", here=True) == set()
            at_once = name == "beside forward"  # else the thread that updates brings it
            assert away.of("download", "gradient", here=at_once) == set(away.units)
            assert "the host updated" in away.text
        assert found["inside backward"].of("wait", "room") == set(away.units)
        again = found["again"]
        assert again.of("again", "forward") == again.of("upload", "activation") == again.of("forward", "block")
        assert "blocks computed again" in again.text


def one_rank_alone() -> list[int]:
    """Rank 0 profiles, the other does not; how many steps each recorded."""
    onefold.init()
    model = onefold.shard(torch.nn.Linear(GPT_DIM, GPT_DIM), stage=3)
    sgd = onefold.Optimizer(model, torch.optim.SGD, lr=0.1)
    with onefold.profile(model, steps=9, warmup=0 if dist.get_rank() == 0 else 5) as found:
        for _ in range(3):
            with found.step():
                model(torch.ones(1, GPT_DIM)).sum().backward()
                sgd.step()
    return [len(found.report.steps)] if found.done else []


def test_a_rank_may_profile_alone_and_a_profile_that_is_left_early_has_what_it_saw() -> None:
    assert run_ranks(2, one_rank_alone) == [[3], []]


def refusals(folder: str) -> list[str]:
    onefold.init()
    model = onefold.shard(torch.nn.Linear(2, 2), stage=0)
    said = []
    for wrong in ({"steps": 0}, {"steps": 1.5}, {"warmup": -1}):
        with pytest.raises(ConfigError) as error:
            onefold.profile(model, **wrong)
        said.append(str(error.value))
    with pytest.raises(StateError) as error, onefold.profile(model) as found:
        assert not found.done
        found.summary()
    said.append(str(error.value))
    with torch_profile(activities=[ProfilerActivity.CPU]), pytest.raises(StateError) as error:
        onefold.profile(model, warmup=0).__enter__()
    said.append(str(error.value))
    (Path(folder) / "file").touch()
    on_a_file = onefold.profile(model, f"{folder}/file", steps=1, warmup=0)
    with pytest.raises(OnefoldError) as error, on_a_file as found, found.step():
        model(torch.ones(1, 2))
    return [*said, str(error.value)]


def test_what_cannot_be_profiled_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (said,) = run_ranks(1, refusals, str(tmp_path))
    wanted = [
        "steps=0 is not a whole number of at least 1", "steps=1.5 is not", "warmup=-1 is not a whole number of at",
        "0 were run, of which the first 2 are warm-up", "another profiler is running", "give another folder",
    ]  # fmt: skip
    assert all(want in text for want, text in zip(wanted, said, strict=True)), said


def failed_step() -> bool:
    """An error inside a step ends the profile, and nothing of it stays."""
    onefold.init()
    model = onefold.shard(torch.nn.Linear(2, 2), stage=0)
    hooks = len(model._forward_hooks)
    with pytest.raises(ZeroDivisionError), onefold.profile(model, warmup=0) as found, found.step():
        model(torch.ones(1, 2))
        raise ZeroDivisionError
    return len(model._forward_hooks) == hooks and not torch.autograd.profiler._is_profiler_enabled


def repeated_step() -> int:
    """A step that fails and is tried again; how many are reported."""
    onefold.init()
    model = onefold.shard(torch.nn.Linear(2, 2), stage=0)
    with onefold.profile(model, steps=2, warmup=0) as found:
        for fails in (False, True, False):
            with suppress(ZeroDivisionError), found.step():
                model(torch.ones(1, 2))
                _ = 1 / 0 if fails else 1
    return len(found.report.steps)


def test_a_step_that_failed_is_not_counted() -> None:
    assert run_ranks(1, repeated_step) == [2]


def test_an_error_inside_a_step_ends_the_profile_and_nothing_of_it_stays() -> None:
    assert run_ranks(1, failed_step) == [True]
