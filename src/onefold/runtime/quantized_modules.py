"""Modules with 4-bit weights of bitsandbytes in a sharded model: their state dict, their .to(), and how they run on a
CPU."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from onefold.errors import StateError
from onefold.model.quantized import constants, is_4bit
from onefold.runtime.engine import Engine

PACKS_FOR_CPU = "support_avx512bf16_for_cpu"  # of Linear4bit in bitsandbytes 0.50


def attach_quantized(engine: Engine) -> None:
    """Hooks on modules whose constants Onefold has made parameters. Where a CPU has the instructions, an evaluation of
    bitsandbytes would pack weights anew, in memory of their own; here it computes as training does."""
    found: dict[nn.Module, list[str]] = {}
    for one in constants(engine.model):
        found.setdefault(one.module, []).append(one.name)
    for module, names in found.items():
        engine.attachments.hook(module.register_state_dict_post_hook(partial(_as_the_library_saves, names)))
        if getattr(module, PACKS_FOR_CPU, False):
            engine.attachments.attribute(module, PACKS_FOR_CPU, False)
    for param in filter(is_4bit, engine.model.parameters()):
        param.__dict__["to"] = InPlace(param)
        engine.attachments.change(partial(param.__dict__.pop, "to", None))


class InPlace:
    """Params4bit.to() of one weight, which gives a new parameter even where it moves nothing; PEFT's DoRA on a CPU
    assigns that to the module in every forward. This one gives the weight itself."""

    def __init__(self, param: nn.Parameter) -> None:
        self._param = weakref.ref(param)

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Parameter:
        param = self._param()
        assert param is not None
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        like = torch.empty(0, dtype=dtype or param.dtype, device=device or param.device)
        if (like.dtype, like.device) != (param.dtype, param.device):
            raise StateError(
                f"a 4-bit weight of a sharded model cannot become {like.dtype} on {like.device} (it is {param.dtype} "
                f"on {param.device}); call .to() before onefold.shard(), or after onefold.unshard(model)"
            )
        return param


def _as_the_library_saves(names: list[str], module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Leaves the constants in a state dict under the names that bitsandbytes gives them (weight.absmax, …), once, and
    in memory of their own, since flat buffers lose theirs when full_parameters ends."""
    for name in names:
        state.pop(prefix + name, None)
    for name in module._parameters:
        for key in [key for key in state if key.startswith(f"{prefix}{name}.")]:
            if isinstance(state[key], Tensor):
                state[key] = state[key].detach().clone()
