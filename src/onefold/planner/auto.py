"""stage="auto": the simplest stage whose states leave room for activations on the smallest device, and how much."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.layout import ParamInfo
from onefold.planner.estimate import Choice, usable_bytes
from onefold.planner.hardware import Hardware
from onefold.planner.search import ROOM, Question, recommend, text_of
from onefold.planner.sizes import Widths
from onefold.planner.states import StateCost
from onefold.planner.work import Module, Work

ADAM = StateCost(8, 4)  # which optimizer will come is not known yet


def choose_stage(
    infos: Sequence[ParamInfo],
    widths: dict[str, Widths],
    frozen: frozenset[str],
    *,
    ranks: int,
    replicas: int,
    bucket_bytes: int,
    machine: Hardware,
) -> tuple[int, str]:
    """The stage and the reason. Where nothing fits, stage 3, which comes closest."""
    question = _question(infos, widths, frozen, ranks, replicas, bucket_bytes, machine)
    rows = [row for row in recommend(question) if row.estimate.choice in [Choice(stage) for stage in range(4)]]
    if rows[0].fits:
        return rows[0].estimate.choice.stage, rows[0].reason
    last = max((row.estimate for row in rows), key=lambda e: e.choice.stage)
    room = f"{ROOM:.0%} of {text_of(machine.memory_bytes)}"
    return last.choice.stage, f"no stage leaves room for activations in {room}; {last.choice} comes closest"


def room_for_activations(
    infos: Sequence[ParamInfo],
    widths: dict[str, Widths],
    frozen: frozenset[str],
    stage: int,
    *,
    ranks: int,
    replicas: int,
    bucket_bytes: int,
    machine: Hardware,
) -> int:
    """Bytes of a device that states, buffers and gathered units leave; 0 where they do not fit themselves."""
    question = _question(infos, widths, frozen, ranks, replicas, bucket_bytes, machine)
    estimate = question.price(Choice(stage), question.grid(), 1)
    return max(0, usable_bytes(machine) - estimate.peak_bytes)


def _question(
    infos: Sequence[ParamInfo],
    widths: dict[str, Widths],
    frozen: frozenset[str],
    ranks: int,
    replicas: int,
    bucket_bytes: int,
    machine: Hardware,
) -> Question:
    unknown = Module(tuple(infos), widths, 1, 0, {}, (), {}, frozen)
    trained = next(width for kind, width in widths.items() if kind not in frozen)
    return Question(
        work=Work(widths=trained, module=unknown, bucket_bytes=bucket_bytes),
        ranks=ranks * replicas, replica=replicas, hardware=machine, cost=ADAM,
    )  # fmt: skip
