"""The hooks that connect an engine to the forward and backward of its model.

Before the root's forward, parameters are checked and buffers broadcast; after it, its outputs get a hook that enters
backward (where parameters are sharded, units are unsharded from then on). In backward, the first gradient of a
parameter, on its way to .grad, opens the reductions, and each gradient is added to its unit as soon as autograd has
computed it. Where parameters are sharded, hooks unshard and reshard units around modules, and guard state_dict() and
load_state_dict().
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.comm.meter import Label
from onefold.errors import StateError
from onefold.model.containers import as_list, tensors_in
from onefold.model.dtensor_shards import local_tensor
from onefold.model.survey import ATTRIBUTE
from onefold.runtime.calls import Around, skip_frames, surround
from onefold.runtime.casts import attach_casts
from onefold.runtime.engine import Engine
from onefold.runtime.lookups import intercept_lookups
from onefold.runtime.methods import attach_methods
from onefold.runtime.moves import guard_moves
from onefold.runtime.phases import Phase
from onefold.runtime.quantized_modules import attach_quantized
from onefold.runtime.refusals import Call, Situation, refuse
from onefold.runtime.saved_views import copy_for_safetensors
from onefold.runtime.seen_inputs import Graph
from onefold.runtime.uncopied import Uncopied
from onefold.runtime.unsharding import in_backward
from onefold.state.guarded_parameters import no_guard
from onefold.state.unit import Unit


def attach(engine: Engine) -> None:
    """Adds to the model whatever the engine needs; `engine.attachments` has all of it."""
    model, added = engine.model, engine.attachments
    for index, param in enumerate(engine.params):
        _hook_gradient(engine, index, param)
    unit_of = {id(param): unit for unit in engine.units for param in unit.params}
    for name, module in model.named_modules():
        if module._parameters:
            units = {id(p): unit_of[id(p)] for p in module._parameters.values() if id(p) in unit_of}
            record = partial(_record_load, engine, name, list(units.values()))
            added.hook(module.register_load_state_dict_post_hook(Uncopied(record)))
    if engine.resolved.precision.narrow:
        attach_casts(engine)
    if engine.unsharding.units:
        _attach_unsharding(engine)
    _surround_model(engine)
    attach_methods(engine, partial(_hook_output, engine))
    added.hook(model.register_state_dict_post_hook(copy_for_safetensors))
    added.hook(model.register_load_state_dict_pre_hook(Uncopied(partial(_check_load, engine))))
    added.attribute(model, ATTRIBUTE, engine)
    added.attribute(model, "__deepcopy__", engine.refuse_copy)
    guard_moves(engine)
    attach_quantized(engine)
    added.attribute(model, "zero_grad", partial(_zero_grad, engine, model.zero_grad))


def _check_load(engine: Engine, *_: Any) -> None:
    engine.check(Call.LOAD_STATE_DICT)


def _attach_unsharding(engine: Engine) -> None:
    """Hooks that unshard and reshard around blocks, around leaf modules outside them, and around the root."""
    unsharding, model, blocks = engine.unsharding, engine.model, engine.resolved.blocks
    unit_of = {id(param): index for index, unit in enumerate(unsharding.units) for param in unit.params}
    frozen = {index for index, unit in enumerate(unsharding.units) if unit not in engine.units}
    modules = dict(model.named_modules())
    inside = {id(module) for name in blocks for module in modules[name].modules()}
    edges = [modules[name] for name in blocks]
    last_user = {unit: number for number, module in enumerate(edges) for unit in _units_of(module, unit_of)}
    leaves = [m for m in modules.values() if not any(True for _ in m.children())]
    edges += [m for m in leaves if id(m) not in inside and m is not model]
    skip_frames(*unsharding.called_by_autograd())
    for number, module in enumerate(edges):
        indices = _units_of(module, unit_of)
        if indices:
            later = None if number >= len(blocks) else [unit for unit in indices if last_user[unit] > number]
            _surround_module(engine, module, indices, sorted(frozen.intersection(indices)), later)
            inside.update(id(part) for part in module.modules())
    for module in modules.values():
        if (
            module is not model
            and id(module) not in inside
            and any(id(p) in unit_of for p in module._parameters.values())
        ):
            # its own parameters are gathered when it looks them up, which also works if it is called by itself
            _surround_module(engine, module, [], [])
    unsharding.gathers.embeddings = _embedding_units(model, unit_of)
    intercept_lookups(model.modules(), unit_of, unsharding, engine.attachments)
    for module in modules.values():
        indices = sorted({unit_of[id(p)] for p in module._parameters.values() if id(p) in unit_of})
        if indices:
            _attach_state(engine, module, indices)
    engine.attachments.hook(model.register_load_state_dict_post_hook(lambda *_: unsharding.reshard_all()))


def _units_of(module: nn.Module, unit_of: dict[int, int]) -> list[int]:
    return sorted({unit_of[id(p)] for p in module.parameters() if id(p) in unit_of})


def _record_load(engine: Engine, name: str, units: Sequence[Unit], module: nn.Module, keys: Any) -> None:
    """After a load into a module's own parameters, which are in `units`: its writes are no edits by the user, as the
    masters have them already; and every rank must have made it."""
    engine.alike.loaded(name)
    for unit in units:
        unit.edits.accept()
    engine.frozen_edits.accept()


def _surround_module(
    engine: Engine, module: nn.Module, indices: list[int], frozen: list[int], later: list[int] | None = None
) -> None:
    """Unshards these units around every call of a module. `later` are those that blocks registered after this block
    share with it; None for a module outside blocks."""
    unsharding, call = engine.unsharding, id(module)
    surround(
        module,
        Around(
            before=partial(_enter_module, engine, module, indices, frozen),
            after=partial(_leave_module, engine, module, indices, later),
            failed=lambda: unsharding.leave(call, indices, []),
            interrupted=lambda: unsharding.interrupt(call),
        ),
        engine.attachments,
    )


def _surround_model(engine: Engine) -> None:
    """Runs checks before every forward of the model, and unshards around it. What it asks of the engine it asks anew,
    since parameters that were unfrozen change the engine while a forward begins."""
    call = id(engine.model)

    def before(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        _before_forward(engine, tensors_in([*args, *kwargs.values()]))
        if engine.unsharding.units:
            _enter_root(engine)
        engine.sequences.enter()

    def after(output: Any) -> None:
        engine.watch.forward_ended()
        _hook_output(engine, output)
        if engine.unsharding.units:
            engine.unsharding.leave(call, [], as_list(output), root=True)
        engine.sequences.leave()

    def failed() -> None:
        engine.call_failed()
        engine.sequences.leave(failed=True)
        if engine.unsharding.units:
            engine.unsharding.leave(call, [], [], root=True)

    def interrupted() -> None:
        engine.call_failed()
        engine.unsharding.interrupt(call)

    around = Around(before, after, failed, interrupted)
    surround(engine.model, around, engine.attachments)


def _enter_root(engine: Engine) -> None:
    if torch.is_autocast_enabled(engine.device.type):
        warnings.warn(  # once per place, as warnings are
            "autocast casts unsharded weights and keeps the casts for its region, so they are not resharded; "
            "with stage 3, cast inputs instead or leave autocast around single modules",
            stacklevel=2,
        )
    engine.unsharding.enter(id(engine.model), [], root=True)


def _embedding_units(model: nn.Module, unit_of: dict[int, int]) -> set[int]:
    """Units all of whose parameters belong to embeddings and to nothing else."""
    plain = {
        unit_of[id(p)]
        for m in model.modules()
        if isinstance(m, nn.Embedding)
        for p in m.parameters()
        if id(p) in unit_of
    }
    others = [m for m in model.modules() if not isinstance(m, nn.Embedding)]
    return plain - {unit_of[id(p)] for m in others for p in m._parameters.values() if id(p) in unit_of}


def _attach_state(engine: Engine, module: nn.Module, indices: list[int]) -> None:
    """Hooks that let load_state_dict() take a full state dict, one unit at a time, and make state_dict() raise while
    parameters are sharded."""
    unsharding = engine.unsharding

    def before_load(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise StateError("load_state_dict(assign=True) would replace sharded parameters; load without assign=True")
        unsharding.begin_load(indices)

    def after_save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replaces views by copies, since the flat buffers lose their memory when full_parameters ends."""
        for name in module._parameters:
            if prefix + name in state and not isinstance(state[prefix + name], nn.Parameter):
                state[prefix + name] = state[prefix + name].clone()

    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not all(unsharding.units[index].flat_params.visible for index in indices):
            refuse(Call.STATE_DICT, Situation.RELEASED)

    added = engine.attachments
    added.hook(module.register_load_state_dict_pre_hook(before_load))
    added.hook(module.register_load_state_dict_post_hook(lambda *_: unsharding.end_load(indices)))
    added.hook(module.register_state_dict_pre_hook(before_save))
    added.hook(module.register_state_dict_post_hook(after_save))


