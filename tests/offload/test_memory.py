"""Where every byte of the states is: device, host and disk hold what the table of tiers says, and nothing more."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.cost.limits import WORKERS
from onefold.offload.disk import Request
from onefold.runtime.engine import engine_of
from onefold.runtime.held_tensors import storages
from tests.harness import fresh_ranks, run_ranks
from tests.harness.grids import thinned
from tests.harness.resident import KEPT_BYTES, resident_bytes
from tests.models import Layers
from tests.offload.runs import SPLIT, files_in

WIDTH, DEPTH = 128, 40
UNIT = WIDTH * WIDTH
PSI = DEPTH * UNIT
CLOSE = 0.05
HOST, DISK = {"optimizer": "host"}, {"optimizer": "disk"}
ALL_HOST, ALL_DISK = {**HOST, "parameters": "host"}, {**DISK, "parameters": "disk"}


class Tall:
    """A tower that trains with its states elsewhere."""

    def __init__(
        self, offload: dict[str, Any], path: str, precision: Any, inside: bool = False, cls: Any = torch.optim.AdamW
    ) -> None:
        onefold.init()
        torch.manual_seed(0)
        on_disk = "disk" in offload.values() or "host_bytes" in offload
        tiers = onefold.Offload(**offload, path=path if on_disk else None) if offload else None
        layers = Layers(WIDTH, DEPTH, bias=False, residual=True)
        self.model = onefold.shard(layers, stage=3, bucket_bytes=2 * UNIT, precision=precision, offload=tiers)
        self.optimizer = onefold.Optimizer(self.model, cls, step_in_backward=inside)

    def backward(self) -> None:
        self.model(torch.randn(4, WIDTH).bfloat16()).float().square().mean().backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def reports(offload: dict[str, str], path: str, precision: Any, inside: bool = False) -> list[onefold.MemoryReport]:
    """After a backward that follows two steps, and after the step."""
    tall = Tall(offload, path, precision, inside)
    tall.step()
    tall.step()
    tall.backward()
    if not inside:
        tall.optimizer.clip_grad_norm(1e9)  # all gradients are complete then
    before = onefold.memory(tall.model)
    tall.optimizer.step()
    tall.optimizer.zero_grad()
    return [before, onefold.memory(tall.model)]


def planned_well(report: onefold.MemoryReport) -> bool:
    """States to the byte, buffers within their bound."""
    device = [report.parameters, report.gradients, report.optimizer]
    states = [row for row in report.elsewhere if row.state != "staging"]
    bounded = [row for row in report.elsewhere if row.state == "staging"]
    return (
        all(row.measured == row.planned for row in [*device, *states])
        and all(row.measured <= row.planned for row in bounded)
        and report.communication.measured <= report.communication.planned
    )


@pytest.mark.parametrize(("precision", "ranks"), thinned(("bf16", SPLIT), (1, 2)))
def test_the_device_keeps_16_bit_values_and_the_host_the_rest(precision: Any, ranks: int) -> None:
    kept = 10 if precision == SPLIT else 12
    for waiting, after in run_ranks(ranks, reports, HOST, "", precision):
        for report in (waiting, after):
            assert planned_well(report), report
            assert report.states == pytest.approx(2 * PSI / ranks, rel=CLOSE), "gradients stream: none stay here"
            assert report.host == pytest.approx((kept + 2) * PSI / ranks, rel=CLOSE)
            assert report.disk == report.pinned == 0
        held = {row.state: row.measured for row in waiting.elsewhere}
        assert held["optimizer"] == pytest.approx(kept * PSI / ranks, rel=0.001)
        assert held["gradients"] == 2 * PSI / ranks
        assert "gradients" not in {row.state for row in after.elsewhere}


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_inside_backward_park_few_gradients(ranks: int) -> None:
    for waiting, after in run_ranks(ranks, reports, HOST, "", "bf16", True):
        assert planned_well(waiting) and planned_well(after), f"{waiting}\n{after}"
        assert "gradients" not in {row.state for row in after.elsewhere}
        assert 1 <= after.host / (12 * PSI / ranks) < 1.05


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_parameters_on_the_host_the_device_keeps_next_to_nothing(ranks: int) -> None:
    for report in [one for rank in run_ranks(ranks, reports, ALL_HOST, "", "bf16") for one in rank]:
        assert planned_well(report), report
        assert report.states < 0.01 * PSI
        assert report.host == pytest.approx((2 + 12 + 2) * PSI / ranks, rel=CLOSE)


class Written:
    """A write on its way, until somebody has waited for it."""

    def __init__(self, pending: Request, on_the_way: set[Written]) -> None:
        self.pending, self.on_the_way = pending, on_the_way
        on_the_way.add(self)

    def wait(self) -> None:
        self.pending.wait()
        self.on_the_way.discard(self)


def files_being_written(path: str) -> int:
    """The most units whose values are on their way to a file when a thread begins an update of another."""
    tall = Tall(ALL_DISK, path, "bf16")
    tall.step()
    engine_of(tall.model).updates.wait()
    most, on_the_way = [0], set[Written]()
    for file in files_in(path):
        if file.name.startswith("parameters of "):
            write = file.write
            file.write = lambda buffer, write=write: Written(write(buffer), on_the_way)
    for unit in engine_of(tall.model).units:
        prepare = unit.start_load

        def counted(*args: Any, prepare: Any = prepare, **kwargs: Any) -> None:
            most.append(len(on_the_way))
            prepare(*args, **kwargs)

        unit.start_load = counted
    tall.step()
    engine_of(tall.model).updates.wait()
    return max(most)


def test_a_thread_takes_no_further_unit_before_its_file_is_written(tmp_path) -> None:
    for most in run_ranks(2, files_being_written, str(tmp_path)):
        assert most < WORKERS


@pytest.mark.parametrize(("offload", "ranks"), thinned((DISK, ALL_DISK), (2, 1)))
def test_the_disk_holds_what_rests_there_and_memory_a_few_units(offload: Any, ranks: int, tmp_path) -> None:
    kept = 14 if offload == ALL_DISK else 12
    for report in [one for rank in run_ranks(ranks, reports, offload, str(tmp_path), "bf16") for one in rank]:
        assert planned_well(report), report
        assert report.disk == pytest.approx(kept * PSI / ranks, rel=CLOSE)
        assert report.host <= (2 * PSI + 8 * 14 * UNIT) / ranks, "beside parked gradients a few units only"


def keys_by_step(offload: dict[str, str], path: str, inside: bool) -> list[Any]:
    """After the second step and after each of three more: every storage of ours, and how long it is."""
    tall = Tall(offload, path, "bf16", inside)
    tall.step()
    tall.step()
    kept, rows = [], []  # kept: a storage freed and made anew cannot come back under its old address
    for _ in range(4):
        engine_of(tall.model).updates.wait()
        found = storages(engine_of(tall.model))
        kept.append([tensor for _, tensor in found.values()])
        rows.append(sorted((key, kind, t.untyped_storage().nbytes()) for key, (kind, t) in found.items()))
        tall.step()
    return rows


@pytest.mark.parametrize(("offload", "inside"), [(HOST, False), (HOST, True), (ALL_HOST, False)])
def test_nothing_is_allocated_after_two_steps_in_device_and_host_memory(offload: Any, inside: bool) -> None:
    for first, *later in run_ranks(2, keys_by_step, offload, "", inside):
        assert later == [first] * 3


def test_with_a_disk_only_buffers_of_files_may_come_later_and_never_beyond_the_plan(tmp_path) -> None:
    """How many files are open at once is a matter of time."""
    for rows in run_ranks(2, keys_by_step, ALL_DISK, str(tmp_path), False):
        states = [[row for row in rows_of_step if not row[1].startswith("staging")] for rows_of_step in rows]
        assert states == [states[0]] * 4
        for earlier, later in pairwise([set(row) - set(kept) for row, kept in zip(rows, states, strict=True)]):
            assert earlier <= later, "what was there is used again"


def peak_of_a_step(offload: dict[str, str]) -> tuple[dict[str, int], onefold.MemoryReport, str]:
    tall = Tall(offload, "", "bf16")
    tall.step()
    tall.step()
    engine_of(tall.model).updates.wait()
    with onefold.track_memory(tall.model) as tracker:
        tall.step()
    return tracker.peak(), onefold.memory(tall.model), str(onefold.placement(tall.model).rows[0])


def test_the_peak_of_the_device_holds_nothing_of_the_hosts() -> None:
    """On a CPU both are the same memory, and the tracker sees every tensor."""
    for peak, report, row in run_ranks(2, peak_of_a_step, ALL_HOST):
        assert peak["optimizer"] == peak["gradients"] == 0
        assert peak["communication"] == report.communication.measured
        assert peak["parameters"] - report.parameters.measured <= 3 * 2 * UNIT, "gathered: in use, and on the way"
        assert peak["activations"] < 0.2 * PSI
        assert row.count("'sharded, host'") == 3
        assert "optimizer, pageable" in str(report) and "total, pageable" in str(report)


def filled(offload: dict[str, Any], path: str, inside: bool) -> tuple[list[str], onefold.MemoryReport, list[Tensor]]:
    """Where the optimizer's state of each unit is, the memory after three steps, and what was trained."""
    tall = Tall(offload, path, "bf16", inside)
    for _ in range(3):
        tall.step()
    rows = onefold.placement(tall.model).rows
    where = [row.optimizer.removeprefix("sharded").removeprefix("replicated") for row in rows]
    with onefold.full_parameters(tall.model):
        values = [param.detach().clone() for param in tall.model.parameters()]
    return where, onefold.memory(tall.model), values


