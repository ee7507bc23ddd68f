"""The settings of `shard`, as one frozen dataclass: parsed and validated once, never changed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from onefold.errors import ConfigError
from onefold.placement import STAGES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

Units: TypeAlias = "type[Module] | tuple[type[Module], ...] | Callable[[str, Module], bool] | None"

BUFFERS = ("local", "rank0")
SYNC = ("rank0", "check")
REDUCE = ("once", "each")


@dataclass(frozen=True, kw_only=True)
class Zero:
    """How a model's training state is spread over ranks.

    >>> Zero(stage=1, bucket_bytes=8 << 20).stage
    1
    """

    stage: int = 2
    """0: everything whole on every rank. 1: optimizer state sharded. 2: gradients sharded too."""

    bucket_bytes: int = 32 << 20
    """Largest flat unit, in bytes of parameters; a parameter larger than this is a unit of its own."""

    units: Units = None
    """Which modules are blocks: classes, or a callable (name, module) -> bool. None finds repeated blocks."""

    buffers: str = "local"
    """Module buffers (BatchNorm): "local" to each rank, or "rank0" broadcast before every training forward."""

    sync: str = "rank0"
    """At shard time: "rank0" broadcasts rank 0's values to all, "check" compares them and raises."""

    mesh: DeviceMesh | None = None
    """A one-dimensional DeviceMesh whose ranks share the state; None is all ranks."""

    timeout_s: float = 600.0
    """How long one collective may wait for its peers before it raises, naming them."""

    def __post_init__(self) -> None:
        if isinstance(self.stage, bool) or self.stage not in STAGES:
            raise ConfigError(f"stage={self.stage!r} is unknown; use one of {', '.join(map(str, STAGES))}")
        if isinstance(self.bucket_bytes, bool) or not isinstance(self.bucket_bytes, int) or self.bucket_bytes <= 0:
            raise ConfigError(f"bucket_bytes={self.bucket_bytes!r} is not a positive number of bytes; try 32 << 20")
        _one_of("buffers", self.buffers, BUFFERS)
        _one_of("sync", self.sync, SYNC)
        if not isinstance(self.timeout_s, int | float) or not math.isfinite(self.timeout_s) or self.timeout_s <= 0:
            raise ConfigError(f"timeout_s={self.timeout_s!r} is not a positive number of seconds; try 600")
        if not (self.units is None or callable(self.units) or isinstance(self.units, tuple)):
            raise ConfigError(f"units={self.units!r} is neither a module class, a tuple of them, nor a callable")
        if isinstance(self.units, tuple) and not all(isinstance(u, type) for u in self.units):
            raise ConfigError(f"units={self.units!r} holds something that is not a module class")

    @classmethod
    def of(cls, zero: Zero | None, fields: dict[str, Any]) -> Zero:
        """One object from `shard(model, zero)` or `shard(model, **fields)`."""
        if zero is not None and not isinstance(zero, Zero):
            raise ConfigError(f"shard() takes a Zero object or keywords, found {type(zero).__name__}: {zero!r}")
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(fields) - known):
            raise ConfigError(f"unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return dataclasses.replace(zero or cls(), **fields)

    def describe(self) -> list[str]:
        """One line per setting that all ranks must share (groups and callables are compared by their effect)."""
        return [f"{name}={getattr(self, name)!r}" for name in ("stage", "bucket_bytes", "buffers", "sync")]


def check_reduce(reduce: str | None) -> None:
    if reduce is not None:
        _one_of("reduce", reduce, REDUCE)


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, choices))}")
