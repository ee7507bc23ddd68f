"""Chooses stage="auto", the simplest stage whose states leave room for activations on the smallest device, and
Offload(optimizer="auto"), how many units keep their optimizer state on the device, in host memory and on disk.

When a model is sharded its optimizer is not known yet: all bytes are for Adam, 8 per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onefold.comm.strategy import Strategy
from onefold.cost.arrivals import arrivals
from onefold.cost.case import Choice
from onefold.cost.hardware import Hardware
from onefold.cost.layout import ParamInfo
from onefold.cost.peak import lent_bytes, segments, staging_bytes
from onefold.cost.recommend import recommend
from onefold.cost.search import STATES_SHARE, Question, fits, most
from onefold.cost.sizes import UnitSize
from onefold.cost.states import StateCost, state_bytes
from onefold.cost.text import format_bytes
from onefold.cost.work import Module, Work
from onefold.settings.placement import Placement, Tier
from onefold.settings.widths import Widths

ADAM = StateCost(8, 4)


def choose_stage(
    infos: Sequence[ParamInfo],
    widths: dict[str, Widths],
    frozen: frozenset[str],
    *,
    strategy: Strategy,
    replicas: int,
    bucket_bytes: int,
    shared_bytes: int,
    machine: Hardware,
    optimizer: str | None = None,
) -> tuple[int, str]:
    """The stage and the reason; if nothing fits, stage 3, which comes closest. `optimizer` is the tier of the optimizer
    state; None: the device, "auto": offloaded only if it does not fit."""
    if all(info.kind in frozen for info in infos):
        return _frozen_stage(sum(info.numel * widths[info.kind].compute for info in infos), machine)
    question = _question(infos, widths, frozen, strategy, replicas, bucket_bytes, shared_bytes, machine)
    rows = [row for row in recommend(question) if row.estimate.choice in [Choice(stage) for stage in range(4)]]
    if optimizer in (None, "auto") and rows[0].fits:
        return max(rows[0].estimate.choice.stage, int(optimizer is not None)), rows[0].reason
    if optimizer is not None:
        tier = "host" if optimizer == "auto" else optimizer
        offloaded = [question.price(Choice(stage, optimizer=tier), question.grid(), 1) for stage in (1, 2, 3)]
        chosen = next((e for e in offloaded if fits(e)), None)
        if chosen is not None:
            needs = f"{format_bytes(chosen.peak_bytes)} of {format_bytes(machine.memory_bytes)}"
            return chosen.choice.stage, f"the first that fits with the optimizer on {tier}: {needs}"
    last = max((row.estimate for row in rows), key=lambda e: e.choice.stage)
    room = f"{STATES_SHARE:.0%} of {format_bytes(machine.memory_bytes)}"
    return last.choice.stage, f"no stage leaves room for activations in {room}; {last.choice} comes closest"


def _frozen_stage(parameter_bytes: int, machine: Hardware) -> tuple[int, str]:
    """The stage of a model that does not train, whose parameters are all its state."""
    room = f"{format_bytes(parameter_bytes)} of {STATES_SHARE:.0%} of {format_bytes(machine.memory_bytes)}"
    if parameter_bytes <= STATES_SHARE * machine.memory_bytes:
        return 0, f"all parameters are frozen, and every rank has room for them: {room}"
    return 3, f"all parameters are frozen, and no rank has room for all of them: {room}"


class Tiers(NamedTuple):
    """The tier of each trained unit's optimizer state, and the reason."""

    tiers: tuple[Tier, ...]
    why: str


def choose_tiers(
    units: Sequence[UnitSize],
    placements: Sequence[Placement],
    *,
    strategy: Strategy,
    machine: Hardware,
    prefetch: int = 1,
    device_bytes: int | None = None,
    host_bytes: int | None = None,
    cost: StateCost = ADAM,
) -> Tiers:
    """Keeps the optimizer state of as many units as fit on the device, the first of forward: backward reaches them last
    and the next forward needs them first, so no host update is waited for at the end of a step. The next units' state
    is in host memory; what `host_bytes`, if given, cannot hold is on disk. `placements` are with all state on the
    host."""
    trained = [index for index, unit in enumerate(units) if unit.trained]
    cuda = machine.device == "cuda"
    gathered = max((part.gathered for part in segments(units, placements, prefetch)), default=0)
    budget = device_bytes if device_bytes is not None else int(STATES_SHARE * machine.memory_bytes) - gathered

    def device_need(on_device: int) -> int:
        rows = _placed(units, placements, on_device, len(trained))
        arriving = arrivals(units, rows, strategy, cuda=cuda, one_pass=False, accumulates=True)
        in_flight = max((unit.done.buffers for unit in arriving), default=0) + lent_bytes(units, rows)
        return state_bytes(units, rows, cost).total + in_flight

    on_device = most(lambda count: device_need(count) <= budget, len(trained))
    room = "device_bytes" if device_bytes is not None else f"{STATES_SHARE:.0%} of the device less units in use"
    why = f"states take {format_bytes(device_need(on_device))} of {format_bytes(max(budget, 0))} ({room})"
    reason = f"optimizer state of {on_device} of {len(trained)} units stays on the device: {why}"
    on_host, told = split_offloaded(units, placements, on_device, host_bytes, cost=cost)
    return Tiers(tuple(in_order(on_device, on_host, len(trained))), reason + told)


