"""Ties an engine to the forward and backward of its model.

Forward of the root: parameters are checked, buffers brought in line, and the outputs get a hook that opens backward.
Backward: each parameter's gradient goes to its unit as soon as autograd has made it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.comm import Label
from onefold.engine import ATTRIBUTE, Engine
from onefold.errors import StateError


def attach(engine: Engine) -> None:
    model = engine.model
    for unit_index, unit in enumerate(engine.units):
        for slot_index, param in enumerate(unit.params):
            param.register_post_accumulate_grad_hook(_arrival(engine, unit_index, slot_index))
    model.register_forward_pre_hook(partial(_before_forward, engine), prepend=True)
    model.register_forward_hook(partial(_after_forward, engine))
    model.__dict__[ATTRIBUTE] = engine
    model.__dict__["__deepcopy__"] = engine.refuse_copy
    model.__dict__["_apply"] = partial(_guarded_apply, engine, model._apply)
    model.__dict__["zero_grad"] = partial(_zero_grad, engine, model.zero_grad)


def _arrival(engine: Engine, unit_index: int, slot_index: int) -> Callable[[Tensor], None]:
    def arrived(_: Tensor) -> None:
        engine.gradient_arrived(unit_index, slot_index)

    return arrived


def _before_forward(engine: Engine, module: nn.Module, args: Any) -> None:
    if torch._C._current_graph_task_id() != -1:  # a recomputation inside backward
        return
    engine.tidy_after_error()
    if torch.is_grad_enabled():
        engine.check_parameters()
    if engine.zero.buffers == "rank0" and module.training:
        with torch.no_grad():
            engine.comm.broadcast(list(module.buffers()), Label("buffers", "the model"))


def _after_forward(engine: Engine, module: nn.Module, args: Any, output: Any) -> None:
    if torch.is_grad_enabled():
        for tensor in _tensors(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: engine.open_backward())


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        for f in dataclasses.fields(output):
            yield from _tensors(getattr(output, f.name))


def _guarded_apply(engine: Engine, apply: Callable[..., nn.Module], fn: Any, recurse: bool = True) -> nn.Module:
    """`.to()`, `.half()`, `.cuda()` arrive here: what would move or cast a parameter raises before it happens."""
    for unit in engine.units:
        sample = torch.empty(0, dtype=unit.whole.dtype, device=unit.whole.device)
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
