"""On which device a model trains: where it is, or where a model on the meta device becomes real."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from onefold.comm.communicator import Comm
from onefold.comm.mesh import Axes

LOG = logging.getLogger("onefold")


def device_of(model: nn.Module, wanted: Any, axes: Axes) -> torch.device:
    """Where the model is, or where a model on the meta device will be: as `wanted`, or on this rank's GPU if NCCL
    serves it. Mistakes in either are found later, by the survey."""
    if isinstance(model, nn.Module):
        for param in model.parameters():
            if param.device.type != "meta":
                return param.device
    if isinstance(wanted, str):
        asked = torch.device(wanted)
        if asked == torch.device("cuda") and torch.cuda.is_available():  # the one that is current
            return torch.device("cuda", torch.cuda.current_device())
        return asked
    if torch.cuda.is_available() and axes.shard.backend(torch.device("cuda")) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def warn_of_idle_gpu(device: torch.device, world: Comm, *, meta: bool) -> None:
    """A model whose parameters are on the CPU trains there, which is seldom meant where there is a GPU. Rank 0 says so;
    where a model on the meta device goes is always meant."""
    if device.type == "cpu" and torch.cuda.is_available() and not (meta or world.simulated or world.rank):
        LOG.warning(
            "the model's parameters are on the CPU, so it trains there, though this process sees a GPU; call "
            "model.cuda() before shard(), or build the model on the meta device; if the CPU is meant, hide the GPU "
            "(CUDA_VISIBLE_DEVICES=)"
        )
