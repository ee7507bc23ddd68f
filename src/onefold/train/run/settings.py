"""Everything a training run can be told, as one tree of frozen dataclasses; what cannot be is refused before it starts.

The command line reads the same tree (every field is a flag), and so does a TOML file (every group is a table).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onefold.cost.activations import check_policy
from onefold.cost.shapes import Shape, named
from onefold.errors import ConfigError
from onefold.settings.offload import Offload
from onefold.settings.precision import DTYPES
from onefold.settings.zero import AUTO, LONGEST_S, REDUCE, Zero
from onefold.train.run.folder import STAGE_FOLDER, STAGES

PRECISIONS = tuple(DTYPES)
BYTES = "bytes"
AXES = ("replica", "shard", "tp")
PROFILE_STEPS = 3  # that are recorded unless told
PROFILE_WARMUP = 2  # steps: the first learns orders, the second has its memory watched


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model: a GPT by name, or by shape."""

    model: str = "gpt-tiny"
    """A GPT by name: gpt-tiny, gpt-small, gpt2, gpt2-1.5b, 8b, 100b … The flags below change parts of it."""

    layers: int | None = None
    """Blocks."""

    hidden: int | None = None
    """Width."""

    heads: int | None = None
    """Attention heads."""

    seq: int | None = None
    """Tokens per sequence."""

    vocab: int | None = None
    """Vocabulary; by default the tokenizer's."""

    def shape(self, vocab: int) -> Shape:
        """With the tokenizer's vocabulary, unless another was asked for that holds it."""
        given = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "seq")}
        if self.vocab is not None and self.vocab < vocab:
            raise ConfigError(
                f"--vocab {self.vocab} is too small: the tokens go up to {vocab - 1}; use {vocab} or more"
            )
        given = {name: size for name, size in given.items() if size is not None}
        return dataclasses.replace(named(self.model), **given, vocab=self.vocab or vocab)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The data."""

    data: Path | None = None
    """A text file, a folder of them, or a token file (.bin, .npy); by default the Python standard library's sources."""

    tokenizer: str = BYTES
    """How text becomes tokens: "bytes", or the path of a Hugging Face tokenizers file (tokenizer.json)."""

    val_fraction: float = 0.05
    """The part of the data that is kept for validation."""

    cache: Path | None = None
    """Where tokenised text is kept; by default onefold/ in $XDG_CACHE_HOME or ~/.cache."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Steps and batches."""

    steps: int = 600
    """Optimizer steps in all."""

    micro_batch: int = 4
    """Sequences per rank in one forward."""

    accumulation: int | None = None
    """Micro-batches per step; by default 1, or what --global-batch needs."""

    global_batch: int | None = None
    """Sequences per step over all ranks: micro-batch × accumulation × ranks."""

    seed: int = 0
    """For the model's first values and the order of the data."""

    eval_every: int = 100
    """Steps between evaluations; 0 evaluates at the end only."""

    eval_windows: int = 64
    """Sequences of the validation part that are evaluated, always the same ones."""

    log_every: int = 10
    """Steps between lines of metrics.jsonl, and between lines on a screen that is no terminal."""

    def split(self, ranks: int) -> tuple[int, int]:
        """Global batch and micro-batches per step."""
        unit = self.micro_batch * ranks
        if self.global_batch is None:
            return unit * (self.accumulation or 1), self.accumulation or 1
        if self.accumulation is not None and self.global_batch != unit * self.accumulation:
            raise ConfigError(
                f"--global-batch {self.global_batch} is not micro-batch {self.micro_batch} × accumulation "
                f"{self.accumulation} × {ranks} ranks = {unit * self.accumulation}; leave one of them out"
            )
        if self.global_batch % unit:
            below = self.global_batch // unit * unit
            near = ", ".join(str(size) for size in (below, below + unit, below + 2 * unit) if size)
            fits = [m for m in range(1, self.micro_batch) if self.global_batch % (m * ranks) == 0]
            other = f"; or --micro-batch {fits[-1]}" if fits else ""
            raise ConfigError(
                f"--global-batch {self.global_batch} is not a multiple of micro-batch {self.micro_batch} × {ranks} "
                f"ranks = {unit}; batches that are: {near}{other}"
            )
        return self.global_batch, self.global_batch // unit


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """AdamW and its schedule: up in a line, down along half a cosine."""

    lr: float = 3e-3
    """Highest learning rate."""

    min_lr: float = 3e-4
    """Learning rate at the end."""

    warmup: int = 50
    """Steps until the highest."""

    weight_decay: float = 0.1
    """Of matrices; vectors do not decay."""

    beta1: float = 0.9
    """Decay of the mean."""

    beta2: float = 0.95
    """Decay of the mean square."""

    clip: float = 1.0
    """Most gradient norm over the whole model; 0 never clips."""


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """How the state is spread over ranks."""

    stage: int | str = 3
    """0, 1, 2, 3, or auto: by the memory there is."""

    precision: str = "fp32"
    """fp32, bf16, or fp16 with a loss scale; where 16 bits compute, an fp32 master is updated."""

    bucket_mb: float = 32.0
    """Largest flat unit, in MiB."""

    prefetch: int | str = 1
    """Units gathered ahead at stage 3; auto measures."""

    reduce: str = "each"
    """With accumulation: reduce each micro-batch, or once (more memory, less traffic). Stages agree bit for bit."""

    mesh: str | None = None
    """Axes of ranks, such as replica=2,shard=4 or shard=2,tp=2; by default all ranks share the state."""

    sequence: bool = False
    """With an axis tp: split activations between matrices along the sequence, too."""

    activations: str = "keep"
    """keep, checkpoint, checkpoint+host, partition or partition+host (both with tp), or auto."""

    offload: str | None = None
    """Where optimizer state is, and its update: host, disk, or auto (on the host what does not fit the device,
    and with a path on disk what does not fit there)."""

    offload_parameters: str | None = None
    """Stage 3, with --offload: where the shards of parameters are, host or disk."""

    offload_path: Path | None = None
    """With disk or auto: a folder on a fast disk of this node; what is written there is gone when the run ends."""

    def zero(self, seed: int) -> Zero:
        """The settings of shard(), without its mesh, which needs ranks."""
        if self.precision not in PRECISIONS:
            raise ConfigError(f"--precision {self.precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
        if not 1e-4 <= self.bucket_mb < 1e9:
            raise ConfigError(f"--bucket-mb {self.bucket_mb:g} is not a size in MiB; try 32")
        if self.reduce not in REDUCE:
            raise ConfigError(f"--reduce {self.reduce!r} is unknown; use one of {', '.join(REDUCE)}")
        fields: dict[str, Any] = {"stage": self.stage, "prefetch": self.prefetch, "activations": self.activations}
        tiers: dict[str, Any] = {"optimizer": self.offload, "parameters": self.offload_parameters}
        offload = Offload(**tiers, path=self.offload_path)
        fields["offload"] = offload if offload.optimizer is not None else None
        return Zero(precision=self.precision, bucket_bytes=int(self.bucket_mb * (1 << 20)), seed=seed, **fields)

    def axes(self, ranks: int) -> dict[str, int]:
        """The mesh's axes and their sizes; none if all ranks share the state."""
        if self.mesh is None:
            return {}
        try:
            pairs = [part.split("=") for part in self.mesh.split(",")]
            axes = {name.strip(): int(size) for name, size in pairs}
        except ValueError as error:
            raise ConfigError(f"--mesh {self.mesh!r} is not like replica=2,shard=4") from error
        if unknown := [name for name in axes if name not in AXES]:
            hint = "; a pipeline needs a script: see onefold.PipelineStage" if unknown[0] == "pp" else ""
            raise ConfigError(f"--mesh {self.mesh!r}: {unknown[0]!r} is none of {', '.join(AXES)}{hint}")
        if len(axes) != len(pairs) or any(size < 1 for size in axes.values()) or math.prod(axes.values()) != ranks:
            raise ConfigError(
                f"--mesh {self.mesh!r} has {math.prod(axes.values())} places, but there are {ranks} ranks; name each "
                f"axis once, with sizes whose product is {ranks}"
            )
        return {name: axes.get(name, 1) for name in AXES}

    def readers(self, ranks: int) -> int:
        """How many ranks read data of their own: those of one tp read the same."""
        return ranks // self.axes(ranks).get("tp", 1)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints and interruptions."""

    save_every: int = 100
    """Steps between checkpoints; 0 saves at the end only."""

    keep: int = 2
    """How many checkpoints stay; 0 keeps all."""

    resume: bool = False
    """Resume the run at --out from its last checkpoint; with its settings, unless others are given."""

    resume_or_start: bool = False
    """As --resume where there is a run at --out; else start it."""

    accept_changed_data: bool = False
    """Resume even if the data are not those that the run began with."""

    max_restarts: int = 0
    """How often to start again, from the last checkpoint, after a rank was lost."""

    shutdown_s: float = 3600.0
    """After a signal: how long to wait for the last step and its checkpoint."""

    timeout_s: float = 600.0
    """How long a rank waits for another."""

    @property
    def may_resume(self) -> bool:
        """--resume or --resume-or-start was given."""
        return self.resume or self.resume_or_start


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """What it leaves."""

    out: Path = Path("run")
    """The folder of the run."""

    compile: bool = False
    """Compile the blocks."""

    tensorboard: bool = False
    """Write TensorBoard files too, in the run's folder."""

    profile: bool = False
    """Record some early steps: a Chrome trace for each rank, and where a step goes."""

    profile_steps: int | None = None
    """With --profile: how many, after two that are let pass; 3 unless told."""

    @property
    def profiled(self) -> int:
        """Steps."""
        return PROFILE_STEPS if self.profile_steps is None else self.profile_steps


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All of it."""

    ranks: int | None = None
    """Local processes; by default one per GPU, or 2 on a CPU. Under torchrun: as many as it started."""

    compare: str | None = None
    """Stages to run one after another, such as 0,1,2,3, for one report."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    steps: StepSettings = field(default_factory=StepSettings)
    adam: AdamSettings = field(default_factory=AdamSettings)
    zero: ZeroSettings = field(default_factory=ZeroSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    output: OutputSettings = field(default_factory=OutputSettings)

    def check(self, ranks: int) -> None:
        """Raise whatever can be known to be wrong without reading the data."""
        check_numbers(self)
        named(self.model.model)
        policy = self.zero.zero(self.steps.seed).activations
        if policy != AUTO:
            check_policy(policy, self.zero.axes(ranks).get("tp", 1))
        self.steps.split(self.zero.readers(ranks))
        if self.zero.sequence and self.zero.axes(ranks).get("tp", 1) == 1:
            raise ConfigError("--sequence splits along the ranks of tp, and there is one; give --mesh shard=…,tp=2")
        if self.zero.sequence and self.zero.activations.startswith("partition"):
            raise ConfigError(
                f"--sequence splits block inputs over tp already, so --activations {self.zero.activations} has nothing "
                f"left to share; use {self.zero.activations.replace('partition', 'checkpoint')}"
            )
        if self.checkpoints.resume and self.checkpoints.resume_or_start:
            raise ConfigError("--resume wants a run at --out and --resume-or-start does not; give one of them")
        if self.checkpoints.accept_changed_data and not self.checkpoints.may_resume:
            raise ConfigError("--accept-changed-data is for a run that is resumed; add --resume, or leave it out")
        if self.output.profile_steps is not None and not self.output.profile:
            raise ConfigError(f"--profile-steps {self.output.profile_steps} records nothing without --profile; add it")
        if self.output.profile and self.steps.steps < PROFILE_WARMUP + self.output.profiled:
            raise ConfigError(
                f"--profile records {self.output.profiled} steps after {PROFILE_WARMUP} that are let pass, but "
                f"--steps is {self.steps.steps}; raise it, or lower --profile-steps"
            )
        for one in self.stages():
            one.zero.zero(one.steps.seed)

    def updates_inside(self, ranks: int) -> bool:
        """Updates on the host start inside backward where they can: nothing is clipped, accumulated or skipped."""
        one_backward = self.steps.split(self.zero.readers(ranks))[1] == 1
        return self.zero.offload is not None and not self.adam.clip and one_backward and self.zero.precision != "fp16"

    def stages(self) -> list[Settings]:
        """One run, or with --compare one for each stage, in a folder of its own."""
        if self.compare is None:
            return [self]
        names = [part.strip() for part in self.compare.split(",")]
        if not set(names) <= set(STAGES) or len(set(names)) != len(names):
            raise ConfigError(f"--compare {self.compare!r} is not a list of stages; use for example 0,1,2,3")
        return [
            dataclasses.replace(
                self,
                compare=None,
                zero=dataclasses.replace(self.zero, stage=int(name)),
                output=dataclasses.replace(self.output, out=self.output.out / STAGE_FOLDER.format(name)),
            )
            for name in names
        ]


AT_LEAST = {
    "ranks": 1, "steps": 1, "micro_batch": 1, "accumulation": 1, "global_batch": 1, "seed": 0, "eval_every": 0,
    "eval_windows": 1, "log_every": 1, "warmup": 0, "weight_decay": 0, "clip": 0, "min_lr": 0, "save_every": 0,
    "keep": 0, "max_restarts": 0, "vocab": 1, "profile_steps": 1,
}  # fmt: skip
ABOVE_ZERO = ("lr", "shutdown_s", "timeout_s")
FRACTIONS = ("beta1", "beta2")


def check_numbers(settings: Settings) -> None:
    """Each by itself."""
    for name, value in flat(settings).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if value is None:
            continue
        if name in AT_LEAST and not AT_LEAST[name] <= value < math.inf:
            raise ConfigError(f"{flag} is out of range; use a number of at least {AT_LEAST[name]}")
        if name == "timeout_s" and value > LONGEST_S:
            raise ConfigError(f"{flag} is out of range; use a number of seconds up to {LONGEST_S}")
        if name in ABOVE_ZERO and not 0 < value < math.inf:
            raise ConfigError(f"{flag} is out of range; use a number above 0")
        if name in FRACTIONS and not 0 <= value < 1:
            raise ConfigError(f"{flag} is out of range; use a number of at least 0 and below 1")
        if name == "val_fraction" and not 0 < value <= 0.5:
            raise ConfigError(f"{flag} is out of range; use a number above 0 and up to 0.5")
    if settings.adam.min_lr > settings.adam.lr:
        raise ConfigError(f"--min-lr {settings.adam.min_lr:g} is above --lr {settings.adam.lr:g}; lower it")


def flat(settings: Any) -> dict[str, Any]:
    """Every field by its own name."""
    found: dict[str, Any] = {}
    for one in dataclasses.fields(settings):
        value = getattr(settings, one.name)
        found |= flat(value) if dataclasses.is_dataclass(value) else {one.name: value}
    return found
