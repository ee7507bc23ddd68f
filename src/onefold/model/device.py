"""On which device a model trains: where it is, where it is asked to be, or where a model on meta becomes real."""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import Any

import torch
from torch import nn

from onefold.comm.communicator import Comm
from onefold.comm.mesh import Axes
from onefold.errors import ConfigError
from onefold.model.quantized import is_4bit

LOG = logging.getLogger("onefold")


def device_of(model: nn.Module, wanted: Any, axes: Axes) -> torch.device:
    """Where the model will train: on the `wanted` device, else where it is; a model on the meta device on this rank's
    GPU, if NCCL serves it. Mistakes in model and `wanted` are found later, by the survey."""
    asked = _usable(wanted)
    if asked is not None:
        return asked
    if isinstance(model, nn.Module):
        for param in model.parameters():
            if param.device.type != "meta":
                return param.device
    if torch.cuda.is_available() and axes.shard.backend(torch.device("cuda")) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _usable(wanted: Any) -> torch.device | None:
    """The device that the setting names; None if it names none, or one that is not here."""
    try:
        check_device(wanted)
    except ConfigError:
        return None
    if wanted == "cuda":  # the one that is current
        return torch.device("cuda", torch.cuda.current_device())
    if wanted is None:
        return None
    asked = torch.device(wanted)
    return torch.device("cpu") if asked.type == "cpu" else asked  # cpu:0 is the CPU


def check_device(wanted: Any) -> None:
    """Raises if the setting names no device, or one that is not here."""
    if wanted is None:
        return
    try:
        asked = torch.device(wanted)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={wanted!r} is no device; use 'cpu', 'cuda' or 'cuda:0'") from error
    if asked.type == "meta":
        raise ConfigError("device='meta' has no memory to train in; name the device on which the model becomes real")
    count = torch.cuda.device_count() if asked.type == "cuda" else 1
    if (asked.index or 0) >= count:
        found = f"sees {count} of them" if count else "sees none"
        raise ConfigError(f"device={wanted!r} is a GPU, and torch {found}; leave device out, or give this rank a GPU")


def move(model: nn.Module, device: torch.device, later: Container[str] = ()) -> None:
    """Moves a model that is elsewhere to the device, in place; a model on the meta device is filled there later, and
    the parameters whose names are in `later` are moved one unit at a time, when they are sharded."""
    if any(tensor.device.type != "meta" and tensor.device != device for tensor in model.parameters()):
        waiting = waiting_parameters(model, later)
        if waiting:
            model._apply(lambda tensor: tensor if id(tensor) in waiting or tensor.is_meta else tensor.to(device))
        else:
            model.to(device)


def waiting_parameters(model: nn.Module, later: Container[str]) -> set[int]:
    """Ids of the parameters that move() leaves where they are. Not of 4-bit weights: their own to() also moves codes
    that no parameter holds."""
    named = model.named_parameters()
    return {id(param) for name, param in named if param.is_meta or (name in later and not is_4bit(param))}


def warn_of_idle_gpu(device: torch.device, world: Comm, *, meta: bool) -> None:
    """A model whose parameters are on the CPU trains there, which is seldom meant where there is a GPU. Rank 0 says so;
    where a model on the meta device goes is always meant."""
    if device.type == "cpu" and torch.cuda.is_available() and not (meta or world.simulated or world.rank):
        LOG.warning(
            "the model's parameters are on the CPU, so it trains there, though this process sees a GPU; call "
            "model.cuda() before shard(), or build the model on the meta device; if the CPU is meant, hide the GPU "
            "(CUDA_VISIBLE_DEVICES=)"
        )
