"""shard() of the module that a strategy of Lightning is given."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from onefold import ConfigError, shard, unshard
from onefold.lightning.precisions import Settings
from onefold.model.survey import ATTRIBUTE

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def sharded(module: ModuleT, settings: Settings, device: torch.device) -> ModuleT:
    """Shards a module on the device that Lightning has chosen. One that was sharded before, by another strategy or by
    its user, is sharded anew with these settings. Collective."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"accelerator {device.type!r} found; Onefold trains on 'cpu' and 'cuda'")
    if ATTRIBUTE in vars(module):
        unshard(module)
    return shard(module, replace(settings.zero, device=settings.zero.device or str(device)))
