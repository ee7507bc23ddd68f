"""plan(): the plan of any module, by rehearsals of its steps on tensors without memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onefold.cost.case import Choice
from onefold.cost.hardware import Hardware, hardware
from onefold.cost.machine import here
from onefold.cost.search import STATES_SHARE, Question
from onefold.cost.work import Module, Work
from onefold.errors import ConfigError, ModelError
from onefold.model.survey import Survey, survey
from onefold.model.unit_spec import frozen_kinds, widths_by_kind
from onefold.observe.rehearsal import Loss, Rehearsal, rehearse
from onefold.optim.named import choose
from onefold.planner.answer import Plan, answer
from onefold.planner.rows import Recommendation, Row, exact_row, row_of
from onefold.settings.offload import AUTO, Offload
from onefold.settings.precision import NAMES, Precision
from onefold.settings.zero import Zero

REHEARSED = ("keep", "checkpoint", "checkpoint+host")  # policies of a module's plan, which has no tensor parallelism


def plan(
    model: nn.Module,
    sample: Any,
    *,
    ranks: int,
    hardware: str | Hardware | None = None,
    optimizer: str | type[torch.optim.Optimizer] = "adamw",
    optimizer_settings: dict[str, Any] | None = None,
    optimizer_state: Literal["fp32", "bf16", "8bit"] = "fp32",
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
    `optimizer` is a name ("adamw", "muon", …) or a class; torch.optim.Muon is planned as onefold.Muon.
    `values=True` takes the steps on real tensors, for models whose control flow depends on them.
    `optimizer_state` is the form of moments: `state` of Optimizer. `activations="checkpoint"` computes blocks again in
    backward; `micro_batches` of `sample` make a step.

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
    chosen_optimizer = choose(optimizer, optimizer_settings, optimizer_state)
    cost = chosen_optimizer.cost
    backend = "nccl" if machine.device == "cuda" else "gloo"
    policy = Precision.of(zero.precision).decided(own_sum=True, cuda=backend == "nccl")

    def rehearsed(stage: int, policy: str, at: int, *, count: bool = False) -> Rehearsal:
        asked = dataclasses.replace(zero, stage=stage, activations=policy, offload=_at_stage(offload, stage))
        return rehearse(
            model, sample, asked, cost, ranks=at, plays=backend, node_ranks=machine.node_ranks,
            loss=loss, values=values, count_flops=count, micro_batches=1 if count else micro_batches,
            optimizer=chosen_optimizer.make_whole,
        )  # fmt: skip

    keep = rehearsed(0, "keep", 1, count=True)
    seen = survey(model, dataclasses.replace(zero, init=None), 1)
    checkpoint = rehearsed(0, "checkpoint", 1, count=True) if seen.blocks else keep
    auto_wire = Precision.of(zero.precision).wire is None
    matrices = chosen_optimizer.matrices(model, seen.blocks)
    work = _module_work(
        seen, sample, policy, keep, checkpoint, accumulates=micro_batches > 1, auto_wire=auto_wire, matrices=matrices
    )
    question = Question(
        work=work, ranks=ranks, hardware=machine, cost=cost, batch=work.module.batch if work.module else 1,
        max_global_batch=max_global_batch, activations=activations, micro_batches=micro_batches,
        prefetch=zero.prefetch if isinstance(zero.prefetch, int) else 1,
        reshard_after_forward=zero.reshard_after_forward,
    )  # fmt: skip
    found = answer(question, type(model).__name__, _precision_name(policy), tokens)
    rows = found.stages
    seen_at = {row.stage: rehearsed(row.stage, activations, ranks) for row in rows}
    if offload.optimizer is not None:
        choices = [_choice(_at_stage(offload, s), s, activations, seen.parameter_tier) for s, seen in seen_at.items()]
        priced = [question.price(choice, question.grid(), row.batch) for choice, row in zip(choices, rows)]
        rows = tuple(row_of(question, estimate, tokens) for estimate in priced)
    exact = tuple(exact_row(row, seen_at[row.stage], found.hardware) for row in rows)
    ranked = _corrected(found.recommendations, exact)
    chosen = next((row for row in (*exact, *found.variants) if row.label == ranked[0].label), found.chosen)
    return dataclasses.replace(found, stages=exact, recommendations=ranked, chosen=chosen)


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
    path = offload.path if offload.optimizer in ("disk", AUTO) else None
    return dataclasses.replace(offload, parameters=None, path=path)


def _choice(offload: Offload, stage: int, activations: str, parameters: str) -> Choice:
    """The choice of a stage whose rehearsal had parameters on this tier."""
    return Choice(stage, optimizer=offload.optimizer_tier.value, parameters=parameters, activations=activations)


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
    matrices: dict[str, int],
) -> Work:
    widths = widths_by_kind(seen.units, policy)
    if accumulates:  # sums are kept in fp32, or in bf16
        widths = {kind: own._replace(grad=own.sums, flat=True) if own.narrow else own for kind, own in widths.items()}
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
        matrices=matrices,
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