@pytest.mark.parametrize(("ranks", "inside"), [(1, True), (2, False)])
def test_auto_fills_the_device_then_the_host_and_then_the_disk(ranks: int, inside: bool, tmp_path) -> None:
    """A third of what training takes on the device, a third of it on the host: the rest is in files."""
    third = (12 + 4) * PSI // ranks // 3
    plain = run_ranks(ranks, filled, {}, "", False)
    offload = {"optimizer": "auto", "device_bytes": third, "host_bytes": third}
    for (where, report, values), (_, _, expected) in zip(
        run_ranks(ranks, filled, offload, str(tmp_path), inside), plain, strict=True
    ):
        assert where == sorted(where, key=["", ", host", ", disk"].index), "the first of forward on the device"
        assert min(where.count(tier) for tier in ("", ", host", ", disk")) >= 2
        assert planned_well(report), report
        assert report.states + report.communication.measured <= third and report.host <= third
        assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))


def bounded(cls: Any, precision: Any, inside: bool) -> onefold.MemoryReport:
    tall = Tall(HOST, "", precision, inside, cls)
    for _ in range(3):
        tall.step()
    return onefold.memory(tall.model)


@pytest.mark.parametrize(("cls", "precision"), thinned((torch.optim.RAdam, torch.optim.Adagrad), ("bf16", SPLIT)))
def test_classes_without_a_kernel_of_ours_borrow_no_more_than_planned(cls: Any, precision: Any) -> None:
    for report in run_ranks(2, bounded, cls, precision, precision == "bf16"):
        assert planned_well(report), report