def _enter_module(
    engine: Engine,
    module: nn.Module,
    indices: list[int],
    frozen: list[int],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    unsharding = engine.unsharding
    unsharding.enter(id(module), indices)
    if not indices:
        return
    counted = not in_backward()
    if counted:
        engine.watch.units_begin(indices)
    inputs = [  # hooks of leaves do not run under autograd.grad; a reentrant recomputation never runs under it
        t for t in tensors_in([*args, *kwargs.values()]) if t.requires_grad and not (t.is_leaf and counted)
    ]
    if counted and torch.is_grad_enabled() and (inputs or len(frozen) < len(indices)):
        unsharding.count_call(indices)  # without such inputs, as the first block may be, until backward ends
    if inputs and torch.is_grad_enabled():
        _when_all_have_gradients(inputs, lambda _: unsharding.backward_left(indices, frozen, counted=counted))


def _when_all_have_gradients(tensors: Sequence[Tensor], then: Callable[[Any], None]) -> None:
    """Calls `then` once all tensors have gradients. torch's hook for several tensors and their nodes refer to each
    other: the graph of an abandoned forward, and its activations, would live until Python's garbage collector runs. One
    tensor, the usual case, needs no such cycle."""
    if len(tensors) == 1:
        tensors[0].register_hook(then)
    else:
        torch.autograd.graph.register_multi_grad_hook(tensors, then)


def _leave_module(engine: Engine, module: nn.Module, indices: list[int], later: list[int] | None, output: Any) -> None:
    given = as_list(output)
    engine.unsharding.leave(id(module), indices, given)
    if later is not None and not in_backward():
        engine.unsharding.gathers.expect(later)
    if indices and torch.is_grad_enabled() and not isinstance(module, nn.Embedding):
        for tensor in given:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda _: engine.unsharding.need_in_backward(indices))


