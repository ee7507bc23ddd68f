"""What .to(), .half() and .cuda() do to a sharded model and to its parts: they raise before a parameter would be moved
or cast, since it would leave its flat buffer. An equal device or dtype is no move."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from onefold.errors import StateError
from onefold.runtime.engine import Engine
from onefold.state.guarded_parameters import no_guard


def guard_moves(engine: Engine) -> None:
    """Guards every module of the model that has parameters in units."""
    forms = {id(p): (u.flat_params.dtype, u.flat_params.buffer.device) for u in engine.all_units for p in u.params}
    for module in engine.model.modules():
        found = dict.fromkeys(forms[id(param)] for param in module.parameters() if id(param) in forms)
        if found:
            samples = [torch.empty(0, dtype=dtype, device=device) for dtype, device in found]
            engine.attachments.attribute(module, "_apply", GuardedApply(module, samples))


class GuardedApply:
    """nn.Module._apply of one module, which is behind .to(), .half() and .cuda(). `samples` are like its parameters. A
    deep copy of the module is a plain one, with its class's own."""

    def __init__(self, module: nn.Module, samples: list[Tensor]) -> None:
        self._module, self._apply, self._samples = module, module._apply, samples

    def __call__(self, fn: Any, recurse: bool = True) -> nn.Module:
        if isinstance(fn, partial) and fn.func is _unmoved:  # of a module around this one, which has asked
            return self._apply(fn, recurse)
        for sample in self._samples:
            result = fn(sample)
            if result.dtype != sample.dtype or result.device != sample.device:
                raise StateError(
                    f"a sharded model's parameters are views of flat buffers and cannot become {result.dtype} on "
                    f"{result.device} (they are {sample.dtype} on {sample.device}); call .to(), .half() or .cuda() "
                    f"before onefold.shard()"
                )
        with no_guard():
            return self._apply(partial(_unmoved, fn), recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._module)]
        return MethodType(type(copied)._apply, copied)


def _unmoved(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What `fn` makes of a tensor, or the tensor itself if that is a copy on the same device: torch copies from "cpu"
    to "cpu:0"."""
    found = fn(tensor)
    alike = (found.dtype, found.device, found.shape) == (tensor.dtype, tensor.device, tensor.shape)
    return tensor if alike and (found.stride() == tensor.stride() or 0 in tensor.stride()) else found  # a placeholder
