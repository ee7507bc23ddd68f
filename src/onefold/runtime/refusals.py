"""Which calls are refused in which situations of a model. An entry is the error: what is wrong, and what to do.

A pair that is not in the table is allowed. `Engine.check(call)` raises for the first situation of the model, in the
order of `Situation`, in which the call is refused; situations that only their caller can see are raised by `refuse`.
Errors about content, such as the name or the shape of one parameter, are raised where the content is known.
"""

from __future__ import annotations

from enum import Enum
from typing import NoReturn

from onefold.errors import StateError


class Call(Enum):
    """What users ask of a model, or of its optimizer."""

    FORWARD = "model()"
    BACKWARD = "loss.backward()"
    GRADIENT = "a gradient that backward brings"
    CLIP = "clip_grad_norm()"
    GRADIENTS = "gradients() and grad_norms()"
    STEP = "step()"
    ZERO_GRAD = "zero_grad()"
    ACCUMULATE = "accumulate()"
    FULL_PARAMETERS = "full_parameters()"
    WRITE = "full_parameters(write=True)"
    FULL_STATE_DICT = "full_state_dict()"
    STATE_DICT = "state_dict()"
    PARAMETER = "an operation on the values of a parameter"
    SAVE = "save()"
    LOAD = "load()"
    LOAD_STATE_DICT = "load_state_dict()"
    LOAD_PART = "load() of some tensors, or without the optimizer"
    OPTIMIZER = "Optimizer()"
    OPTIMIZER_STATE = "state_dict(), load_state_dict() or add_param_group() of an Optimizer"
    AVERAGE = "EMA() or a method of it"
    APPLY = "EMA.applied()"
    PARALLELIZE = "parallelize()"
    UNFREEZE = "requires_grad_() of a parameter that was frozen when shard() was called"
    UNSHARD = "unshard()"


class Situation(Enum):
    """What may be so of a model while a call is made; several may be so at once."""

    SHARDED = "shard() has been called"
    UNSHARDED = "unshard() has made the model plain again"
    OLD_GRAPH = "the graph of the backward was made before units of the model changed"
    RELEASED = "parameters are spread over ranks, and placeholders are in the model"
    REPLACED = "a newer Optimizer was made for parameters of this one"
    TRANSFORMED = "parameters are sharded, and torch.func transforms the call"
    LOAD_FAILED = "load() has replaced some values, and failed"
    UPDATE_FAILED = "some units have been updated, and the update of another has failed"
    NO_GRADIENTS = "no backward has brought this rank gradients, and none is due"
    NO_RANK_HAS_GRADIENTS = "no backward has brought any rank gradients"
    UNEVEN_BACKWARDS = "another rank begins another backward of this step, and this rank has run all of its own"
    UNSCALED = "fp16 computes, and the loss of the running backward is not scaled"
    OTHER_SCALE = "gradients of this step were scaled by another number"
    CLIPPED = "16-bit gradients of this step are to be clipped when step() reads them"
    TIED_SUMMED = "gradients of tied parameters were added to the other pipeline stage's"
    IN_FULL_PARAMETERS = "a full_parameters context is open"
    AVERAGED = "inside EMA.applied(), parameters are averages"
    IN_BACKWARD = "autograd is running a backward in this thread"
    STEP_AWAITED = "a backward has updated units, and step() has not been called since"
    UPDATES_IN_FULL_PARAMETERS = "backward updates units, and a full_parameters context is open"
    UNIT_UPDATED = "this backward has updated the unit already"
    UPDATES_IN_BACKWARD = "backward updates units, and keeps no gradients"
    ACCUMULATING = "an accumulate context is open"
    SEVERAL_STAGES = "this rank holds several stages of a pipeline"
    GRADIENTS_LEFT = "a backward has brought gradients, and no step() has used them"
    IN_PIPELINE = "the model is one stage of a pipeline"


STEP_IN_BACKWARD = "step_in_backward=True"
BACKWARD_FIRST = "call loss.backward() before optimizer.step() or clip_grad_norm()"
UNEVEN = (
    'ranks run different numbers of backwards in one step, which at stage 0 works only with accumulate(reduce="once"); '
    "use it, or give every rank equally many micro-batches"
)
BROKEN = {
    Situation.LOAD_FAILED: "load() failed half way, so the model holds values of two states; load a checkpoint again",
    Situation.UPDATE_FAILED: "the update of {unit} failed, so the model holds values of two steps; load a checkpoint",
}
NEEDS_VALUES = (
    Call.FORWARD, Call.FULL_PARAMETERS, Call.FULL_STATE_DICT, Call.SAVE, Call.AVERAGE, Call.APPLY, Call.UNSHARD
)  # fmt: skip
UNSHARDED = (
    "after onefold.unshard(model), which took all of Onefold off it: call shard() again, and make a new Optimizer, or "
    "EMA"
)