def host_need(
    units: Sequence[UnitSize],
    placements: Sequence[Placement],
    on_device: int,
    on_host: int,
    *,
    cost: StateCost,
    in_backward: bool = False,
) -> int:
    """Bytes of host memory for so many units with their state on the device, so many in host memory, the rest on disk;
    with gradients that wait for step(), unless updates run in backward."""
    rows = _placed(units, placements, on_device, on_host)
    held = state_bytes(units, rows, cost, Tier.HOST)
    return held.total - in_backward * held.gradients + sum(staging_bytes(units, rows, cost, in_backward=in_backward))


def split_offloaded(
    units: Sequence[UnitSize],
    placements: Sequence[Placement],
    on_device: int,
    host_bytes: int | None,
    *,
    cost: StateCost,
    in_backward: bool = False,
) -> tuple[int, str]:
    """Of the units whose state is not on the device, how many have it in host memory, the others on disk; and what to
    tell of it. Without `host_bytes` all have it in host memory."""
    offloaded = sum(unit.trained for unit in units) - on_device

    def need(on_host: int) -> int:
        return host_need(units, placements, on_device, on_host, cost=cost, in_backward=in_backward)

    if host_bytes is None or need(offloaded) <= host_bytes:
        return offloaded, ""
    on_host = min(most(lambda count: need(count) <= host_bytes, offloaded), offloaded)
    takes = f"{format_bytes(need(on_host))} of {format_bytes(host_bytes)}"
    return on_host, f"; of {on_host} more it is in host memory ({takes}), of {offloaded - on_host} on disk"


def _placed(
    units: Sequence[UnitSize], placements: Sequence[Placement], on_device: int, on_host: int
) -> list[Placement]:
    trained = [index for index, unit in enumerate(units) if unit.trained]
    tiers = dict(zip(trained, in_order(on_device, on_host, len(trained)), strict=True))
    return [p.on(tiers.get(i, p.optimizer_tier), p.parameters_tier) for i, p in enumerate(placements)]


def in_order(on_device: int, on_host: int, units: int) -> list[Tier]:
    """The tiers of units in forward order: the first `on_device` ones, then `on_host` ones, the others on disk."""
    return ([Tier.DEVICE] * on_device + [Tier.HOST] * on_host + [Tier.DISK] * units)[:units]


def room_for_activations(
    infos: Sequence[ParamInfo],
    widths: dict[str, Widths],
    frozen: frozenset[str],
    choice: Choice,
    *,
    strategy: Strategy,
    replicas: int,
    bucket_bytes: int,
    shared_bytes: int,
    machine: Hardware,
) -> int:
    """Bytes of a device that states, buffers and unsharded units leave for activations; 0 if they do not fit."""
    question = _question(infos, widths, frozen, strategy, replicas, bucket_bytes, shared_bytes, machine)
    estimate = question.price(choice, question.grid(), 1)
    return max(0, machine.usable_bytes - estimate.peak_bytes)


def _question(
    infos: Sequence[ParamInfo],
    widths: dict[str, Widths],
    frozen: frozenset[str],
    strategy: Strategy,
    replicas: int,
    bucket_bytes: int,
    shared_bytes: int,
    machine: Hardware,
) -> Question:
    unknown = Module(tuple(infos), widths, 1, 0, {}, (), {}, frozen)
    trained = [width for kind, width in widths.items() if kind not in frozen]
    return Question(
        work=Work(
            widths=(trained or list(widths.values()))[0], module=unknown, bucket_bytes=bucket_bytes,
            shared_bytes=shared_bytes,
        ),
        ranks=strategy.ranks * replicas, replica=replicas, hardware=machine, cost=ADAM, strategy=strategy,
    )  # fmt: skip