def _hook_gradient(engine: Engine, index: int, param: nn.Parameter) -> None:
    # Python's garbage collector does not see autograd's hooks: a strong reference would leak.
    weak = weakref.ref(engine)

    def coming(_: Any) -> None:
        if (live := weak()) is not None and live.progress.phase is not Phase.BACKWARD:
            live.first_gradient_coming()

    def arrived(_: Any) -> None:
        if (live := weak()) is not None:
            live.arriving.take(index)

    arrived.__dict__[ATTRIBUTE] = weak  # by which another shard() sees that this parameter is taken
    trains = param.requires_grad  # not if it is frozen for a while, or still, beside others of its unit
    with no_guard():
        param.requires_grad_(True)
        node = torch.autograd.graph.get_gradient_edge(param).node  # AccumulateGrad, which adds to .grad
        engine.attachments.hook(node.register_prehook(coming))
        engine.attachments.hook(param.register_post_accumulate_grad_hook(arrived))
        param.requires_grad_(trains)
    engine.hold_accumulator(node)


def _before_forward(engine: Engine, inputs: Iterable[Tensor]) -> None:
    if in_backward():  # a recomputation
        engine.enter_backward()
        return
    engine.before_forward(inputs)
    engine.sequences.serve()
    if engine.resolved.settings.buffers == "rank0" and engine.model.training:
        with torch.no_grad():
            buffers = [local_tensor(b) for b in engine.model.buffers()]
            engine.everyone.broadcast(buffers, Label("buffers", "the model"))


def _hook_output(engine: Engine, output: Any) -> None:
    """A gradient that comes to the output of a forward opens the backward."""
    if torch.is_grad_enabled() and engine.trains:
        graph = engine.watch.graph()
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda _: _enter_backward(engine, graph))


def _enter_backward(engine: Engine, graph: Graph | None) -> None:
    if graph is not None:
        graph.used = True
    engine.enter_backward()


def _zero_grad(engine: Engine, zero_grad: Callable[..., None], set_to_none: bool = True) -> None:
    engine.drop_gradients(keep_as_zeros=not set_to_none)
    if set_to_none:
        zero_grad(set_to_none=True)  # parameters that Onefold does not manage, if any
