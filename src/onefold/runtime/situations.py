"""In which situations a model is: one question per situation, asked of its engine when a call is made.

Situations that have no entry here are known only at the call site, which calls `refuse` directly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from onefold.runtime.accumulating import Accumulating
from onefold.runtime.attached import AttachedOptimizers, Averages
from onefold.runtime.open_contexts import FullParameterContexts
from onefold.runtime.pipeline_axis import Pipeline
from onefold.runtime.refusals import REFUSED_IN, Call, Situation, refuse
from onefold.runtime.scaled import GradientScale
from onefold.runtime.untied import NoTiedParameters
from onefold.runtime.update_policy import UpdatePolicy
from onefold.runtime.used_parameters import UsedParameters


class EngineFacts(Protocol):
    """What these questions need to know of an engine."""

    @property
    def ended(self) -> bool: ...

    @property
    def gradients_left(self) -> bool: ...

    @property
    def pipeline(self) -> Pipeline: ...

    @property
    def broken(self) -> Situation | None: ...

    @property
    def broken_unit(self) -> str: ...

    @property
    def used(self) -> UsedParameters: ...

    @property
    def scale(self) -> GradientScale: ...

    @property
    def optimizers(self) -> AttachedOptimizers: ...

    @property
    def averages(self) -> Averages: ...

    @property
    def tied(self) -> NoTiedParameters: ...

    @property
    def updates(self) -> UpdatePolicy: ...

    @property
    def contexts(self) -> FullParameterContexts: ...

    @property
    def accumulating(self) -> Accumulating: ...

    @property
    def alone_in_rank(self) -> bool: ...


SITUATION_CHECKS: Mapping[Situation, Callable[[EngineFacts], bool]] = {
    Situation.UNSHARDED: lambda model: model.ended,
    Situation.LOAD_FAILED: lambda model: model.broken is Situation.LOAD_FAILED,
    Situation.UPDATE_FAILED: lambda model: model.broken is Situation.UPDATE_FAILED,
    Situation.UNSCALED: lambda model: model.scale.missing,
    Situation.OTHER_SCALE: lambda model: model.used.any and model.scale.changed,
    Situation.CLIPPED: lambda model: model.used.any and model.optimizers.clipped,
    Situation.TIED_SUMMED: lambda model: model.tied.summed,
    Situation.IN_FULL_PARAMETERS: lambda model: model.contexts.open,
    Situation.AVERAGED: lambda model: model.averages.applied,
    Situation.IN_BACKWARD: lambda model: torch._C._current_graph_task_id() != -1,
    Situation.STEP_AWAITED: lambda model: model.updates.awaits_step,
    Situation.UPDATES_IN_FULL_PARAMETERS: lambda model: model.contexts.open and not model.updates.keeps_gradients,
    Situation.UPDATES_IN_BACKWARD: lambda model: not model.updates.keeps_gradients,
    Situation.ACCUMULATING: lambda model: not model.accumulating.final,
    Situation.GRADIENTS_LEFT: lambda model: model.gradients_left,
    Situation.IN_PIPELINE: lambda model: model.pipeline.stages > 1,
    Situation.SEVERAL_STAGES: lambda model: not model.alone_in_rank,
}


def check(model: EngineFacts, call: Call) -> None:
    """Raises if the model is in a situation in which this call is refused."""
    for situation in REFUSED_IN[call]:
        if situation in SITUATION_CHECKS and SITUATION_CHECKS[situation](model):
            scale = model.scale
            refuse(call, situation, unit=model.broken_unit, before=scale.value, now=scale.running)
