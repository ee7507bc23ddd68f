"""Where a step goes, from traces written by hand: spans of threads, kernels on streams, copies, messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.observe.profiling.breakdown import Breakdown, Part, breakdowns
from onefold.observe.profiling.report import ProfileReport, step_profile, summary
from onefold.observe.profiling.trace import BACKWARD, read_trace, with_message_rows

MAIN, AUTOGRAD, UPDATES = 1, 2, 3
COMPUTE, COMMUNICATION, UP = 7, 20, 24


class Written:
    """A trace as torch writes it, in microseconds; what is launched has a number by which it is found again."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def cpu(self, name: str, start: float, stop: float, thread: int = MAIN, cat: str = "cpu_op") -> Written:
        more = {"ts": 1e9 + start, "dur": stop - start, "args": {}}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": thread, **more})
        return self

    def gpu(
        self, name: str, start: float, stop: float, launch: float, stream: int = COMPUTE, *, thread: int = MAIN,
        cat: str = "kernel",
    ) -> Written:  # fmt: skip
        number = len(self.events)
        args = {"stream": stream, "correlation": number}
        more = {"ts": 1e9 + start, "dur": stop - start, "args": args}
        self.events.append({"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": stream, **more})
        self.cpu("cudaLaunchKernel", launch, launch + 0.5, thread, "cuda_runtime")
        self.events[-1]["args"]["correlation"] = number
        return self

    def read(self) -> list[Breakdown]:
        return breakdowns(read_trace({"traceEvents": self.events}))


def parts_us(found: Breakdown) -> dict[Part, float]:
    assert sum(found.parts.values()) == found.wall
    return {part: time / 1000 for part, time in found.parts.items()}


def test_on_a_cpu_the_innermost_span_has_the_time() -> None:
    written = Written().cpu("onefold.profile step 3", 0, 100)
    written.cpu("onefold.forward model the model", 2, 40).cpu("onefold.wait gather-forward a", 10, 20)
    written.cpu("c10d::recv_", 12, 13).cpu("onefold.start gather-forward a", 5, 8).cpu("c10d::send", 6, 7)
    written.cpu(f"{BACKWARD}: Loss", 42, 50).cpu(f"{BACKWARD}: Mm", 51, 60).cpu("onefold.wait reduce a", 55, 58)
    written.cpu("onefold.close backward the model", 60, 62).cpu("onefold.sum reduce a", 61, 62)
    written.cpu("onefold.clip gradients the model", 63, 65).cpu("onefold.wait norm step", 64, 65)
    written.cpu("onefold.step optimizer the model", 65, 90).cpu("onefold.update step a", 66, 76)
    written.cpu("onefold.wait disk a", 80, 82).cpu("onefold.update host b", 0, 30, UPDATES)
    (found,) = written.read()
    assert parts_us(found) == {
        Part.FORWARD: 38 - 10 - 3 + 2,  # and the loss, between forward and backward
        Part.BACKWARD: 20 - 3 - 1,  # and what lies between its nodes
        Part.UPDATE: 1 + 25 - 2, Part.GATHER: 10, Part.REDUCE: 3, Part.SMALL: 1, Part.MESSAGES: 3 + 1, Part.HOST: 2,
        Part.OTHER: 2 + 1 + 10,
    }  # fmt: skip
    assert found.exposed == {("gather-forward", "a"): 10_000, ("reduce", "a"): 3_000, ("disk", "a"): 2_000}
    assert found.beside == 30_000


def test_a_forward_inside_backward_is_a_block_computed_again() -> None:
    written = Written().cpu("onefold.profile step 1", 0, 20).cpu(f"{BACKWARD}: Checkpoint", 0, 20)
    written.cpu("onefold.forward block a", 2, 8).cpu("onefold.again forward b", 10, 14)
    assert parts_us(written.read()[0]) == {Part.BACKWARD: 10, Part.AGAIN: 10}


def test_messages_that_are_not_ours_are_those_of_tensor_parallelism() -> None:
    written = Written().cpu("onefold.profile step 1", 0, 20).cpu("onefold.forward model m", 0, 20)
    written.cpu("_c10d_functional::wait_tensor", 5, 9)
    assert parts_us(written.read()[0]) == {Part.FORWARD: 16, Part.TENSOR: 4}


def on_a_gpu() -> Written:
    """Kernels run later than they are launched. 0 to 100: idle 0-10, forward, a gather that is half hidden, …"""
    written = Written().cpu("onefold.profile step 1", 0, 100).cpu("onefold.forward model m", 0, 20)
    written.gpu("gemm", 10, 30, 2)
    written.cpu("onefold.start gather-forward a", 5, 6)
    written.gpu("ncclDevKernel_AllGather_RING_LL", 20, 40, 5.2, COMMUNICATION)
    written.gpu("gemm", 40, 50, 8)
    written.cpu(f"{BACKWARD}: Mm", 21, 30, AUTOGRAD).gpu("gemm", 50, 70, 22, thread=AUTOGRAD)
    written.cpu("onefold.start reduce a", 25, 26, AUTOGRAD)
    written.gpu("ncclDevKernel_ReduceScatter", 60, 75, 25.1, COMMUNICATION, thread=AUTOGRAD)
    written.cpu("onefold.step optimizer m", 40, 60).gpu("adam", 75, 85, 45)
    written.cpu("onefold.upload shard a", 50, 51)
    written.gpu("Memcpy HtoD (Pinned -> Device)", 84, 90, 50.1, UP, cat="gpu_memcpy")
    return written


