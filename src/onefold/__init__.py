"""Onefold: every byte of training state stored once across the cluster."""

from onefold.config import Zero
from onefold.errors import (
    CommError,
    ConfigError,
    MismatchError,
    ModelError,
    OnefoldError,
    OptimizerError,
    PrecisionError,
    StateError,
)
from onefold.full import full_parameters, full_state_dict
from onefold.mesh import init
from onefold.optimizer import Optimizer
from onefold.planner.plan import Plan, plan
from onefold.precision import Precision
from onefold.report import MemoryReport, PlacementReport, TrafficReport, memory, placement, track_memory, traffic
from onefold.scaling import LossScale
from onefold.scheduler import Scheduler
from onefold.shard import accumulate, catch_up, shard

__version__ = "0.1.0"

__all__ = [
    "CommError",
    "ConfigError",
    "LossScale",
    "MemoryReport",
    "MismatchError",
    "ModelError",
    "OnefoldError",
    "Optimizer",
    "OptimizerError",
    "PlacementReport",
    "Plan",
    "Precision",
    "PrecisionError",
    "Scheduler",
    "StateError",
    "TrafficReport",
    "Zero",
    "accumulate",
    "catch_up",
    "full_parameters",
    "full_state_dict",
    "init",
    "memory",
    "placement",
    "plan",
    "shard",
    "track_memory",
    "traffic",
]