def kept_between_steps(path: str) -> tuple[int, int]:
    """What the process holds more after some steps than before the model, and what it accounts for."""
    onefold.init()
    torch.manual_seed(0)
    warm = onefold.shard(nn.Linear(64, 64), stage=3)
    adam = onefold.Optimizer(warm, torch.optim.AdamW, lr=1e-3)
    warm(torch.ones(2, 64)).sum().backward()
    adam.step()
    before = resident_bytes("VmRSS")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    offload = onefold.Offload(optimizer="disk", parameters="disk", path=path)
    onefold.shard(model, stage=3, offload=offload, bucket_bytes=4 << 20)
    adam = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    for _ in range(4):
        model(torch.randn(4, 1024)).square().mean().backward()
        adam.step()
        adam.zero_grad()
    found = onefold.memory(model)  # waits for all updates
    return resident_bytes("VmRSS") - before, found.total + found.pageable


def test_what_updates_on_disk_have_used_goes_back_to_the_system(tmp_path) -> None:
    """100 MB of parameters and 200 MB of moments on disk. An allocator may keep what was freed; its pages must go."""
    [outcome] = fresh_ranks(1, kept_between_steps, str(tmp_path))
    assert outcome.error is None, outcome.error
    held, told = outcome.value
    assert held <= told + (48 << 20) + KEPT_BYTES, f"{held / 1e6:.0f} MB held, {told / 1e6:.0f} MB told"
