"""Chooses stage="auto", the simplest stage whose states leave room for activations on the smallest device, and
Offload(optimizer="auto"), which units keep their optimizer state on the device, in host memory and on disk.

When a model is sharded its optimizer is not known yet: all bytes are for Adam, 8 per element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

from onefold.comm.strategy import Strategy
from onefold.cost.arrivals import arrivals
from onefold.cost.case import Choice
from onefold.cost.hardware import Hardware
from onefold.cost.layout import ParamInfo
from onefold.cost.peak import lent_bytes, segments, staging_bytes
from onefold.cost.recommend import recommend
from onefold.cost.search import STATES_SHARE, Question, fits
from onefold.cost.sizes import UnitSize
from onefold.cost.splits import filled, tiers_of
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
    """Keeps the optimizer state of as many units as fit on the device, the first of forward (splits.py says why), and
    of the others in host memory; what `host_bytes`, if given, cannot hold is on disk. `placements` are with all state
    on the host. Units whose parameters are not on the device are not updated there."""
    trained = [index for index, unit in enumerate(units) if unit.trained]
    may_stay = [at for at, index in enumerate(trained) if placements[index].parameters_tier is Tier.DEVICE]
    cuda = machine.device == "cuda"
    gathered = max((part.gathered for part in segments(units, placements, prefetch)), default=0)
    budget = device_bytes if device_bytes is not None else int(STATES_SHARE * machine.memory_bytes) - gathered

    def device_need(on_device: frozenset[int]) -> int:
        rows = _placed(units, placements, [Tier.DEVICE if at in on_device else Tier.HOST for at in range(len(trained))])
        arriving = arrivals(units, rows, strategy, cuda=cuda, one_pass=False, accumulates=True)
        in_flight = max((unit.done.buffers for unit in arriving), default=0) + lent_bytes(units, rows)
        return state_bytes(units, rows, cost).total + in_flight

    on_device = filled(may_stay, lambda chosen: device_need(chosen) <= budget, lambda at: units[trained[at]].numel)
    room = "device_bytes" if device_bytes is not None else f"{STATES_SHARE:.0%} of the device less units in use"
    why = f"states take {format_bytes(device_need(on_device))} of {format_bytes(max(budget, 0))} ({room})"
    reason = f"optimizer state of {len(on_device)} of {len(trained)} units stays on the device: {why}"
    tiers = split_offloaded(units, placements, on_device, host_bytes, cost=cost)
    return Tiers(tuple(tiers), reason + told_of(units, placements, tiers, host_bytes, cost=cost))


def host_need(
    units: Sequence[UnitSize],
    placements: Sequence[Placement],
    tiers: Sequence[Tier],
    *,
    cost: StateCost,
    in_backward: bool = False,
) -> int:
    """Bytes of host memory if the optimizer state of trained units is on these tiers; with gradients that wait for
    step(), unless updates run in backward."""
    rows = _placed(units, placements, tiers)
    held = state_bytes(units, rows, cost, Tier.HOST)
    return held.total - in_backward * held.gradients + sum(staging_bytes(units, rows, cost, in_backward=in_backward))


def split_offloaded(
    units: Sequence[UnitSize],
    placements: Sequence[Placement],
    on_device: Collection[int],
    host_bytes: int | None,
    *,
    cost: StateCost,
    in_backward: bool = False,
) -> list[Tier]:
    """The tiers of trained units, of which those with the numbers `on_device` are on the device. Of the others as many
    as fit are in host memory, the first of forward, and the rest on disk; without `host_bytes` none is on disk."""
    numels = [unit.numel for unit in units if unit.trained]
    rest = [at for at in range(len(numels)) if at not in on_device]

    def tiers(on_host: Collection[int]) -> list[Tier]:
        return tiers_of(len(numels), on_device, on_host)

    def fits(on_host: Collection[int]) -> bool:
        needed = host_need(units, placements, tiers(on_host), cost=cost, in_backward=in_backward)
        return host_bytes is None or needed <= host_bytes

    return tiers(rest if fits(rest) else filled(rest, fits, numels.__getitem__))


def told_of(
    units: Sequence[UnitSize],
    placements: Sequence[Placement],
    tiers: Sequence[Tier],
    host_bytes: int | None,
    *,
    cost: StateCost,
    in_backward: bool = False,
) -> str:
    """What a placement's reason says of units whose state is on disk; empty if there are none."""
    on_disk, on_host = tiers.count(Tier.DISK), tiers.count(Tier.HOST)
    needed = host_need(units, placements, tiers, cost=cost, in_backward=in_backward)
    takes = f"{format_bytes(needed)} of {format_bytes(host_bytes or 0)}"
    return f"; of {on_host} more it is in host memory ({takes}), of {on_disk} on disk" if on_disk else ""


def _placed(units: Sequence[UnitSize], placements: Sequence[Placement], tiers: Sequence[Tier]) -> list[Placement]:
    """The placements of all units, if the optimizer state of trained ones is on these tiers."""
    coming = iter(tiers)
    return [
        placement.on(next(coming), placement.parameters_tier) if unit.trained else placement
        for unit, placement in zip(units, placements, strict=True)
    ]


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
    cost: StateCost = ADAM,
    accumulates: bool = False,
    in_backward: bool = False,
) -> int:
    """Bytes of a device that states, buffers and unsharded units leave for activations; negative if they do not fit."""
    question = dataclasses.replace(
        _question(infos, widths, frozen, strategy, replicas, bucket_bytes, shared_bytes, machine),
        cost=cost, micro_batches=2 if accumulates else 1, in_backward=in_backward and not accumulates,
    )  # fmt: skip
    return machine.usable_bytes - question.price(choice, question.grid(), 1).peak_bytes


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
