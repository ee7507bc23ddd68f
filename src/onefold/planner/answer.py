"""A plan: every stage priced, the choices beyond them, and what to choose. By formula, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onefold.cost.case import Choice
from onefold.cost.cut_sequences import by_ulysses
from onefold.cost.estimate import Estimate
from onefold.cost.hardware import Hardware
from onefold.cost.hybrid import HybridMesh, propose
from onefold.cost.recommend import CHOICES, Ranked, recommend
from onefold.cost.search import Question, check_question, fewest_ranks, fits, longest_sequence
from onefold.cost.text import format_bytes
from onefold.planner.rows import Recommendation, Row, recommendation_of, row_of

TILE = 4096  # tokens: what a plan offers where tiles take less memory


@dataclass(frozen=True)
class Plan:
    """What each stage would cost each rank, and which one to choose; print it for a table.

    >>> import torch, onefold
    >>> found = onefold.plan(torch.nn.Linear(512, 512), torch.zeros(4, 512), ranks=8, hardware="laptop")
    >>> found.recommendation.stage
    1
    """

    model: str
    parameters: int
    ranks: int
    grid: str  # how the ranks are divided among the axes of a mesh
    hardware: Hardware
    precision: str
    stages: tuple[Row, ...]  # stages 0 to 3
    variants: tuple[Row, ...]  # choices beyond them: a hybrid of stages 2 and 3, offload
    recommendations: tuple[Recommendation, ...]  # the best first
    chosen: Row  # the best one, at its own batch
    notes: tuple[str, ...] = ()  # what the figures leave out
    hybrid: HybridMesh | None = None  # replicas of a sharded model, where that takes less time for messages
    pp: int = 1  # pipeline stages
    seq: int | None = None  # tokens of a sequence; None where the model has none, or it is not known
    sums: str = ""  # how gradients are summed over ranks, by backend and ranks per node; empty for one rank
    remedies: tuple[str, ...] = ()  # what to try where nothing fits
    ranks_without_offload: int | None = None  # the fewest on which stage 3 fits, where the choice is offload

    @property
    def recommendation(self) -> Recommendation:
        """The best recommendation."""
        return self.recommendations[0]

    def to_dict(self) -> dict[str, Any]:
        """The plan as a dict for JSON."""
        found = {**dataclasses.asdict(self), "recommendation": dataclasses.asdict(self.recommendation)}
        return {**found, "hardware": self.hardware.to_dict()}

    @property
    def proposed_mesh(self) -> str:
        """How to make the proposed mesh, and why; empty where sharding over all ranks does as well."""
        if self.hybrid is None:
            return ""
        tp = self.recommendation.tp
        others = f", tp={tp}" * (tp > 1) + f", pp={self.pp}" * (self.pp > 1)
        return f"mesh(replica={self.hybrid.replica}, shard={self.hybrid.shard}{others}): {self.hybrid.reason}"

    def __str__(self) -> str:
        lines = [f"{self.model}: {self.parameters:,} parameters on {self.ranks} × {self.hardware.name} ({self.grid})"]
        lines.append(f"{'':<10}{'params':>10}{'grads':>10}{'optim':>10}{'states':>10}{'peak':>10}{'step':>10}  fits")
        for row in self.stages:
            cells = (row.params_bytes, row.grads_bytes, row.optimizer_bytes, row.states_bytes, row.peak_bytes)
            numbers = "".join(f"{format_bytes(cell):>10}" for cell in cells)
            lines.append(f"{row.label:<10}{numbers}{row.step_s:>9.3g}s  {'yes' if row.fits else 'no'}")
        lines += [f"gradients: {self.sums}"] * bool(self.sums)
        chosen = self.recommendation
        lines.append(f"choose {chosen.label}, batch {chosen.batch}: {chosen.reason}")
        lines += [f"over {self.proposed_mesh}"] * (self.hybrid is not None)
        return "\n".join([*lines, *self.notes])


def answer(
    question: Question,
    model: str,
    precision: str,
    tokens: float | None = None,
    *,
    every_row: bool = True,
    ranked: Sequence[Ranked] = (),
) -> Plan:
    """The plan that answers a question about a number of parameters, a shape or a rehearsed module. Without `every_row`
    it has no variants, and of stages 0 to 3 neither the largest batch nor the fewest ranks: three times as quick.
    `ranked` is what `recommend` said, if it was asked before."""
    check_question(question)
    notes = []
    if not question.work.knows_activations:
        notes.append("activations are not counted: give a shape, a config.json or a module to have them")
        notes.append("compute is not known either: seconds count messages and updates alone, and days are not given")
    if question.micro_batches > 1 and question.work.widths.narrow:
        notes.append("gradients that add up over micro-batches are kept in fp32")
    ranked = ranked or recommend(question)
    if question.tp is None:  # from here on it is what was chosen
        question = dataclasses.replace(question, tp=ranked[0].estimate.grid.tp)
    grid = question.grid()
    if grid.tp > question.hardware.node_ranks:
        notes.append(
            f"tp={grid.tp} is larger than a node of {question.hardware.node_ranks}: its all-reduces cross the network"
        )
    notes += _of_long_sequences(question, ranked[0].estimate)
    policy = ranked[0].estimate.choice.activations
    batch = question.batch or 1
    choices = sorted(CHOICES, key=lambda c: (CHOICES.index(c) > 3, c.stage))
    priced = [
        question.price(c._replace(activations=policy), grid, batch)
        for c in choices
        if every_row or c.optimizer == "device"
    ]
    hybrids = [r.estimate.choice._replace(activations=policy) for r in ranked if r.estimate.choice.keep_whole]
    rows = [row_of(question, estimate, tokens, searched=every_row) for estimate in priced]
    on_device = [row for row, e in zip(rows, priced) if e.choice.optimizer == "device"]
    offloaded = [row for row, e in zip(rows, priced) if e.choice.optimizer != "device"]
    variants = [row_of(question, question.price(c, grid, batch), tokens) for c in hybrids[:1]] if every_row else []
    mixed = [r.estimate for r in ranked if r.estimate.choice.device_units and r.estimate.grid == grid and every_row]
    offloaded += [row_of(question, question.price(e.choice, grid, batch), tokens) for e in mixed]
    return Plan(
        model=model,
        parameters=question.work.parameters,
        ranks=question.ranks,
        grid=str(grid),
        hardware=question.hardware,
        precision=precision,
        stages=tuple(on_device),
        variants=(*variants, *offloaded),
        recommendations=tuple(recommendation_of(r) for r in ranked),
        chosen=row_of(question, ranked[0].estimate, tokens),
        notes=tuple(notes),
        hybrid=propose(question, ranked[0].estimate) if ranked[0].fits and grid.sequence == 1 else None,
        pp=grid.pp,
        seq=question.work.shape.seq if question.work.shape is not None else None,
        sums=priced[0].sums,
        remedies=_remedies(question, ranked[0].estimate),
        ranks_without_offload=_ranks_without_offload(question, ranked[0].estimate),
    )


def _ranks_without_offload(question: Question, chosen: Estimate) -> int | None:
    if chosen.choice.optimizer == "device":
        return None
    return fewest_ranks(question, Choice(3, activations=chosen.choice.activations))


def _remedies(question: Question, closest: Estimate) -> tuple[str, ...]:
    """What to try where nothing fits: tiles only where they take less memory, and no tensor parallelism beside them."""
    if fits(closest):
        return ("--tp", "--pp", "fewer ranks", "a larger --max-global-batch")
    work, found = question.work, ["more ranks"]
    if work.tile is None:
        found.append("--tp")
    if not closest.fits and work.shape is not None and work.tile is None and closest.grid.tp == 1:
        tiled = dataclasses.replace(question, work=dataclasses.replace(work, tile=TILE, _cache={}))
        if tiled.price(closest.choice, closest.grid, closest.batch).peak_bytes < closest.peak_bytes:
            found.append(f"--tile {TILE}")
    return (*found, "a shorter --seq", "devices with more memory")


def _of_long_sequences(question: Question, chosen: Estimate) -> list[str]:
    """What a plan with cut sequences or tiles assumes, and how long sequences may be."""
    shape, grid, tile = question.work.shape, chosen.grid, question.work.tile
    if shape is None or (grid.sequence == 1 and tile is None):
        return []
    found = list[str]()
    if grid.sequence > 1:
        how = "Ulysses" if by_ulysses(shape, grid.tp, grid.sequence) else "the ring"
        found.append(f"sequence={grid.sequence}: attention by {how}, causal, without documents and windows")
    if tile is not None:
        found.append(
            f"loss and MLPs by tiles of {tile:,} tokens; what else a block needs in backward is as measured on an H200"
        )
    longest = longest_sequence(question, chosen.choice, grid)
    return [
        *found,
        f"longest sequence that fits with {chosen.choice}, activations {chosen.choice.activations}, one at a time: "
        f"{longest:,} tokens",
    ]
