"""Onefold: every byte of training state stored once across the cluster."""

from typing import TYPE_CHECKING

from onefold.checkpoint.protocol.background import finish_saves
from onefold.checkpoint.protocol.load import load
from onefold.checkpoint.protocol.save import save
from onefold.comm.mesh import init, mesh
from onefold.comm.shutdown import shutdown
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
from onefold.optim.optimizer import Optimizer
from onefold.optim.reduced_gradients import grad_norms
from onefold.optim.scheduler import Scheduler
from onefold.planner.plan import Plan, plan
from onefold.runtime.full_parameters import full_parameters, full_state_dict
from onefold.runtime.loop import accumulate, catch_up
from onefold.runtime.masters import shards
from onefold.runtime.unshard import unshard
from onefold.settings.offload import Offload
from onefold.settings.precision import Precision
from onefold.settings.zero import Zero, preset
from onefold.shard import shard
from onefold.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from onefold.parallel.pipeline import PipelineStage
else:

    def __getattr__(name: str) -> type:
        """PipelineStage when it is asked for: torch's pipelining brings the compiler, half of all imports."""
        if name != "PipelineStage":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from onefold.parallel.pipeline import PipelineStage

        return PipelineStage


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
    "Scheduler",
    "StateError",
    "TrafficReport",
    "Zero",
    "accumulate",
    "catch_up",
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
    "save",
    "shard",
    "shards",
    "shutdown",
    "track_memory",
    "traffic",
    "unshard",
]