def test_on_a_gpu_a_message_is_exposed_while_the_stream_of_compute_is_idle() -> None:
    (found,) = on_a_gpu().read()
    assert parts_us(found) == {
        Part.FORWARD: 20 + 10, Part.GATHER: 10, Part.BACKWARD: 20, Part.REDUCE: 5, Part.UPDATE: 10, Part.HOST: 5,
        Part.IDLE: 10 + 10,
    }  # fmt: skip
    assert found.exposed == {("gather-forward", "a"): 10_000, ("reduce", "a"): 5_000, ("upload shard", "a"): 5_000}


def test_on_a_gpu_a_thread_that_waits_while_the_device_is_idle_names_what_for() -> None:
    (found,) = on_a_gpu().cpu("onefold.wait update a", 92, 98).read()
    assert parts_us(found)[Part.HOST] == 5 + 6
    assert parts_us(found)[Part.IDLE] == 10 + 4


names = st.sampled_from(
    [
        "onefold.wait gather-forward a", "onefold.start reduce b", "onefold.forward model m", f"{BACKWARD}: Mm",
        "onefold.step optimizer m", "onefold.update host a", "c10d::send", "onefold.download gradient a",
    ]
)  # fmt: skip
moments = st.integers(0, 400).map(lambda n: n / 4)
cpu = st.tuples(names, moments, moments, st.sampled_from([MAIN, AUTOGRAD, UPDATES]))
gpu = st.tuples(st.sampled_from(["gemm", "ncclDevKernel"]), moments, moments, moments, st.sampled_from([7, 20, 24]))


@given(st.lists(cpu, max_size=12), st.lists(gpu, max_size=12))
def test_whatever_happens_the_parts_of_a_step_add_up_to_it(cpu: list[Any], gpu: list[Any]) -> None:
    written = Written().cpu("onefold.profile step 1", 5, 50).cpu("onefold.profile step 2", 60, 95)
    for name, a, b, thread in cpu:
        written.cpu(name, min(a, b), max(a, b), thread)
    for name, a, b, launch, stream in gpu:
        written.gpu(name, min(a, b), max(a, b), launch, stream)
    found = written.read()
    assert [(step.name, step.wall) for step in found] == [("1", 45_000), ("2", 35_000)]
    for step in found:
        assert sum(step.parts.values()) == step.wall
        assert sum(step.exposed.values()) <= step.wall


def test_messages_that_travel_get_rows_of_their_own_named_after_what_started_them() -> None:
    written = Written().cpu("onefold.start gather-forward a", 0, 4).cpu("gloo:send", 2, 50, cat="user_annotation")
    found = with_message_rows({"traceEvents": written.events}, "rank 0")["traceEvents"]
    begin, end = (event for event in found if event["name"] == "gloo:send gather-forward a")
    assert (begin["ph"], end["ph"], begin["id"] == end["id"], end["ts"] - begin["ts"]) == ("b", "e", True, 48)


def report(rank: int, gather_ns: int) -> ProfileReport:
    parts = {Part.FORWARD: 30_000_000, Part.GATHER: gather_ns}
    step = step_profile(Breakdown("3", sum(parts.values()), parts, {("gather-forward", "blocks.0"): gather_ns}, 0),
                        {"gather-forward": 1_500_000, "reduce": 700_000, "norm": 16})  # fmt: skip
    return ProfileReport(rank=rank, ranks=2, device="cpu", steps=(step, step))


def test_the_summary_says_what_was_found_and_how_ranks_differ() -> None:
    text = summary([report(0, 10_000_000), report(1, 2_000_000)])
    assert "2 steps of rank 0 of 2 (cpu): 40.00 ms" in text
    assert "exposed gathers 10.00 25.0% 2.00 to 10.00" in " ".join(text.split())
    assert "exposed messages in a step: 10.00 ms, 25.0%\nsent in a step: 1.5 MB to gather, 0.7 MB to reduce" in text
    assert "blocks.0 10.00 gather-forward 10.00" in " ".join(text.split())
    assert "device idle" not in text and "host copies and waits" in text


@pytest.mark.parametrize("gather_ns", [0, 7])
def test_a_report_comes_back_from_json(gather_ns: int) -> None:
    found = report(1, gather_ns)
    assert ProfileReport.from_dict(found.as_dict()) == found
    assert found.exposed_s == gather_ns * 1e-9
