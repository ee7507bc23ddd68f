"""What the page of a plan shows, as figures: the bars of stages, a step's memory over time, throughput against ranks,
cost, and what to copy. All charts and tables are made of these."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate
from onefold.cost.recommend import Ranked, recommend
from onefold.cost.search import Question, check_question
from onefold.planner.answer import Plan, answer
from onefold.planner.page.script import Settings, script
from onefold.planner.page.timeline import Timeline, timeline
from onefold.planner.rows import Row, row_of
from onefold.planner.summary import changes, summary
from onefold.planner.throughput import expected

PARTS = (  # name, field of a Row, class of its colour
    ("Parameters", "params_bytes", "parameters"), ("Optimizer state", "optimizer_bytes", "optimizer"),
    ("Gradients", "peak_grads_bytes", "gradients"), ("Unsharded parameters", "gathered_bytes", "gathered"),
    ("Buffers", "buffers_bytes", "buffers"), ("Activations", "activations_bytes", "activations"),
    ("Margin", "margin_bytes", "margin"),
)  # fmt: skip
TOKENS_PER_PARAMETER = 20  # where no number of tokens is given
MOST_RANKS = 1024  # that a curve reaches, or twice the ranks asked about


@dataclass(frozen=True)
class Bar:
    """What fills a device at the fullest instant of a step, for one choice at its best batch."""

    label: str
    chosen: bool
    batch: int
    parts: dict[str, int]  # bytes, by the names of PARTS
    states_bytes: int
    peak_bytes: int
    fits: bool
    tokens_per_s: float
    step_s: float


@dataclass(frozen=True)
class Speed:
    """What to expect of one number of ranks, and what the tokens asked about cost on them."""

    ranks: int
    batch: int
    tokens_per_s: float
    gpu_hours: float
    days: float


@dataclass(frozen=True)
class Curve:
    label: str
    chosen: bool
    points: tuple[Speed, ...]


@dataclass(frozen=True)
class View:
    """A plan as its page shows it."""

    title: str
    plan: Plan
    sentences: tuple[str, str, str]
    bars: tuple[Bar, ...]
    tokens: float
    tokens_given: bool
    timeline: Timeline | None = None
    curves: tuple[Curve, ...] = ()
    gpu_hours: float | None = None
    changes: tuple[str, ...] = ()
    command: str = ""
    python: str = ""
    micro_batches: int = 1

    def to_dict(self) -> dict[str, Any]:
        """The figures as a dict for JSON."""
        found = dataclasses.asdict(self)
        plan = {**found.pop("plan"), "hardware": self.plan.hardware.to_dict()}
        kept = ("model", "parameters", "ranks", "grid", "precision", "chosen", "recommendations", "notes", "hardware")
        return {**found, **{name: plan[name] for name in kept}, "recommendation": plan["recommendations"][0]}


def view(question: Question, model: str, settings: Settings, tokens: float | None, command: str) -> View:
    """The view of a question about a shape or a number of parameters; `command` asks the same in a terminal."""
    check_question(question)
    ranked = recommend(question)
    plan = answer(question, model, settings.text, tokens, every_row=False, ranked=ranked)
    found = view_of(plan, tokens, command)
    shown = [row_of(question, one.estimate, tokens, searched=False) for one in _shown(ranked)]
    best = ranked[0].estimate
    return dataclasses.replace(
        found,
        bars=tuple(_bar(row, chosen=number == 0) for number, row in enumerate(shown)),
        timeline=timeline(best),
        curves=tuple(_curves(_like(question, best), best.choice, found.tokens)),
        python=script(best, settings),
        micro_batches=question.micro_batches,
    )


def view_of(plan: Plan, tokens: float | None, command: str) -> View:
    """The view of a plan alone, of a rehearsed module for example: nothing over time, nothing for other ranks."""
    wanted = tokens or float(TOKENS_PER_PARAMETER * plan.parameters)
    rows = [plan.chosen, *(row for row in plan.stages if row.label != plan.chosen.label)]
    speed = plan.chosen.tokens_per_s if plan.recommendation.fits else 0.0
    return View(
        title=f"{plan.model} on {plan.ranks} × {plan.hardware.name}",
        plan=plan,
        sentences=summary(plan),
        bars=tuple(_bar(row, chosen=row is plan.chosen) for row in rows),
        tokens=wanted,
        tokens_given=tokens is not None,
        gpu_hours=_gpu_hours(wanted, speed, plan.ranks) if speed else None,
        changes=tuple(changes(plan)),
        command=command,
    )


def _shown(ranked: Sequence[Ranked]) -> list[Ranked]:
    """The choice and stages 0 to 3 on the device, as far as they were considered."""
    plain = [one for one in ranked[1:] if one.estimate.choice[:4] == Choice(one.estimate.choice.stage)[:4]]
    same_grid = [one for one in plain if one.estimate.grid == ranked[0].estimate.grid]
    return [ranked[0], *same_grid]


def _bar(row: Row, *, chosen: bool) -> Bar:
    parts = {name: getattr(row, field) for name, field, _ in PARTS}
    return Bar(
        row.label, chosen, row.batch, parts, row.states_bytes, row.peak_bytes, row.fits, row.tokens_per_s, row.step_s
    )


def _gpu_hours(tokens: float, tokens_per_s: float, ranks: int) -> float:
    return tokens / tokens_per_s * ranks / 3600


def _like(question: Question, best: Estimate) -> Question:
    """The question for other numbers of ranks, with what was chosen for this one."""
    return dataclasses.replace(question, tp=best.grid.tp, activations=best.choice.activations)


def _curves(question: Question, chosen: Choice, tokens: float) -> Iterable[Curve]:
    """Stages 1 to 3 and the choice, over numbers of ranks."""
    if not question.work.tokens_per_sample:
        return
    unit = (question.tp or 1) * question.pp * question.replica * question.sequence
    most = max(MOST_RANKS, 2 * question.ranks)
    numbers = {unit << power for power in range(20) if unit << power <= most} | {question.ranks}
    plain = [Choice(stage) for stage in (1, 2, 3)]
    bare = chosen._replace(activations=Choice(0).activations, device_units=0, keep_whole=0)
    for choice in [*plain, *[bare] * (bare not in plain)]:
        points = expected(question, choice, sorted(numbers))
        speeds = [(p, p.samples_per_s * question.work.tokens_per_sample) for p in points]
        yield Curve(
            str(choice),
            choice == bare,
            tuple(
                Speed(p.ranks, p.batch, speed, _gpu_hours(tokens, speed, p.ranks), tokens / speed / 86400)
                for p, speed in speeds
            ),
        )
