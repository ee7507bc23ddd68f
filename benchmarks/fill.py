"""First values: the same for every system, whatever wraps the model, made on the device and one module at a time.

A parameter's numbers are drawn from a seed of its own, its name, so that it does not matter who is filled first, nor
where the parameter lies. A DTensor gets this rank's rows of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def filler(model: nn.Module, maker: torch.device) -> Callable[[nn.Module], None]:
    """A function that fills the parameters a module of this model has itself. Numbers are drawn on `maker`."""
    names = {module: name for name, module in model.named_modules()}

    @torch.no_grad()
    def fill(module: nn.Module) -> None:
        for name, param in module.named_parameters(recurse=False):
            put(param, drawn(f"{names[module]}.{name}", module, param, maker))

    return fill


def drawn(name: str, module: nn.Module, param: Tensor, maker: torch.device) -> Tensor:
    if param.ndim > 1:
        generator = torch.Generator(maker).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(param.shape, device=maker).normal_(std=0.02, generator=generator)
    scale = isinstance(module, nn.LayerNorm | nn.RMSNorm) and name.endswith("weight")
    return torch.full(param.shape, float(scale), device=maker)


def put(param: Any, values: Tensor) -> None:
    if hasattr(param, "to_local"):  # a DTensor, whose import takes a second that most systems need not spend
        mine: Tensor = param.to_local()
        if mine.numel():
            rows = values.chunk(param.device_mesh.size())  # as fully_shard cuts
            mine.copy_(rows[param.device_mesh.get_local_rank()])
    else:
        param.copy_(values)


def real(model: nn.Module, *, on: torch.device, maker: torch.device) -> nn.Module:
    """Give a model that has no memory yet its memory and its values."""
    model.to_empty(device=on)
    fill = filler(model, maker)
    for module in model.modules():
        fill(module)
    return model
