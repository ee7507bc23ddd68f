"""A plan: every stage priced, the choices beyond them, and what to choose. `plan()` makes one for any module."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onefold.cost.estimate import Choice
from onefold.cost.hardware import Hardware, hardware
from onefold.cost.hybrid import HybridMesh, propose
from onefold.cost.machine import here
from onefold.cost.recommend import CHOICES, recommend
from onefold.cost.search import STATES_SHARE, Question, check_question
from onefold.cost.text import format_bytes
from onefold.cost.work import Module, Work
from onefold.errors import ConfigError, ModelError
from onefold.model.survey import Survey, survey
from onefold.model.unit_spec import frozen_kinds, widths_by_kind
from onefold.observe.rehearsal import Loss, Rehearsal, rehearse
from onefold.optim.elementwise import cost_of
from onefold.planner.rows import Recommendation, Row, exact_row, recommendation_of, row_of
from onefold.settings.offload import AUTO, Offload
from onefold.settings.precision import NAMES, Precision
from onefold.settings.zero import Zero

REHEARSED = ("keep", "checkpoint", "checkpoint+host")  # policies of a module's plan, which has no tensor parallelism


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
    notes: tuple[str, ...] = ()  # what the figures leave out
    hybrid: HybridMesh | None = None  # replicas of a sharded model, where that takes less time for messages
    pp: int = 1  # pipeline stages
    sums: str = ""  # how gradients are summed over ranks, by backend and ranks per node; empty for one rank

    @property
    def recommendation(self) -> Recommendation:
        """The best recommendation."""
        return self.recommendations[0]

    def to_dict(self) -> dict[str, Any]:
        """The plan as a dict for JSON."""
        return {**dataclasses.asdict(self), "recommendation": dataclasses.asdict(self.recommendation)}

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


def answer(question: Question, model: str, precision: str, tokens: float | None = None) -> Plan:
    """The plan that answers a question about a number of parameters, a shape or a rehearsed module."""
    check_question(question)
    notes = []
    if not question.work.knows_activations:
        notes.append("activations are not counted: give a shape, a config.json or a module to have them")
        notes.append("compute is not known either: seconds count messages and updates alone, and days are not given")
    if question.micro_batches > 1 and question.work.widths.narrow:
        notes.append("gradients that add up over micro-batches are kept in fp32")
    grid = question.grid()
    if grid.tp > question.hardware.node_ranks:
        notes.append(
            f"tp={grid.tp} is larger than a node of {question.hardware.node_ranks}: its all-reduces cross the network"
        )
    ranked = recommend(question)
    policy = ranked[0].estimate.choice.activations
    if policy.startswith("partition") and grid.tp == 1:
        policy = "checkpoint"
    batch = question.batch or 1
    priced = [
        question.price(c._replace(activations=policy), grid, batch)
        for c in sorted(CHOICES, key=lambda c: (CHOICES.index(c) > 3, c.stage))
    ]
    hybrids = [r.estimate.choice._replace(activations=policy) for r in ranked if r.estimate.choice.keep_whole]
    rows = [row_of(question, estimate, tokens) for estimate in priced]
    on_device = [row for row, e in zip(rows, priced) if e.choice.optimizer == "device"]
    offloaded = [row for row, e in zip(rows, priced) if e.choice.optimizer != "device"]
    mixed = [r.estimate for r in ranked if r.estimate.choice.device_units and r.estimate.grid == grid]
    offloaded += [row_of(question, question.price(e.choice, grid, batch), tokens) for e in mixed]
    return Plan(
        model=model,
        parameters=question.work.parameters,
        ranks=question.ranks,
        grid=str(grid),
        hardware=question.hardware,
        precision=precision,
        stages=tuple(on_device),
        variants=(*(row_of(question, question.price(c, grid, batch), tokens) for c in hybrids[:1]), *offloaded),
        recommendations=tuple(recommendation_of(r) for r in ranked),
        notes=tuple(notes),
        hybrid=propose(question, ranked[0].estimate) if ranked[0].fits else None,
        pp=grid.pp,
        sums=priced[0].sums,
    )


def plan(
    model: nn.Module,
    sample: Any,
    *,
    ranks: int,
    hardware: str | Hardware | None = None,
    optimizer: str | type[torch.optim.Optimizer] = "adamw",
    optimizer_settings: dict[str, Any] | None = None,
    loss: Loss | None = None,
    values: bool = False,
    tokens: float | None = None,
    max_global_batch: int | None = None,
    activations: Literal["keep", "checkpoint", "checkpoint+host"] = "keep",
    micro_batches: int = 1,
    **fields: Any,
) -> Plan:
    """What stages 0–3 would cost each of `ranks` ranks to train this model on a batch like `sample`.

    The model has not been sharded: the runtime rehearses two steps of each stage on tensors without memory. With
    `offload`, each of stages 1–3 offloads as much of it as the stage allows.

    `sample` is what the model is called with (a tensor, a tuple, or a dict of keywords), rows first. `loss` is
    (model, sample) -> loss; by default the model's own, or the sum of what it returns. `fields` are those of `shard`.
    `values=True` takes the steps on real tensors, for models whose control flow depends on them.
    `activations="checkpoint"` computes blocks again in backward; `micro_batches` of `sample` make a step.

    >>> import torch, onefold
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    >>> found = onefold.plan(model, torch.zeros(8, 64), ranks=4, hardware="laptop")
    >>> [row.states_bytes for row in found.stages]
    [530948, 332804, 232964, 133140]
    """
    if activations not in REHEARSED or type(micro_batches) is not int or micro_batches < 1:
        raise ConfigError(
            f"activations={activations!r}, micro_batches={micro_batches!r}: use one of {', '.join(REHEARSED)}, and at "
            f"least 1 micro-batch"
        )
    if "stage" in fields or "mesh" in fields:
        raise ConfigError("a plan is for all stages and for `ranks` ranks: leave stage and mesh out")
    if not any(param.requires_grad for param in model.parameters()):
        raise ModelError(f"{type(model).__name__} has no parameter that requires grad, and a plan is for training")
    machine = _hardware_of(hardware, model)
    offload = _offload(fields.pop("offload", None), machine)
    zero = Zero.of(None, {**fields, "stage": 2})
    cost = cost_of(optimizer, optimizer_settings)
    backend = "nccl" if machine.device == "cuda" else "gloo"
    policy = Precision.of(zero.precision).decided(own_sum=True, cuda=backend == "nccl")

    def rehearsed(stage: int, policy: str, at: int, *, count: bool = False) -> Rehearsal:
        asked = dataclasses.replace(zero, stage=stage, activations=policy, offload=_at_stage(offload, stage))
        return rehearse(
            model, sample, asked, cost, ranks=at, plays=backend, node_ranks=machine.node_ranks,
            loss=loss, values=values, count_flops=count, micro_batches=1 if count else micro_batches,
        )  # fmt: skip

    keep = rehearsed(0, "keep", 1, count=True)
    seen = survey(model, dataclasses.replace(zero, init=None), 1)
    checkpoint = rehearsed(0, "checkpoint", 1, count=True) if seen.blocks else keep
    auto_wire = Precision.of(zero.precision).wire is None
    work = _module_work(seen, sample, policy, keep, checkpoint, accumulates=micro_batches > 1, auto_wire=auto_wire)
    question = Question(
        work=work, ranks=ranks, hardware=machine, cost=cost, batch=work.module.batch if work.module else 1,
        max_global_batch=max_global_batch, activations=activations, micro_batches=micro_batches,
        prefetch=zero.prefetch if isinstance(zero.prefetch, int) else 1,
        reshard_after_forward=zero.reshard_after_forward,
    )  # fmt: skip
    found = answer(question, type(model).__name__, _precision_name(policy), tokens)
    rows = found.stages
    if offload.optimizer is not None:
        choices = [_choice(_at_stage(offload, row.stage), row.stage, activations) for row in rows]
        priced = [question.price(choice, question.grid(), row.batch) for choice, row in zip(choices, rows)]
        rows = tuple(row_of(question, estimate, tokens) for estimate in priced)
    exact = tuple(exact_row(row, rehearsed(row.stage, activations, ranks), found.hardware) for row in rows)
    return dataclasses.replace(found, stages=exact, recommendations=_corrected(found.recommendations, exact))


def _offload(value: Any, machine: Hardware) -> Offload:
    """The setting `offload`; with "auto", the device budget is that of the machine planned for, not of this one."""
    offload = Offload.of(value)
    if offload.optimizer == AUTO and offload.device_bytes is None:
        return dataclasses.replace(offload, device_bytes=int(STATES_SHARE * machine.memory_bytes))
    return offload


def _at_stage(offload: Offload, stage: int) -> Offload:
    """As much of an Offload as a stage allows."""
    if stage == 0 or offload.optimizer is None:
        return Offload()
    if stage == 3 or offload.parameters is None:
        return offload
    return dataclasses.replace(offload, parameters=None, path=offload.path if offload.optimizer == "disk" else None)


def _choice(offload: Offload, stage: int, activations: str) -> Choice:
    return Choice(
        stage, optimizer=offload.optimizer_tier.value, parameters=offload.parameters_tier.value, activations=activations
    )


def _corrected(ranked: tuple[Recommendation, ...], rows: Sequence[Row]) -> tuple[Recommendation, ...]:
    """The ranking with the peaks that rehearsals measured: choices that do not fit after all go last."""
    exact = {row.label: row for row in rows}
    corrected = []
    for choice in ranked:
        row = exact.get(choice.label)
        if row is not None and row.batch == choice.batch:
            choice = dataclasses.replace(choice, fits=row.fits, peak_bytes=row.peak_bytes)
        corrected.append(choice)
    return tuple(sorted(corrected, key=lambda choice: not choice.fits))


def _hardware_of(named: str | Hardware | None, model: nn.Module) -> Hardware:
    if isinstance(named, Hardware):
        return named
    if named is None:
        return here(next((p.device for p in model.parameters() if p.is_cuda), torch.device("cpu")))
    return hardware(named)


def _module_work(
    seen: Survey,
    sample: Any,
    policy: Precision,
    keep: Rehearsal,
    checkpoint: Rehearsal,
    *,
    accumulates: bool,
    auto_wire: bool,
) -> Work:
    widths = widths_by_kind(seen.units, policy)
    if accumulates:  # sums are kept in fp32
        widths = {kind: own._replace(grad=4) if own.narrow else own for kind, own in widths.items()}
    first = next((leaf for leaf in tree_leaves(sample) if isinstance(leaf, Tensor) and leaf.ndim), None)
    if first is None:
        raise ConfigError("the sample holds no tensor with a batch dimension; give what the model is called with")
    module = Module(
        infos=seen.params,
        widths=widths,
        batch=first.shape[0],
        tokens=first.shape[1] if first.ndim > 1 and not first.is_floating_point() else 1,
        activations={
            "keep": keep.peak["activations"],
            "checkpoint": checkpoint.peak["activations"] + checkpoint.peak["checkpoints"],
        },
        block_inputs=checkpoint.block_inputs,
        flops={"keep": keep.flops, "checkpoint": checkpoint.flops},
        frozen=frozen_kinds(seen.units),
        buffers_bytes=keep.module_buffers,
    )
    compute = policy.dtypes(policy.compute if isinstance(policy.compute, torch.dtype) else torch.float32)
    asked = seen.settings
    return Work(
        widths=compute.widths, module=module, bucket_bytes=asked.bucket_bytes, shared_bytes=asked.shared_bytes,
        auto_wire=auto_wire,
    )  # fmt: skip


def _precision_name(policy: Precision) -> str:
    compute = NAMES[policy.compute] if isinstance(policy.compute, torch.dtype) else str(policy.compute)
    return compute if policy.master is None else f"{compute}, {policy.master} master"
