"""All ranks were asked for the same and hold the same model, or parts of one; else every rank raises."""

from __future__ import annotations

from types import MappingProxyType

from torch import nn

from onefold.comm.agreement import AGREE, agree, together
from onefold.comm.communicator import Comms
from onefold.errors import ConfigError
from onefold.model.dtensor_shards import TensorShards, agree_on_tensor_shards
from onefold.model.survey import Survey
from onefold.settings.offload import Offload
from onefold.settings.zero import Zero


def agree_on_model(comms: Comms, model: nn.Module, found: Survey) -> TensorShards:
    """Ranks of equal "tp" and "pp" coordinates hold the same parameters, those of "tp" parts of them; all have the same
    settings, and the mesh can serve these. Raises the survey's mistake, or another rank's. What is split over "tp".
    Collective."""
    tensor_shards = _agree(comms, model, found)
    _check_mesh(found.settings, comms)
    return tensor_shards


def _agree(comms: Comms, model: nn.Module, found: Survey) -> TensorShards:
    everyone, tp, world = comms.everyone, comms.tp, comms.world
    if everyone is world:
        agree(everyone, found.lines, found.mistake)
        return MappingProxyType({})
    agree(world, found.settings.describe() if found.mistake is None else [], found.mistake)
    named = sorted(model.named_parameters(), key=lambda pair: pair[0])
    together(comms, lambda: agree(everyone, found.lines))
    return together(
        comms,
        lambda: agree_on_tensor_shards(
            lambda row: tp.exchange(row, AGREE), tp.rank, named, simulated=tp.simulated and tp.size > 1
        ),
    )


def _check_mesh(settings: Zero, comms: Comms) -> None:
    """What some settings need of backends and axes. The same on all ranks."""
    if settings.schedule == "negotiate" and not comms.shard.any_order:
        raise ConfigError('schedule="negotiate" needs gloo on CPU; on GPUs use full_parameters around uneven forwards')
    if Offload.of(settings.offload).optimizer is not None and comms.pp.size > 1:
        raise ConfigError("offload does not go with a mesh axis 'pp' yet; leave one of them out")
