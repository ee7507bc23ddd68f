"""The settings of `shard`, as one frozen dataclass: parsed and validated once, never changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor
from torch.nn import Module

from onefold.errors import ConfigError
from onefold.settings.offload import Offload
from onefold.settings.placement import STAGES
from onefold.settings.precision import Precision

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Source: TypeAlias = "Callable[[Module], None] | Mapping[str, Tensor] | str | Path | None"
Units: TypeAlias = "type[Module] | tuple[type[Module], ...] | Callable[[str, Module], bool] | None"

BUFFERS = ("local", "rank0")
SYNC = ("rank0", "check")
REDUCE = ("once", "each")
SCHEDULES = ("agreed", "negotiate")
ACTIVATIONS = ("keep", "checkpoint", "checkpoint+host", "partition", "partition+host")
AUTO = "auto"
LONGEST_S = 30 * 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Zero:
    """How a model's training state is spread over ranks.

    >>> Zero(stage=1, bucket_bytes=8 << 20).stage
    1
    """

    stage: int | Literal["auto"] = 2
    """0: all whole on every rank. 1: optimizer state sharded. 2: gradients too. 3: parameters too. "auto": the first of
    1, 2 and 3 whose states leave room for activations on the smallest device; placement() says which, and why."""

    precision: str | Precision = "fp32"
    """"fp32", "bf16" (16 bits compute, an fp32 master is updated), "fp16" (with a loss scale), or a Precision."""

    bucket_bytes: int = 32 << 20
    """Largest flat unit, in bytes of parameters; a parameter larger than this is a unit of its own."""

    prefetch: int | Literal["auto"] = 1
    """Stage 3: how many units are gathered ahead of need, in forward and in backward; "auto" measures (on CPU)."""

    live_bytes: int | None = None
    """Stage 3, prefetch="auto": the most bytes of whole parameters that look-ahead may keep alive."""

    schedule: Literal["agreed", "negotiate"] = "agreed"
    """Stage 3: "agreed" ranks run equally many forwards, each gathering the same units in any order; "negotiate" (gloo)
    lets each run as many forwards as it likes before a backward or `catch_up`: they tell each other what they need."""

    keep_whole: int | Callable[[str, int], bool] = 0
    """Stage 3: units of at most so many elements stay whole; or a callable (unit name, elements) -> bool."""

    units: Units = None
    """Which modules are blocks: classes, or a callable (name, module) -> bool. None finds repeated blocks."""

    activations: str = "keep"
    """What a block leaves for backward. "keep": all its activations. "checkpoint": its input, from which it is computed
    again. "partition": 1/N of its input on each of the N ranks of the mesh axis "tp" (P_a). "checkpoint+host" and
    "partition+host" move those to host memory. "auto" decides when the first block runs; placement() says why."""

    checkpoint_every: int = 1
    """Compute every so manieth block again; the others keep their activations."""

    init: Source = None
    """A model on the meta device: what fills it. A function of each module, a state dict, or a .safetensors file; None
    is each module's own reset_parameters."""

    seed: int = 0
    """For filling a model on the meta device: the same seed gives the same values at every N and stage."""

    device: str | None = None
    """Where a model on the meta device becomes real; None is this rank's GPU, or the CPU."""

    buffers: Literal["local", "rank0"] = "local"
    """Module buffers (BatchNorm): "local" to each rank, or "rank0" broadcast before every training forward."""

    sync: Literal["rank0", "check"] = "rank0"
    """At shard time: "rank0" broadcasts rank 0's values to all, "check" compares them and raises."""

    offload: str | Offload | None = None
    """Where states lie that are not on the device: an Offload, or "host" or "auto" for the optimizer's."""

    mesh: DeviceMesh | None = None
    """A DeviceMesh whose ranks share the state: one axis, or several named "replica", "shard", "tp" and "pp" (sharded
    inside "shard", the same on every "replica", other parts along "tp" and "pp"); None is all ranks."""

    timeout_s: float = 600.0
    """How long one collective may wait for its peers before it raises, naming them."""

    def __post_init__(self) -> None:
        if self.stage != "auto" and (type(self.stage) is not int or self.stage not in STAGES):
            raise ConfigError(f"stage={self.stage!r} is unknown; use one of {', '.join(map(str, STAGES))} or 'auto'")
        Precision.of(self.precision)
        if isinstance(self.bucket_bytes, bool) or not isinstance(self.bucket_bytes, int) or self.bucket_bytes <= 0:
            raise ConfigError(f"bucket_bytes={self.bucket_bytes!r} is not a positive number of bytes; try 32 << 20")
        if self.prefetch != "auto" and (type(self.prefetch) is not int or self.prefetch < 0):
            raise ConfigError(f"prefetch={self.prefetch!r} is not a number of units; use 0, 1, 2 … or 'auto'")
        if self.live_bytes is not None and (type(self.live_bytes) is not int or self.live_bytes <= 0):
            raise ConfigError(f"live_bytes={self.live_bytes!r} is not a positive number of bytes")
        if self.live_bytes is not None and self.prefetch != "auto":
            raise ConfigError(
                "live_bytes bounds prefetch='auto'; with a fixed prefetch the memory is known: leave it out"
            )
        if not callable(self.keep_whole) and (not isinstance(self.keep_whole, int) or self.keep_whole < 0):
            raise ConfigError(f"keep_whole={self.keep_whole!r} is neither a number of elements nor a callable")
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("activations", self.activations, (*ACTIVATIONS, AUTO))
        if type(self.checkpoint_every) is not int or self.checkpoint_every < 1:
            raise ConfigError(f"checkpoint_every={self.checkpoint_every!r} is not a number of blocks; use 1, 2, 3 …")
        if self.checkpoint_every > 1 and self.activations == "keep":
            raise ConfigError(
                f"checkpoint_every={self.checkpoint_every} says which blocks to compute again, and activations='keep' "
                f"has none; set activations='checkpoint', or leave it out"
            )
        Offload.of(self.offload).check_stage(self.stage)
        _one_of("buffers", self.buffers, BUFFERS)
        _one_of("sync", self.sync, SYNC)
        if type(self.timeout_s) not in (int, float) or not 0 < self.timeout_s <= LONGEST_S:
            raise ConfigError(f"timeout_s={self.timeout_s!r} is not a number of seconds up to {LONGEST_S}; try 600")
        if not (self.init is None or callable(self.init) or isinstance(self.init, Mapping | str | Path)):
            raise ConfigError(
                f"init={self.init!r} is neither a function, a state dict nor the path of a safetensors file"
            )
        classes = self.units if isinstance(self.units, tuple) else (self.units,)
        by_class = all(isinstance(unit, type) and issubclass(unit, Module) for unit in classes)
        by_call = callable(self.units) and not isinstance(self.units, type | Module)
        if not (self.units is None or by_class or by_call):
            raise ConfigError(
                f"units={self.units!r} is neither a module class, nor a tuple of them, nor a callable "
                f"(name, module) -> bool"
            )

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
        shared = ("stage", "bucket_bytes", "prefetch", "schedule", "activations", "checkpoint_every")
        return (
            [f"precision: {' '.join(str(Precision.of(self.precision)).split())}"]
            + [f"{name}={getattr(self, name)!r}" for name in (*shared, "seed", "buffers", "sync")]
            + [str(Offload.of(self.offload))]
        )


# The ZeRO paper's five configurations. Constant buffers (C_B) and arenas for block inputs (M_D) belong to all of them.
PRESETS: dict[str, dict[str, Any]] = {
    "C1": {"stage": 1, "activations": "checkpoint"},
    "C2": {"stage": 1, "activations": "partition"},
    "C3": {"stage": 2, "activations": "checkpoint"},
    "C4": {"stage": 2, "activations": "partition"},
    "C5": {"stage": 2, "activations": "partition+host"},
}


def preset(name: str, **fields: Any) -> Zero:
    """A configuration of the ZeRO paper by its name, C1 to C5, with other fields beside it.

    >>> preset("C4", precision="bf16").activations
    'partition'
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; use one of {', '.join(PRESETS)}")
    return Zero.of(None, {**PRESETS[name], **fields})


def check_reduce(reduce: str | None) -> None:
    if reduce is not None:
        _one_of("reduce", reduce, REDUCE)


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, choices))}")
