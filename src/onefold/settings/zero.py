"""The settings of `shard`, as one frozen dataclass: parsed and validated once, never changed."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module

from onefold.errors import ConfigError
from onefold.settings.offload import Offload
from onefold.settings.placement import STAGES
from onefold.settings.precision import Precision
from onefold.settings.values import ACTIVATIONS, SHARED_BYTES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Source: TypeAlias = "Callable[[Module], None] | Mapping[str, Tensor] | str | Path | None"
Units: TypeAlias = "type[Module] | tuple[type[Module], ...] | Callable[[str, Module], bool] | None"

BUFFERS = ("local", "rank0")
SYNC = ("rank0", "check")
REDUCE = ("once", "each")
SCHEDULES = ("agreed", "negotiate")
AUTO = "auto"
LONGEST_S = 30 * 24 * 3600


@dataclass(frozen=True, kw_only=True)
class Zero:
    """The settings of `shard`: which training state is sharded, over which ranks, and where it is kept.

    Frozen, and validated when it is made. `shard` takes one such object, or its fields as keywords.

    >>> import onefold
    >>> onefold.Zero(stage=1, bucket_bytes=8 << 20).stage
    1
    """

    stage: int | Literal["auto"] = 2
    """0: everything is replicated on every rank. 1: the optimizer state is sharded. 2: the gradients too. 3: the
    parameters too. "auto": the first of 1, 2 and 3 whose states leave room for activations on the smallest device;
    `placement` says which it was, and why."""

    precision: str | Precision = "fp32"
    """"fp32"; "bf16": forward and backward run in 16 bits, and the optimizer updates an fp32 master copy; "fp16": as
    bf16, with a loss scale; or a `Precision`."""

    bucket_bytes: int = 128 << 20
    """The largest unit, in bytes of parameters. A parameter larger than this is a unit of its own; smaller parameters
    of a block share units, and so do neighbouring blocks, and parameters outside blocks, of at most 32 MiB."""

    prefetch: int | Literal["auto"] = 1
    """Stage 3: how many units are all-gathered ahead of their use, in forward and in backward. "auto" (on a CPU) times
    the first passes and then chooses."""

    live_bytes: int | None = None
    """Stage 3 with prefetch="auto": the most bytes of unsharded parameters that prefetching may hold. Neighbouring
    blocks share a unit only up to half of it."""

    reshard_after_forward: bool = True
    """Stage 3: whether units are resharded after forward and all-gathered again in backward. False keeps all of them
    unsharded until their gradients are complete: a third less traffic, for the memory of stage 2 in between."""

    overlap_param_gather: bool = False
    """Stages 1 and 2: the all-gathers of updated parameters overlap the next forward, in which each block waits for its
    own. Parameters can then be used in forward and backward only, as at stage 3: elsewhere inside full_parameters."""

    schedule: Literal["agreed", "negotiate"] = "agreed"
    """Stage 3: how ranks match their all-gathers. "agreed": all ranks run equally many forwards, and each gathers the
    same units, in any order. "negotiate" (gloo only): each rank runs as many forwards as it likes before a backward or
    `catch_up`, because ranks tell each other which units they need."""

    keep_whole: int | Callable[[str, int], bool] = 0
    """Stage 3: the parameters of units of at most this many elements stay replicated, as at stage 2; or a callable
    (unit name, elements) -> bool that says which."""

    units: Units = None
    """Which modules are blocks, whose parameters become units of their own: a module class, a tuple of classes, or a
    callable (name, module) -> bool. None finds the blocks that a model repeats, and small neighbours share units."""

    methods: tuple[str, ...] = ()
    """Other methods of the model that compute with its parameters, such as "encode_image". They get what forward gets:
    stage 3 unshards parameters, and 16 bits cast inputs. Hugging Face's get_…_features are found by themselves."""

    activations: str = "keep"
    """What a block keeps from forward for backward. "keep": all its activations. "checkpoint": its input, from which
    backward computes the block again. "partition": 1/N of its input on each of the N ranks of the mesh axis "tp" (P_a).
    "checkpoint+host" and "partition+host" keep those inputs in host memory. "auto" decides when the first block runs;
    `placement` says what, and why."""

    checkpoint_every: int = 1
    """With activation checkpointing: only every n-th block is computed again, and the others keep their activations."""

    compile: bool | Mapping[str, Any] = False
    """True: torch.compile compiles each block by itself, and equal blocks share a graph. A mapping of torch.compile's
    options does so too: {"dynamic": False}. Blocks that you have compiled stay as they are."""

    init: Source = None
    """What fills a model that was built on the meta device: a function of each module, a state dict, or the path of a
    .safetensors file. None calls each module's own reset_parameters."""

    seed: int = 0
    """The seed with which a model built on the meta device is filled: the same seed gives the same parameters at every
    number of ranks and every stage."""

    device: str | None = None
    """The device on which the model trains: a model that is elsewhere is moved, one on the meta device becomes real
    there. None: where the model is; for a model on the meta device this rank's GPU, or the CPU."""

    buffers: Literal["local", "rank0"] = "local"
    """Module buffers, such as the running statistics of BatchNorm. "local": each rank keeps its own. "rank0": rank 0's
    are broadcast before every training forward."""

    sync: Literal["rank0", "check"] = "rank0"
    """What `shard` does with parameters that may differ between ranks. "rank0": broadcasts rank 0's to all. "check":
    compares them, and raises where they differ."""

    offload: str | Offload | None = None
    """Which training state is kept in host memory or on disk instead of the device: "host" or "auto" for the optimizer
    state, or an `Offload`."""

    mesh: DeviceMesh | None = None
    """The ranks that share the training state, as a torch DeviceMesh: one axis, or several named "replica", "shard",
    "sequence", "tp" and "pp". State is sharded along "shard" and "sequence" together, and replicated along "replica";
    sequences are cut along "sequence", tensors split along "tp", layers along "pp". None: all ranks."""

    timeout_s: float = 600.0
    """Seconds that one message may wait for its peers before a `CommError` names them."""

    def __post_init__(self) -> None:
        if self.stage != "auto" and (type(self.stage) is not int or self.stage not in STAGES):
            raise ConfigError(f"stage={self.stage!r} is unknown; use one of {', '.join(map(str, STAGES))} or 'auto'")
        Precision.of(self.precision)
        if isinstance(self.bucket_bytes, bool) or not isinstance(self.bucket_bytes, int) or self.bucket_bytes <= 0:
            raise ConfigError(f"bucket_bytes={self.bucket_bytes!r} is not a positive number of bytes; try 128 << 20")
        if self.prefetch != "auto" and (type(self.prefetch) is not int or self.prefetch < 0):
            raise ConfigError(f"prefetch={self.prefetch!r} is not a number of units; use 0, 1, 2 … or 'auto'")
        if self.live_bytes is not None and (type(self.live_bytes) is not int or self.live_bytes <= 0):
            raise ConfigError(f"live_bytes={self.live_bytes!r} is not a positive number of bytes")
        if self.live_bytes is not None and self.prefetch != "auto":
            raise ConfigError(
                "live_bytes bounds prefetch='auto'; with a fixed prefetch the memory is known: leave it out"
            )
        if not isinstance(self.reshard_after_forward, bool):
            raise ConfigError(f"reshard_after_forward={self.reshard_after_forward!r} is neither True nor False")
        if not self.reshard_after_forward and (self.live_bytes is not None or self.schedule == "negotiate"):
            other = "live_bytes" if self.live_bytes is not None else 'schedule="negotiate"'
            raise ConfigError(
                f"reshard_after_forward=False keeps all parameters unsharded until backward, which {other} forbids; "
                f"leave out one of them"
            )
        if not isinstance(self.overlap_param_gather, bool):
            raise ConfigError(f"overlap_param_gather={self.overlap_param_gather!r} is neither True nor False")
        if self.overlap_param_gather and (self.stage not in (1, 2) or Offload.of(self.offload).optimizer is not None):
            found = f"stage={self.stage!r}" if self.stage not in (1, 2) else f"offload={self.offload!r}"
            raise ConfigError(
                f"overlap_param_gather=True is for stages 1 and 2 with the optimizer state on the device, found "
                f"{found}; leave it out"
            )
        if not callable(self.keep_whole) and (not isinstance(self.keep_whole, int) or self.keep_whole < 0):
            raise ConfigError(f"keep_whole={self.keep_whole!r} is neither a number of elements nor a callable")
        if not isinstance(self.methods, tuple) or not all(isinstance(name, str) for name in self.methods):
            raise ConfigError(f'methods={self.methods!r} is not a tuple of names; use methods=("encode_image",)')
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("activations", self.activations, (*ACTIVATIONS, AUTO))
        if type(self.checkpoint_every) is not int or self.checkpoint_every < 1:
            raise ConfigError(f"checkpoint_every={self.checkpoint_every!r} is not a number of blocks; use 1, 2, 3 …")
        if self.checkpoint_every > 1 and self.activations == "keep":
            raise ConfigError(
                f"checkpoint_every={self.checkpoint_every} says which blocks to compute again, and activations='keep' "
                f"has none; set activations='checkpoint', or leave it out"
            )
        _check_compile(self.compile)
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

    @property
    def shared_bytes(self) -> int:
        """Neighbouring blocks share a unit up to so many bytes: never where the caller names units or blocks."""
        if self.units is not None or callable(self.keep_whole):
            return 0
        most = min(self.bucket_bytes, SHARED_BYTES)
        return most if self.live_bytes is None else min(most, self.live_bytes // 2)

    @property
    def compile_options(self) -> Mapping[str, Any] | None:
        """What torch.compile is given for each block; None if blocks are not compiled."""
        return self.compile if isinstance(self.compile, Mapping) else {} if self.compile else None

    def describe(self) -> list[str]:
        """One line per setting that all ranks must share (groups and callables are compared by their effect)."""
        shared = (
            "stage", "bucket_bytes", "prefetch", "reshard_after_forward", "overlap_param_gather", "schedule", "methods",
            "activations", "checkpoint_every", "seed", "buffers", "sync",
        )  # fmt: skip
        return (
            [f"precision: {' '.join(str(Precision.of(self.precision)).split())}"]
            + [f"{name}={getattr(self, name)!r}" for name in shared]
            + [f"compile: {_named(self.compile_options)}", str(Offload.of(self.offload))]
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
    """The `Zero` settings of one of the ZeRO paper's configurations, "C1" to "C5"; `fields` set or override others.

    >>> import onefold
    >>> onefold.preset("C4", precision="bf16").activations
    'partition'
    """
    if name not in PRESETS:
        raise ConfigError(f"preset {name!r} is unknown; use one of {', '.join(PRESETS)}")
    return Zero.of(None, {**PRESETS[name], **fields})


def _check_compile(chosen: object) -> None:
    known = sorted(set(inspect.signature(torch.compile).parameters) - {"model", "disable"})
    if not isinstance(chosen, bool | Mapping):
        raise ConfigError(
            f"compile={chosen!r} is neither True, False nor a mapping of torch.compile's options; use compile=True, or "
            f'compile={{"backend": …}}'
        )
    if unknown := [name for name in chosen if name not in known] if isinstance(chosen, Mapping) else []:
        raise ConfigError(
            f"compile= has {', '.join(map(repr, unknown))}, no option of torch.compile; known are {', '.join(known)}"
        )


def _named(options: Mapping[str, Any] | None) -> str:
    """Options with functions by their names, which are the same on all ranks."""
    if options is None:
        return "no"
    values = {k: getattr(v, "__name__", type(v).__name__) if callable(v) else v for k, v in options.items()}
    return str(dict(sorted(values.items())))


def _one_of(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(map(repr, choices))}")
