"""Ties an engine to the forward and backward of its model.

Forward of the root: parameters are checked, buffers brought in line, and the outputs get a hook that opens backward.
Backward: each parameter's gradient goes to its unit as soon as autograd has made it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.comm.meter import Label
from onefold.errors import StateError
from onefold.model.containers import listed, tensors_in
from onefold.model.dtensor_shards import held
from onefold.model.survey import ATTRIBUTE
from onefold.runtime.casts import attach_casts
from onefold.runtime.engine import Engine
from onefold.runtime.refusals import Call, Situation, refuse
from onefold.runtime.unsharding import in_backward, watch_parameters


def attach(engine: Engine) -> None:
    model = engine.model
    for index, param in enumerate(engine.params):
        _watch_gradient(engine, index, param)
    model.register_forward_pre_hook(partial(_before_forward, engine), prepend=True)
    model.register_forward_hook(partial(_after_forward, engine))
    if engine.resolved.precision.narrow:
        attach_casts(engine)
    if engine.unsharding.units:
        _attach_passes(engine)
    model.__dict__[ATTRIBUTE] = engine
    model.__dict__["__deepcopy__"] = engine.refuse_copy
    model.__dict__["_apply"] = partial(_guarded_apply, engine, model._apply)
    model.__dict__["zero_grad"] = partial(_zero_grad, engine, model.zero_grad)


def _attach_passes(engine: Engine) -> None:
    """Gather and release around blocks, around plain layers outside them, and around the root."""
    unsharding, model, blocks = engine.unsharding, engine.model, engine.resolved.blocks
    unit_of = {id(param): index for index, unit in enumerate(unsharding.units) for param in unit.params}
    frozen = {index for index, unit in enumerate(unsharding.units) if unit not in engine.units}
    modules = dict(model.named_modules())
    inside = {id(module) for name in blocks for module in modules[name].modules()}
    edges = [modules[name] for name in blocks]
    edges += [m for m in modules.values() if id(m) not in inside and m is not model and not any(m.children())]
    for module in edges:
        indices = sorted({unit_of[id(p)] for p in module.parameters() if id(p) in unit_of})
        if indices:
            module.register_forward_pre_hook(
                partial(_enter_module, engine, indices, sorted(frozen.intersection(indices))), with_kwargs=True
            )
            module.register_forward_hook(partial(_leave_module, engine, indices), always_call=True)
            inside.update(id(part) for part in module.modules())
    for module in modules.values():
        if (
            module is not model
            and id(module) not in inside
            and any(id(p) in unit_of for p in module._parameters.values())
        ):
            # its own parameters are gathered when it looks them up, which also works if it is called by itself
            module.register_forward_pre_hook(lambda m, args: unsharding.enter(id(m), []))
            module.register_forward_hook(
                lambda m, args, output: unsharding.leave(id(m), [], listed(output)), always_call=True
            )
    model.register_forward_pre_hook(lambda *_: _enter_root(engine))
    model.register_forward_hook(
        lambda m, args, output: unsharding.leave(id(m), [], listed(output), root=True), always_call=True
    )
    unsharding.looked_up_only = _of_embeddings(model, unit_of)
    watch_parameters(model.modules(), unit_of, unsharding)
    for module in modules.values():
        indices = sorted({unit_of[id(p)] for p in module._parameters.values() if id(p) in unit_of})
        if indices:
            _attach_state(engine, module, indices)
    model.register_load_state_dict_post_hook(lambda *_: unsharding.release_all())


def _enter_root(engine: Engine) -> None:
    if torch.is_autocast_enabled(engine.device.type):
        warnings.warn(  # once per place, as warnings are
            "autocast casts whole weights and keeps the casts for its region, so they are not sharded; "
            "with stage 3, cast inputs instead or leave autocast around single modules",
            stacklevel=2,
        )
    engine.unsharding.enter(id(engine.model), [], root=True)


def _of_embeddings(model: nn.Module, unit_of: dict[int, int]) -> set[int]:
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
    """A whole state dict may come in, one unit at a time; none goes out while values are spread over ranks."""
    unsharding = engine.unsharding

    def before_load(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise StateError("load_state_dict(assign=True) would replace sharded parameters; load without assign=True")
        unsharding.begin_load(indices)

    def after_save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Copies: the buffers behind the parameters are emptied when full_parameters ends."""
        for name in module._parameters:
            if prefix + name in state and not isinstance(state[prefix + name], nn.Parameter):
                state[prefix + name] = state[prefix + name].clone()

    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if not all(unsharding.gathers.ready(index) for index in indices):
            refuse(Call.STATE_DICT, Situation.RELEASED)

    module.register_load_state_dict_pre_hook(before_load)
    module.register_load_state_dict_post_hook(lambda *_: unsharding.end_load(indices))
    module.register_state_dict_pre_hook(before_save)
    module.register_state_dict_post_hook(after_save)


