"""Onefold: every byte of training state stored once across the cluster.

A public name is imported when it is first asked for: importing torch takes seconds, and the command line's help, plans
by formula and errors need none of it.
"""

import importlib
from typing import TYPE_CHECKING

from onefold.errors import (
    CheckpointDamaged,
    CheckpointError,
    CommError,
    ConfigError,
    MismatchError,
    ModelError,
    OffloadError,
    OnefoldError,
    OptimizerError,
    PrecisionError,
    StateError,
)
from onefold.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from onefold.activations.tiled import tiled
    from onefold.activations.tiled_loss import tiled_cross_entropy
    from onefold.checkpoint.memory.resilient import Resilient, resilient
    from onefold.checkpoint.protocol.background import finish_saves
    from onefold.checkpoint.protocol.load import load
    from onefold.checkpoint.protocol.save import save
    from onefold.comm.mesh import init, mesh
    from onefold.comm.shutdown import shutdown
    from onefold.integrations.checkpoints.exporting import export
    from onefold.integrations.checkpoints.imported import import_checkpoint
    from onefold.integrations.deepspeed_config import DeepSpeedConfig, from_deepspeed
    from onefold.observe.profiling.profile import profile
    from onefold.observe.profiling.report import ProfileReport
    from onefold.observe.reports import (
        MemoryReport,
        PlacementReport,
        TrafficReport,
        memory,
        placement,
        track_memory,
        traffic,
    )
    from onefold.optim.average import EMA
    from onefold.optim.loss_scale import LossScale
    from onefold.optim.muon import Muon
    from onefold.optim.optimizer import Optimizer
    from onefold.optim.reduced_gradients import grad_norms
    from onefold.optim.replicas import check_replicas
    from onefold.optim.scheduler import Scheduler
    from onefold.optim.spikes import Spikes
    from onefold.parallel.cut_sequence import cut_sequence
    from onefold.parallel.pipeline import PipelineStage
    from onefold.parallel.sequence_attention import sequence_attention
    from onefold.parallel.token_mean import token_mean
    from onefold.planner.answer import Plan
    from onefold.planner.plan import plan
    from onefold.runtime.full_parameters import full_parameters, full_state_dict
    from onefold.runtime.loop import accumulate, catch_up
    from onefold.runtime.masters import shards
    from onefold.runtime.unshard import unshard
    from onefold.settings.offload import Offload
    from onefold.settings.precision import Precision
    from onefold.settings.zero import Zero, preset
    from onefold.sharding import shard
else:
    _NAMES = {  # by module, as above
        "activations.tiled": ("tiled",),
        "activations.tiled_loss": ("tiled_cross_entropy",),
        "checkpoint.memory.resilient": ("Resilient", "resilient"),
        "checkpoint.protocol.background": ("finish_saves",),
        "checkpoint.protocol.load": ("load",),
        "checkpoint.protocol.save": ("save",),
        "comm.mesh": ("init", "mesh"),
        "comm.shutdown": ("shutdown",),
        "integrations.checkpoints.exporting": ("export",),
        "integrations.checkpoints.imported": ("import_checkpoint",),
        "integrations.deepspeed_config": ("DeepSpeedConfig", "from_deepspeed"),
        "observe.profiling.profile": ("profile",),
        "observe.profiling.report": ("ProfileReport",),
        "observe.reports": (
            "MemoryReport", "PlacementReport", "TrafficReport", "memory", "placement", "track_memory", "traffic",
        ),
        "optim.average": ("EMA",),
        "optim.loss_scale": ("LossScale",),
        "optim.muon": ("Muon",),
        "optim.optimizer": ("Optimizer",),
        "optim.reduced_gradients": ("grad_norms",),
        "optim.replicas": ("check_replicas",),
        "optim.scheduler": ("Scheduler",),
        "optim.spikes": ("Spikes",),
        "parallel.cut_sequence": ("cut_sequence",),
        "parallel.pipeline": ("PipelineStage",),
        "parallel.sequence_attention": ("sequence_attention",),
        "parallel.token_mean": ("token_mean",),
        "planner.answer": ("Plan",),
        "planner.plan": ("plan",),
        "runtime.full_parameters": ("full_parameters", "full_state_dict"),
        "runtime.loop": ("accumulate", "catch_up"),
        "runtime.masters": ("shards",),
        "runtime.unshard": ("unshard",),
        "settings.offload": ("Offload",),
        "settings.precision": ("Precision",),
        "settings.zero": ("Zero", "preset"),
        "sharding": ("shard",),
    }  # fmt: skip
    _HOME = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOME})


__all__ = [
    "EMA",
    "CheckpointDamaged",
    "CheckpointError",
    "CommError",
    "ConfigError",
    "DeepSpeedConfig",
    "LossScale",
    "MemoryReport",
    "MismatchError",
    "ModelError",
    "Muon",
    "Offload",
    "OffloadError",
    "OnefoldError",
    "Optimizer",
    "OptimizerError",
    "PipelineStage",
    "PlacementReport",
    "Plan",
    "Precision",
    "PrecisionError",
    "ProfileReport",
    "Resilient",
    "Scheduler",
    "Spikes",
    "StateError",
    "TrafficReport",
    "Zero",
    "accumulate",
    "catch_up",
    "check_replicas",
    "cut_sequence",
    "export",
    "finish_saves",
    "from_deepspeed",
    "full_parameters",
    "full_state_dict",
    "grad_norms",
    "import_checkpoint",
    "init",
    "load",
    "memory",
    "mesh",
    "placement",
    "plan",
    "preset",
    "profile",
    "resilient",
    "save",
    "sequence_attention",
    "shard",
    "shards",
    "shutdown",
    "tiled",
    "tiled_cross_entropy",
    "token_mean",
    "track_memory",
    "traffic",
    "unshard",
]
