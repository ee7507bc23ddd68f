"""Offload(optimizer="auto"): parameters, state and blocks that move in the first step and later, in what users do
beside plain steps: to the bits of the run without offload, and within the budget."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import onefold
from onefold.errors import PlacementWarning
from onefold.model.containers import tensors_in
from onefold.runtime.engine import engine_of
from onefold.settings.placement import Tier
from tests.harness import run_ranks
from tests.models import Residual
from tests.offload.test_auto_parameters import SMALLEST, largest

WIDTH, DEPTH = 32, 6


class Trained(NamedTuple):
    model: Any
    optimizers: list[onefold.Optimizer]


class Case(NamedTuple):
    """How a model trains, and what is done with it before steps, by their numbers."""

    make: Callable[[], nn.Module] = lambda: nn.Sequential(*(Residual(WIDTH) for _ in range(DEPTH)))
    fields: dict[str, Any] = {}  # of shard()  # noqa: RUF012
    settings: dict[str, Any] = {}  # of Optimizer()  # noqa: RUF012
    optimizers: int = 1
    shared_units: bool = False  # several Optimizers have parameters of one unit
    clip: bool = False
    rows: tuple[int, ...] = (16, 16, 16)  # of the micro-batches of each step, the last of which may be longer
    longer: int = 1  # that many times
    alone: bool = False  # only on the last rank are they longer than in the first step
    micro: tuple[int, ...] = (1,) * 5  # micro-batches of each step
    overflow: int = -1  # the step whose loss is infinite
    raises: int = -1  # the step whose backward raises, and is repeated
    average: bool = False
    amid: int = -1  # the step in which state is saved, and the model evaluated, between backward and step()
    before: dict[int, Callable[[Trained, str], Trained | None]] = {}  # noqa: RUF012
    host_bytes: int = 0  # with a disk
    fill: float = 0.15  # 0: the budget is the peak of the smallest placement; 1: that of the run without offload


def twice() -> nn.Module:
    """Two blocks run again at the end, and two have the same weight."""
    blocks = [Residual(WIDTH) for _ in range(DEPTH)]
    blocks[3].up.weight = blocks[2].up.weight
    return nn.Sequential(*blocks, *blocks[:2])


def half_frozen() -> nn.Module:
    layers = nn.Sequential(*(Residual(WIDTH) for _ in range(DEPTH)))
    layers[::2].requires_grad_(False)
    return layers


def build(case: Case, offload: Any) -> Trained:
    onefold.init()
    torch.manual_seed(0)
    fields = {"stage": 3, **case.fields}
    model = onefold.shard(case.make(), units=(Residual,), bucket_bytes=4 * WIDTH**2, offload=offload, **fields)
    return Trained(model, optimizers(case, model))


def optimizers(case: Case, model: Any) -> list[onefold.Optimizer]:
    settings = {"lr": 1e-2, **case.settings}
    if case.optimizers == 1:
        return [onefold.Optimizer(model, torch.optim.AdamW, **settings)]
    params = [*model.parameters()]
    halves = (params[::2], params[1::2]) if case.shared_units else (params[:18], params[18:])
    return [onefold.Optimizer(model, torch.optim.AdamW, groups=[{"params": half}], **settings) for half in halves]


def unfreeze(trained: Trained, folder: str) -> Trained:
    trained.model.requires_grad_(True)
    return Trained(trained.model, [onefold.Optimizer(trained.model, torch.optim.AdamW, lr=1e-2)])


def write(trained: Trained, folder: str) -> None:
    with onefold.full_parameters(trained.model, write=True), torch.no_grad():
        for param in trained.model.parameters():
            param.mul_(0.9)


def load_again(trained: Trained, folder: str) -> Trained:
    """Saves, and goes on with a fresh model that has loaded it."""
    offload = engine_of(trained.model).resolved.settings.offload
    saved = onefold.save(folder, trained.model, trained.optimizers[0], overwrite=True)
    fresh = build(Case(), offload)
    onefold.load(saved, fresh.model, fresh.optimizers[0])
    return fresh


def backward(case: Case, trained: Trained, number: int) -> float:
    total, micro = 0.0, case.micro[number]
    for part in range(micro):
        generator = torch.Generator().manual_seed(100 * number + part)
        dtype = engine_of(trained.model).resolved.precision.compute
        rows = case.rows[number] * (case.longer if number and part == micro - 1 else 1)
        if case.alone and torch.distributed.get_rank() < torch.distributed.get_world_size() - 1:
            rows = case.rows[0]
        x = torch.randn(rows, WIDTH, generator=generator).to(dtype)
        with onefold.accumulate(trained.model) if part < micro - 1 else nullcontext():
            loss = trained.model(x).float().square().mean() / micro
            trained.optimizers[0].backward(loss * float("inf") if number == case.overflow else loss)
        total += loss.item()
    return total


def fail(case: Case, trained: Trained, number: int) -> None:
    """A backward that raises half way."""

    def refuse(*_: Any) -> None:
        raise ZeroDivisionError("in backward")

    handle = trained.model[2].register_full_backward_hook(refuse)
    with pytest.raises(ZeroDivisionError):
        backward(case, trained, number)
    handle.remove()
    trained.optimizers[0].zero_grad()


def step(case: Case, trained: Trained, number: int) -> list[float]:
    if number == case.raises:
        fail(case, trained, number)
    found = [backward(case, trained, number)]
    if number == case.amid:
        with torch.no_grad():
            found.append(trained.model(torch.ones(2, WIDTH)).sum().item())
        tensors = tensors_in(trained.optimizers[0].state_dict()["slices"])
        found.append(float(sum(tensor.double().sum() for tensor in tensors)))
    if case.clip:
        found += [one.clip_grad_norm(0.01).item() for one in trained.optimizers]
    for one in trained.optimizers:
        one.step()
    for one in trained.optimizers:
        one.zero_grad()
    return found


class Seen(NamedTuple):
    numbers: list[float]
    params: dict[str, Tensor]
    peaks: list[int]
    wrong: list[str]
    away: int  # units whose parameters are off the device in the end
    said: list[str]


def run(case: Case, offload: Any, folder: str) -> Seen:
    trained, numbers, peaks = build(case, offload), list[float](), list[int]()
    average = onefold.EMA(trained.model, 0.9) if case.average else None
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for number in range(len(case.rows)):
            if number in case.before:
                trained = case.before[number](trained, folder) or trained
            with onefold.track_memory(trained.model) as seen:
                numbers += step(case, trained, number)
                engine_of(trained.model).updates.wait()
            peaks.append(seen.peak_bytes)
            if average is not None:
                average.update()
    if average is not None:
        with average.applied(), torch.no_grad():
            numbers.append(trained.model(torch.ones(2, WIDTH)).sum().item())
    held = onefold.memory(trained.model).parameters
    wrong = [f"parameters: {held}"] * (held.measured != held.planned)
    tiers = [unit.placement.parameters_tier for unit in engine_of(trained.model).units]
    said = [str(one.message) for one in heard if issubclass(one.category, PlacementWarning)]
    away = len(tiers) - tiers.count(Tier.DEVICE)
    return Seen(numbers, onefold.full_state_dict(trained.model), peaks, wrong, away, said)


AUTO = {"activations": "auto"}
CASES = {
    "two Optimizers": Case(optimizers=2, clip=True),
    "two Optimizers that share units": Case(optimizers=2, shared_units=True),
    "fp16, overflow in the first step": Case(fields={"precision": "fp16"}, overflow=0),
    "a first backward that raises": Case(raises=0),
    "a unit used twice, a tied weight": Case(twice, fields=AUTO, rows=(64, 64, 64)),
    "unfrozen after the first step": Case(half_frozen, before={1: unfreeze}),
    "parameters are written": Case(before={0: write, 1: write}),
    "loaded into a fresh model": Case(before={1: load_again}),
    "parameters on disk, averaged": Case(average=True, host_bytes=60_000),
    "accumulation begins": Case(rows=(16,) * 4, micro=(1, 3, 3, 1)),
    "accumulation and longer batches begin": Case(rows=(16, 64, 64, 16), micro=(1, 3, 3, 1), fill=0.4),
    "accumulation begins, 16 bits": Case(rows=(16,) * 4, micro=(1, 3, 3, 1), fields={"precision": "bf16"}),
    "longer in a second micro-batch, clipped": Case(rows=(16,) * 3, micro=(2, 2, 2), longer=8, clip=True, fill=0.3),
    "longer on one rank": Case(rows=(16, 64, 64, 16), alone=True, fill=0.4),
    "longer, updated in backward": Case(rows=(16, 64, 64, 16), settings={"step_in_backward": True}, fill=0.4),
    "longer and saved in the middle": Case(rows=(16, 128, 128, 16), fill=0.4, amid=1),
    "accumulation, then longer batches, then both": Case(rows=(16, 16, 64, 64, 16), micro=(1, 3, 1, 3, 1), fill=0.3),
    "longer, averaged": Case(rows=(16, 64, 64), average=True, fill=0.4),
    "longer, 16 bits": Case(rows=(16, 64, 64), fields={"precision": "bf16"}, fill=0.4),
    "longer, replicated parameters": Case(rows=(16, 64, 64), fields={"stage": 2}, fill=0.6),
    "longer, blocks kept": Case(rows=(16, 64, 64, 16), fields=AUTO, fill=0.4),
    "longer, in 8 bits": Case(rows=(16, 64, 64), settings={"state": "8bit"}, fill=0.6),
    "longer, two Optimizers": Case(rows=(16, 64, 64), optimizers=2, fill=0.4),
    "longer, overflow": Case(rows=(16, 64, 64), fields={"precision": "fp16"}, overflow=1, fill=0.4),
    "longer, a backward that raises": Case(rows=(16, 64, 64), raises=1, fill=0.4),
    "longer, then shorter": Case(fields=AUTO, rows=(16, 256, 256, 16)),
    "longer, with whole parameters on one rank": Case(rows=(1, 128, 128, 1), fill=0.5),
    "negotiated, clipped": Case(fields={"schedule": "negotiate"}, clip=True),
    "kept unsharded": Case(fields={"reshard_after_forward": False, "prefetch": 2, **AUTO}, rows=(64, 64, 64)),
}


def tried(name: str, folder: str) -> tuple[list[str], int, list[str]]:
    """What differs or takes too much, the units whose parameters are off the device, and warnings."""
    case = CASES[name]
    smallest = SMALLEST if case.fields.get("stage", 3) == 3 else onefold.Offload(optimizer="host")
    plain, low = run(case, None, f"{folder}/plain"), run(case, smallest, f"{folder}/low")
    most, least = largest(max(plain.peaks), max(low.peaks))
    budget, disk = int(least + case.fill * (most - least)) + 64, dict[str, Any]()
    if case.host_bytes:
        disk = {"path": folder, "host_bytes": case.host_bytes}
    auto = run(case, onefold.Offload(optimizer="auto", device_bytes=budget, **disk), f"{folder}/auto")
    wrong = [*auto.wrong, *(n for n in plain.params if not torch.equal(plain.params[n], auto.params[n]))]
    wrong += [f"{auto.numbers} instead of {plain.numbers}"] * (repr(auto.numbers) != repr(plain.numbers))
    return [*wrong, *[f"{auto.peaks} of {budget} bytes"] * (max(auto.peaks) > budget)], auto.away, auto.said


ONE, TWO = (
    [*CASES],
    [
        "two Optimizers",
        "a first backward that raises",
        "loaded into a fresh model",
        "accumulation and longer batches begin",
        "longer on one rank",
        "longer, updated in backward",
        "longer, replicated parameters",
        "longer, averaged",
        "longer in a second micro-batch, clipped",
    ],
)


@pytest.mark.parametrize(("ranks", "name"), [*((1, name) for name in ONE), *((2, name) for name in TWO)])
def test_what_moves_changes_no_bit_and_leaves_room(ranks: int, name: str, tmp_path: Any) -> None:
    for wrong, _, _ in run_ranks(ranks, tried, name, str(tmp_path)):
        assert not wrong


def too_long() -> list[str]:
    """What is said where a later step does not fit with no optimizer state on the device, and parameters stay."""
    return run(
        Case(rows=(1, 128, 1), fields={"stage": 2}), onefold.Offload(optimizer="auto", device_bytes=580_000), ""
    ).said


def test_a_later_step_that_does_not_fit_says_what_would_help() -> None:
    ((moved, helps),) = run_ranks(1, too_long)
    assert "optimizer state of 18 units was moved from the device to host" in moved
    assert "with no optimizer state on the device: to fit, keep parameters, which take 104 kB" in helps
    assert "in host memory (stage=3 and Offload(" in helps


def let_go() -> bool:
    """Whether an Optimizer that nobody refers to is alive before the garbage collector runs."""
    onefold.init()
    model = onefold.shard(Case().make(), offload=onefold.Offload(optimizer="auto", device_bytes=1 << 30))
    adam = onefold.Optimizer(model, torch.optim.AdamW)
    gc.collect()
    gc.disable()
    try:
        model(torch.randn(4, WIDTH)).square().mean().backward()
        adam.step()
        known = weakref.ref(adam)
        del adam
        return known() is not None
    finally:
        gc.enable()


def test_an_optimizer_that_is_let_go_of_frees_its_memory_at_once() -> None:
    assert run_ranks(1, let_go) == [False]
