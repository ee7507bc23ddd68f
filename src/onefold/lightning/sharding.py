"""shard() of the module that a strategy of Lightning is given."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from onefold import ConfigError, shard, unshard
from onefold.lightning.precisions import Settings
from onefold.runtime.engine import engine_of, is_sharded

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def stage_of(module: nn.Module) -> int:
    """The stage of a sharded module, also where it was chosen by stage="auto"."""
    stage = engine_of(module).resolved.settings.stage
    assert isinstance(stage, int)
    return stage


def sharded(module: ModuleT, settings: Settings, device: torch.device) -> ModuleT:
    """Shards a module on the device that Lightning has chosen. One that was sharded before, by another strategy or by
    its user, is sharded anew with these settings. Collective."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"accelerator {device.type!r} found; Onefold trains on 'cpu' and 'cuda'")
    if is_sharded(module):
        unshard(module)
    return shard(module, replace(settings.zero, device=settings.zero.device or str(device)))