def _enter_module(
    engine: Engine, indices: list[int], frozen: list[int], module: nn.Module, args: Any, kwargs: Any
) -> None:
    unsharding = engine.unsharding
    unsharding.enter(id(module), indices)
    counted = not in_backward()
    inputs = [  # a leaf cannot tell under autograd.grad; those of a reentrant recomputation are never asked by it
        t for t in tensors_in([*args, *kwargs.values()]) if t.requires_grad and not (t.is_leaf and counted)
    ]
    if inputs and torch.is_grad_enabled():
        if counted:
            unsharding.ran(indices)
        _when_all_have_gradients(inputs, lambda _: unsharding.left(indices, frozen, counted=counted))


def _when_all_have_gradients(tensors: Sequence[Tensor], then: Callable[[Any], None]) -> None:
    """torch's hook for several holds their nodes, which hold it: the graph of an abandoned forward would stay until
    Python collects garbage, and its activations with it. One tensor, the usual case, needs no such circle."""
    if len(tensors) == 1:
        tensors[0].register_hook(then)
    else:
        torch.autograd.graph.register_multi_grad_hook(tensors, then)


def _leave_module(engine: Engine, indices: list[int], module: nn.Module, args: Any, output: Any) -> None:
    given = listed(output)
    engine.unsharding.leave(id(module), indices, given)
    if torch.is_grad_enabled() and not isinstance(module, nn.Embedding):
        for tensor in given:
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda _: engine.unsharding.need_in_backward(indices))


def _watch_gradient(engine: Engine, index: int, param: nn.Parameter) -> None:
    weak = weakref.ref(engine)  # autograd's hooks are out of sight of Python's collector: a strong one would never go

    def coming(_: Any) -> None:
        if (live := weak()) is not None:
            live.gradient_coming()

    def arrived(_: Any) -> None:
        if (live := weak()) is not None:
            live.arriving.take(index)

    node = torch.autograd.graph.get_gradient_edge(param).node  # which adds to .grad
    node.register_prehook(coming)
    param.register_post_accumulate_grad_hook(arrived)
    engine.hold_accumulator(node)


def _before_forward(engine: Engine, module: nn.Module, args: Any) -> None:
    if in_backward():  # a recomputation
        engine.enter_backward()
        return
    engine.before_forward()
    if engine.resolved.settings.buffers == "rank0" and module.training:
        with torch.no_grad():
            engine.everyone.broadcast([held(b) for b in module.buffers()], Label("buffers", "the model"))


def _after_forward(engine: Engine, module: nn.Module, args: Any, output: Any) -> None:
    if torch.is_grad_enabled():
        for tensor in tensors_in(output):
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda _: engine.enter_backward())


def _guarded_apply(engine: Engine, apply: Callable[..., nn.Module], fn: Any, recurse: bool = True) -> nn.Module:
    """`.to()`, `.half()`, `.cuda()` arrive here: what would move or cast a parameter raises before it happens."""
    for unit in engine.units:
        sample = torch.empty(0, dtype=unit.flat_params.whole.dtype, device=unit.flat_params.whole.device)
        result = fn(sample)
        if result.dtype != sample.dtype or result.device != sample.device:
            raise StateError(
                f"a sharded model's parameters are views of flat buffers and cannot become {result.dtype} on "
                f"{result.device} (they are {sample.dtype} on {sample.device}); call .to(), .half() or .cuda() before "
                f"onefold.shard()"
            )
    return apply(fn, recurse)


def _zero_grad(engine: Engine, zero_grad: Callable[..., None], set_to_none: bool = True) -> None:
    engine.drop_gradients(keep_as_zeros=not set_to_none)
    if set_to_none:
        zero_grad(set_to_none=True)  # parameters that are not ours, if any