REFUSALS: dict[tuple[Call, Situation], str] = {
    **{
        (call, Situation.UNSHARDED): f"{call.value} {UNSHARDED}"
        for call in (
            Call.CLIP,
            Call.GRADIENTS,
            Call.STEP,
            Call.ZERO_GRAD,
            Call.OPTIMIZER_STATE,
            Call.FULL_STATE_DICT,
            Call.AVERAGE,
            Call.APPLY,
        )
    },
    (Call.BACKWARD, Situation.OLD_GRAPH): (
        "this backward belongs to a forward before onefold.unshard() or before parameters were unfrozen, when they "
        "were elsewhere in memory: call model() again"
    ),
    **{(call, situation): text for situation, text in BROKEN.items() for call in (*NEEDS_VALUES, Call.STEP)},
    **{(Call.LOAD_PART, broken): f"{text}: all of it, with the optimizer" for broken, text in BROKEN.items()},
    (Call.FORWARD, Situation.TRANSFORMED): (
        "torch.func (jvp, grad, vmap, …) cannot transform a model whose parameters are sharded: use stage 2 or below"
    ),
    **{(call, Situation.UNEVEN_BACKWARDS): UNEVEN for call in (Call.CLIP, Call.STEP)},
    (Call.BACKWARD, Situation.UNSCALED): (
        "fp16 gradients need a loss scale: call optimizer.backward(loss), not loss.backward()"
    ),
    (Call.BACKWARD, Situation.OTHER_SCALE): (
        "gradients scaled by {before:g} and {now:g} would add up in one step; scale every backward of a step alike, or "
        "call zero_grad() first"
    ),
    (Call.BACKWARD, Situation.CLIPPED): (
        "16-bit gradients are clipped when step() reads them: clip after all backwards of a step"
    ),
    (Call.BACKWARD, Situation.TIED_SUMMED): (
        "a second schedule.step() before optimizer.step(): gradients of parameters tied across stages have been summed "
        "already; use more micro-batches in one schedule.step()"
    ),
    (Call.BACKWARD, Situation.STEP_AWAITED): (
        f"{STEP_IN_BACKWARD} updates in every backward: call optimizer.step() before the next one"
    ),
    (Call.BACKWARD, Situation.UPDATES_IN_FULL_PARAMETERS): (
        f"{STEP_IN_BACKWARD} would update in a backward inside full_parameters, which would keep old values; leave it "
        f"first"
    ),
    (Call.GRADIENT, Situation.UNIT_UPDATED): (
        f"a gradient of {{name}} came after its unit was updated: with {STEP_IN_BACKWARD} every parameter must get its "
        f"gradient once in one backward (no reentrant checkpoints that share blocks, no second backward before step())"
    ),
    **{
        (call, situation): f"{text}: {BACKWARD_FIRST}"
        for call in (Call.CLIP, Call.GRADIENTS, Call.STEP)
        for situation, text in {
            Situation.NO_GRADIENTS: "no gradients",
            Situation.NO_RANK_HAS_GRADIENTS: "no rank has gradients",
        }.items()
    },
    (Call.GRADIENTS, Situation.UPDATES_IN_BACKWARD): (
        f"{STEP_IN_BACKWARD} has updated each unit by now, so no gradients are left to look at; leave it out"
    ),
    (Call.CLIP, Situation.UPDATES_IN_BACKWARD): (
        f"{STEP_IN_BACKWARD} has updated each unit by now, so nothing is left to clip; leave it out"
    ),
    (Call.CLIP, Situation.SEVERAL_STAGES): (
        "this rank holds several stages of a pipeline, so this norm would be of one of them only; use one stage per "
        "rank (Schedule1F1B), or leave clipping out"
    ),
    (Call.STEP, Situation.IN_FULL_PARAMETERS): (
        "step() inside full_parameters would leave old values in it; leave full_parameters first"
    ),
    (Call.ZERO_GRAD, Situation.STEP_AWAITED): (
        f"{STEP_IN_BACKWARD} has updated parameters in backward: call step() before zero_grad()"
    ),
    (Call.ACCUMULATE, Situation.UPDATES_IN_BACKWARD): (
        f"{STEP_IN_BACKWARD} updates in every backward, so nothing can accumulate; leave it out"
    ),
    (Call.ACCUMULATE, Situation.ACCUMULATING): ("accumulate() is already on for this model; leave the outer one first"),
    (Call.STATE_DICT, Situation.RELEASED): (
        "model.state_dict() would hold parameters that are spread over ranks; call onefold.full_state_dict(model), or "
        "model.state_dict() inside onefold.full_parameters(model)"
    ),
    (Call.PARAMETER, Situation.RELEASED): (
        "{use} needs the values of {name}, which are not all on this rank now: use onefold.full_parameters(model) "
        "around it (with write=True to change them), onefold.Optimizer in place of a plain torch optimizer, and for a "
        "method that computes as forward does shard(…, methods=(its name,))"
    ),
    **{
        (call, situation): f"{call.value} {text}"
        for call in (Call.SAVE, Call.LOAD)
        for situation, text in {
            Situation.IN_FULL_PARAMETERS: "inside full_parameters would miss what is written there; leave it first",
            Situation.IN_BACKWARD: "inside backward would see some units before and some after it; call it later",
            Situation.STEP_AWAITED: "between a backward that updates and its step(): call optimizer.step() first",
        }.items()
    },
    **{
        (call, Situation.AVERAGED): f"{call.value} inside EMA.applied(), where parameters are averages: leave it first"
        for call in (
            Call.BACKWARD,
            Call.STEP,
            Call.SAVE,
            Call.LOAD,
            Call.LOAD_STATE_DICT,
            Call.WRITE,
            Call.FULL_STATE_DICT,
            Call.OPTIMIZER,
            Call.AVERAGE,
            Call.APPLY,
        )
    },
    (Call.APPLY, Situation.IN_FULL_PARAMETERS): (
        "EMA.applied() inside full_parameters would not be seen there; leave full_parameters first, and use it inside"
    ),
    (
        Call.APPLY,
        Situation.IN_BACKWARD,
    ): "EMA.applied() in a backward would change parameters under it: call it later",
    (Call.APPLY, Situation.STEP_AWAITED): (
        "EMA.applied() between a backward that updates and its step(): call optimizer.step() first"
    ),
    (Call.OPTIMIZER, Situation.STEP_AWAITED): (
        f"{STEP_IN_BACKWARD} has updated parameters in backward: call step() before another Optimizer is made"
    ),
    **{
        (call, Situation.REPLACED): (
            f"{call.value} of an Optimizer that another one has replaced, which was made later for {{name}}: use the "
            f"later one, or give each Optimizer parameters of its own (groups=)"
        )
        for call in (Call.CLIP, Call.GRADIENTS, Call.STEP, Call.ZERO_GRAD, Call.OPTIMIZER_STATE)
    },
    **{
        (call, situation): f"{call.value} {text}"
        for call in (Call.UNSHARD, Call.UNFREEZE)
        for situation, text in {
            Situation.IN_FULL_PARAMETERS: "inside full_parameters would move parameters under it; leave it first",
            Situation.AVERAGED: "inside EMA.applied(), where parameters are averages: leave it first",
            Situation.IN_BACKWARD: "inside backward would move parameters under it; call it later",
            Situation.STEP_AWAITED: "between a backward that updates and its step(): call optimizer.step() first",
            Situation.ACCUMULATING: "inside accumulate() would lose gradients; leave it first",
            Situation.GRADIENTS_LEFT: "would lose gradients that no step() has used: call step() or zero_grad() first",
        }.items()
    },
    (Call.UNSHARD, Situation.IN_PIPELINE): (
        "unshard() is unsupported with a mesh axis 'pp': use onefold.save, and load it into a model without one"
    ),
    (Call.UNFREEZE, Situation.IN_PIPELINE): (
        "parameters that were frozen when shard() was called cannot be unfrozen with a mesh axis 'pp': call "
        "requires_grad_() before shard()"
    ),
    (Call.PARALLELIZE, Situation.SHARDED): "this model was sharded already; call parallelize() first, then shard()",
}

REFUSED_IN = {call: [one for one in Situation if (call, one) in REFUSALS] for call in Call}  # those to look for


def refuse(call: Call, situation: Situation, **facts: object) -> NoReturn:
    """Raise the error of a call in a situation in which it is refused; `facts` are named in its text."""
    raise StateError(REFUSALS[call, situation].format(**facts))
