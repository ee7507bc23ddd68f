"""What users do between steps while the host updates: save, load, evaluate, edit, interrupt, ask twice.

Each with several units and with one, on one rank (where values stay whole) and on two.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.runtime.engine import engine_of
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.offload.runs import PRECISIONS, SPLIT, TIERS, files_in, offload_of

WIDTH, PATIENCE_S = 32, 60.0
SEVERAL, ONE = 4 << 10, 32 << 20  # bucket_bytes: a unit for each layer, one for all


def layers(seed: int = 0, frozen: int = 0, count: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    made = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    made[:frozen].requires_grad_(False)
    return made


def built(
    offload: Any, *, seed: int = 0, frozen: int = 0, cls: Any = torch.optim.AdamW, inside: bool = False, **fields: Any
) -> tuple[nn.Sequential, onefold.Optimizer]:
    onefold.init()
    fields = {"stage": 3, "bucket_bytes": SEVERAL, **fields}
    model = onefold.shard(layers(seed, frozen), offload=offload, **fields)
    return model, onefold.Optimizer(model, cls, lr=1e-2, step_in_backward=inside)


def rows(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, WIDTH, generator=generator).to(next(model.parameters()).dtype)


def backward(model: nn.Module, seed: int = 1) -> None:
    model(rows(model, seed)).float().square().sum().backward()


def step(model: nn.Module, optimizer: onefold.Optimizer, seed: int = 1) -> None:
    backward(model, seed)
    optimizer.step()
    optimizer.zero_grad()


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except onefold.OnefoldError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@contextmanager
def interrupted() -> Iterator[Callable[[], None]]:
    """As by Ctrl-C: calling what this gives, in any thread, interrupts the main one."""

    def raise_it(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, raise_it)
    try:
        yield lambda: os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


# -- saving and loading ------------------------------------------------------------------------------------------------


def go_on_from_a_file(folder: str, offload: onefold.Offload, precision: Any, bucket_bytes: int) -> list[bool]:
    """Save, train, save, load the first and train: as a run does that loads the first in a process of its own."""
    fields: dict[str, Any] = {"precision": precision, "bucket_bytes": bucket_bytes}
    model, optimizer = built(offload, **fields)
    step(model, optimizer)
    first = onefold.save(folder, model, optimizer, step=1)
    step(model, optimizer, 2)
    onefold.save(folder, model, optimizer, step=2)
    onefold.load(str(first), model, optimizer)
    step(model, optimizer, 3)
    other, adam = built(offload, seed=5, **fields)
    onefold.load(str(first), other, adam)
    step(other, adam, 3)
    plain, adam = built(None, seed=6, **fields)
    onefold.load(str(first), plain, adam)
    step(plain, adam, 3)
    want = onefold.full_state_dict(plain)
    return [same(want, onefold.full_state_dict(model)), same(want, onefold.full_state_dict(other))]


@pytest.mark.parametrize(
    ("tiers", "ranks", "bucket_bytes", "precision"),
    thinned(TIERS, (1, 2), (SEVERAL, ONE), ("fp32", "bf16", "split")),
)
def test_a_run_goes_on_from_what_it_saved_also_in_its_own_process(
    tiers: str, ranks: int, bucket_bytes: int, precision: str, tmp_path
) -> None:
    offload = offload_of(tiers, str(tmp_path))
    found = run_ranks(ranks, go_on_from_a_file, str(tmp_path / "saved"), offload, PRECISIONS[precision], bucket_bytes)
    assert found == [[True, True]] * ranks


def edit_between_saves(folder: str, offload: onefold.Offload, bucket_bytes: int) -> bool:
    model, optimizer = built(offload, stage=2, precision="bf16", bucket_bytes=bucket_bytes)
    step(model, optimizer)
    onefold.save(folder, model, optimizer, step=1)
    model[3].load_state_dict({"weight": torch.full((WIDTH, WIDTH), 0.5), "bias": torch.full((WIDTH,), 0.5)})
    second = onefold.save(folder, model, optimizer, step=2)
    plain, _ = built(None)
    onefold.load(str(second), plain)
    state = onefold.full_state_dict(plain)
    return not state or bool((state["3.weight"] == 0.5).all() and (state["3.bias"] == 0.5).all())


@pytest.mark.parametrize("tiers", ["optimizer on the host", "optimizer on disk"])
def test_what_is_edited_after_a_save_is_in_the_next(tiers: str, tmp_path) -> None:
    for bucket_bytes in (SEVERAL, ONE):
        offload = offload_of(tiers, str(tmp_path))
        assert run_ranks(2, edit_between_saves, str(tmp_path / str(bucket_bytes)), offload, bucket_bytes) == [True] * 2


def evaluate_between_saves(folder: str, offload: onefold.Offload, wait: bool, frozen: int) -> bool:
    model, optimizer = built(offload, bucket_bytes=ONE, frozen=frozen)
    step(model, optimizer)
    onefold.save(folder, model, optimizer, step=1, wait=wait)
    with torch.no_grad():
        model(rows(model, 2))
    second = onefold.save(folder, model, optimizer, step=2, wait=wait)
    onefold.finish_saves()
    other, adam = built(offload, seed=3, frozen=frozen)
    onefold.load(str(second), other, adam)
    return same(onefold.full_state_dict(other), onefold.full_state_dict(model))


@pytest.mark.parametrize(("tiers", "frozen"), thinned(TIERS, [0, 2]))
def test_a_save_after_an_evaluation_holds_all_values_frozen_ones_too(tiers: str, frozen: int, tmp_path) -> None:
    for wait in (True, False):
        offload = offload_of(tiers, str(tmp_path))
        assert run_ranks(2, evaluate_between_saves, str(tmp_path / str(wait)), offload, wait, frozen) == [True] * 2


# -- between backward and step -----------------------------------------------------------------------------------------


def evaluate_before_steps(offload: Any) -> dict[str, Tensor]:
    model, optimizer = built(offload, inside=True)
    for seed in range(3):
        backward(model, seed)
        with torch.no_grad():
            model(rows(model, 9))
        optimizer.step()
        optimizer.zero_grad()
    return onefold.full_state_dict(model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_between_a_backward_that_updates_and_its_step(ranks: int) -> None:
    plain, moved = (run_ranks(ranks, evaluate_before_steps, offload)[0] for offload in (None, "host"))
    assert same(plain, moved)


def write_and_step() -> tuple[str, bool]:
    """The write is refused before any unit was updated; what was not refused goes on."""
    model, optimizer = built("host")
    step(model, optimizer)
    backward(model, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model[2].weight.mul_(1.0)
    refused = said(optimizer.step)
    alike = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer, 3)
    return refused, alike


def test_a_write_that_is_refused_leaves_all_as_it_was_and_nobody_waiting() -> None:
    [(refused, alike)] = run_ranks(1, write_and_step)
    assert "StateError: 2.weight was written" in refused and alike


def update_inside_whole(offload: Any, write: bool) -> str:
    model, _ = built(offload, inside=True)
    with onefold.full_parameters(model, write=write):
        return said(lambda: backward(model))


@pytest.mark.parametrize(("ranks", "write"), thinned([1, 2], [True, False]))
def test_a_backward_that_updates_is_refused_where_parameters_are_whole(ranks: int, write: bool) -> None:
    for offload in (None, "host"):
        for told in run_ranks(ranks, update_inside_whole, offload, write):
            assert told.startswith("StateError") and "inside full_parameters" in told


def norms_and_values(offload: Any, when: str) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = built(offload, cls=torch.optim.SGD)
    backward(model)
    norms = []
    if when == "twice":
        norms = [optimizer.clip_grad_norm(1.0).item(), optimizer.clip_grad_norm(1.0).item()]
    optimizer.step()
    if when == "after step":
        norms = [optimizer.clip_grad_norm(1e-3).item()]
    optimizer.zero_grad()
    step(model, optimizer, 2)
    return norms, onefold.full_state_dict(model)


@pytest.mark.parametrize("when", ["twice", "after step"])
def test_a_norm_that_is_asked_for_again_or_late_changes_no_update(when: str) -> None:
    (norms, plain), (others, moved) = (run_ranks(1, norms_and_values, offload, when)[0] for offload in (None, "host"))
    assert norms == others and same(plain, moved)
    assert when != "twice" or norms[1] == pytest.approx(1.0, abs=1e-3)


def add_a_group_while_updates_run(held_back: bool) -> dict[str, Tensor]:
    gate = threading.Event()
    model = onefold.shard(layers(), stage=3, offload="host" if held_back else None, bucket_bytes=SEVERAL)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2, groups=[{"params": [*model[:2].parameters()]}])
    if held_back:
        for one in optimizer.by_unit:
            one.update = _after(gate, one.update)
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    threading.Timer(0.2, gate.set).start()
    optimizer.add_param_group({"params": [*model[2:].parameters()], "lr": 1e-3})
    assert gate.is_set() or not held_back
    step(model, optimizer, 2)
    return onefold.full_state_dict(model)


def _after(gate: threading.Event, call: Callable[..., Any]) -> Callable[..., Any]:
    def later(*args: Any, **fields: Any) -> Any:
        assert gate.wait(PATIENCE_S)
        return call(*args, **fields)

    return later


def test_a_group_that_is_added_waits_for_updates_of_the_groups_before_it() -> None:
    plain, moved = (run_ranks(1, add_a_group_while_updates_run, held_back)[0] for held_back in (False, True))
    assert same(plain, moved)


# -- failures and interrupts -------------------------------------------------------------------------------------------


class Fragile(torch.optim.SGD):
    """Fails where it is told to."""

    broken = False

    def step(self, closure: Any = None) -> None:
        if Fragile.broken:
            raise MemoryError("none left")
        super().step()


def fail_and_load(folder: str) -> tuple[str, str, str, bool]:
    Fragile.broken = False
    model, optimizer = built("host", cls=Fragile)
    step(model, optimizer)
    saved = onefold.save(folder, model, optimizer)
    want = onefold.full_state_dict(model)
    Fragile.broken = True
    step(model, optimizer, 2)
    first, second = said(lambda: onefold.full_state_dict(model)), said(lambda: onefold.full_state_dict(model))
    Fragile.broken = False
    loaded = said(lambda: onefold.load(str(saved), model, optimizer))
    right = same(want, onefold.full_state_dict(model))
    step(model, optimizer, 3)
    return first, second, loaded, right


def test_failed_updates_are_heard_and_one_load_mends_them(tmp_path) -> None:
    [(first, second, loaded, right)] = run_ranks(1, fail_and_load, str(tmp_path / "run"))
    assert first.startswith("OffloadError: the update of ") and second.startswith("StateError: the update of ")
    assert loaded == "nothing" and right


def cut_and_save(folder: str, scratch: str, precision: Any, wait: bool) -> list[str]:
    model, optimizer = built(onefold.Offload(optimizer="disk", path=scratch), precision=precision, bucket_bytes=ONE)
    step(model, optimizer)
    onefold.full_state_dict(model)  # nothing is on its way to a file any more
    for file in files_in(scratch):
        os.ftruncate(file.fileno(), 0)
    tries: list[Callable[[], Any]] = [lambda: onefold.save(folder, model, optimizer, step=1, wait=wait)] * 2
    tries += [lambda: onefold.save(folder, model, step=1, wait=wait), lambda: onefold.full_state_dict(model)]
    return [said(one) for one in tries]


@pytest.mark.parametrize("wait", [True, False])
def test_what_could_not_be_read_is_not_there_however_often_one_asks(wait: bool, tmp_path) -> None:
    for precision in ("bf16", SPLIT):
        [told] = run_ranks(1, cut_and_save, str(tmp_path / "run"), str(tmp_path), precision, wait)
        assert all(one.startswith("OffloadError") for one in told), told


def interrupt_a_wait(folder: str) -> tuple[bool, bool]:
    """While forward waits for an update; the update goes on, and whoever loads waits for its end."""
    gate, reached = threading.Event(), threading.Event()

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            reached.set()
            assert gate.wait(PATIENCE_S)
            super().step()

    gate.set()
    model, optimizer = built(onefold.Offload(optimizer="host", parameters="host"), cls=Slow)
    step(model, optimizer)
    saved = onefold.save(folder, model, optimizer)
    want = onefold.full_state_dict(model)
    gate.clear()
    reached.clear()
    step(model, optimizer, 2)
    assert reached.wait(PATIENCE_S)
    caught = False
    with interrupted() as interrupt:
        threading.Timer(0.3, interrupt).start()
        try:
            model(rows(model, 3))
        except KeyboardInterrupt:
            caught = True
    threading.Timer(0.3, gate.set).start()
    onefold.load(str(saved), model, optimizer)
    assert gate.is_set()
    return caught, same(want, onefold.full_state_dict(model))


def test_an_interrupted_wait_is_no_end_of_an_update(tmp_path) -> None:
    assert run_ranks(1, interrupt_a_wait, str(tmp_path / "run")) == [(True, True)]


def interrupt_a_step() -> tuple[bool, bool]:
    """While step() waits for updates that backward has queued: they go on, and step() is called again."""
    gate, found = threading.Event(), []

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            assert gate.wait(PATIENCE_S)
            super().step()

    for disturbed in (False, True):
        caught = False
        gate.set()
        model, optimizer = built(
            onefold.Offload(optimizer="host"), cls=Slow, inside=True, stage=2, bucket_bytes=1 << 20
        )  # one unit: backward waits for no update of another
        step(model, optimizer)
        if disturbed:
            gate.clear()
            backward(model, 2)
            with interrupted() as interrupt:
                threading.Timer(0.3, interrupt).start()
                try:
                    optimizer.step()
                except KeyboardInterrupt:
                    caught = True
            gate.set()
            optimizer.step()
            optimizer.zero_grad()
        else:
            step(model, optimizer, 2)
        step(model, optimizer, 3)
        found.append(onefold.full_state_dict(model))
    return caught, same(*found)


def test_a_step_that_is_interrupted_while_it_waits_can_be_called_again() -> None:
    assert run_ranks(1, interrupt_a_step) == [(True, True)]


def interrupt_a_load(folder: str, scratch: str) -> tuple[bool, bool]:
    """While it waits for a write to disk."""
    model, optimizer = built(onefold.Offload(optimizer="disk", path=scratch), precision="bf16")
    step(model, optimizer)
    saved = onefold.save(folder, model, optimizer)
    want = onefold.full_state_dict(model)
    name = f"optimizer state of {engine_of(model).units[0].name}"
    (number,) = (file.fileno() for file in files_in(scratch) if file.name == name)
    gate, write, caught = threading.Event(), os.pwritev, False

    def slow(file: int, buffers: Any, start: int) -> int:
        assert file != number or gate.wait(PATIENCE_S)
        return write(file, buffers, start)

    with pytest.MonkeyPatch.context() as patch, interrupted() as interrupt:
        patch.setattr(os, "pwritev", slow)
        threading.Timer(0.3, interrupt).start()
        try:
            onefold.load(str(saved), model, optimizer)
        except KeyboardInterrupt:
            caught = True
    gate.set()
    onefold.load(str(saved), model, optimizer)
    step(model, optimizer, 2)
    onefold.load(str(saved), model, optimizer)
    return caught, same(want, onefold.full_state_dict(model))


def test_an_interrupted_load_can_be_called_again(tmp_path) -> None:
    assert run_ranks(1, interrupt_a_load, str(tmp_path / "run"), str(tmp_path)) == [(True, True)]


def buffers_planned() -> tuple[int, int]:
    model, optimizer = built(None, inside=True)
    step(model, optimizer)
    step(model, optimizer)
    found = onefold.memory(model).communication
    return found.measured, found.planned


def test_the_plan_knows_the_buffers_of_updates_inside_backward_on_one_rank() -> None:
    [(measured, planned)] = run_ranks(1, buffers_planned)
    assert 0 < measured <= planned
