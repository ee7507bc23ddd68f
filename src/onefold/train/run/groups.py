"""The settings of a training run in groups: model, data, steps, optimizer, sharding, checkpoints, output.

Every field is a flag of `onefold train`, and its docstring is the help text; every group is a table of a TOML file.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cost.shapes import Shape, named
from onefold.errors import ConfigError
from onefold.settings.offload import Offload
from onefold.settings.precision import DTYPES
from onefold.settings.zero import REDUCE, Zero
from onefold.train.run.axes import parse_axes
from onefold.train.run.pretrained import Pretrained, open_pretrained

PRECISIONS = tuple(DTYPES)
BYTES = "bytes"
AXES = ("replica", "shard", "sequence", "tp")
MOST_RANKS = 1 << 20
WARMUP = 50  # steps in which the learning rate rises, of a run ten times as long
MUON_LR = 0.02  # Keller Jordan's
OPTIMIZERS, SCALINGS = ("adamw", "muon"), ("original", "match_rms_adamw")
PROFILE_STEPS = 3  # recorded by default
PROFILE_WARMUP = 2  # steps before them: the first learns the schedules, the second tracks memory


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model: a GPT by name or by shape, or the weights of a Hugging Face folder."""

    model: str = "gpt-tiny"
    """A GPT by name: gpt-tiny, gpt-small, gpt2, gpt2-1.5b, 8b, 100b … The flags below change parts of it."""

    weights: Path | None = None
    """Fine-tune the model of this folder instead: config.json and .safetensors files of Hugging Face, or what `onefold
    export` made of a run. With it --lr is 1e-4, --min-lr 1e-5 and --tokenizer the folder's, unless given."""

    layers: int | None = None
    """Number of transformer blocks."""

    hidden: int | None = None
    """Hidden size."""

    heads: int | None = None
    """Attention heads per block."""

    seq: int | None = None
    """Tokens per sequence."""

    vocab: int | None = None
    """Vocabulary size; by default the tokenizer's."""

    def start(self) -> Pretrained | None:
        """What the folder of --weights holds."""
        return None if self.weights is None else open_pretrained(self.weights)

    @property
    def length(self) -> int:
        """Tokens per sequence."""
        start = self.start()
        return self.seq or named(self.model).seq if start is None else start.shape_of(self.seq).seq

    def check(self) -> None:
        """Raises for a model that is unknown, and for weights beside a shape."""
        named(self.model)
        for name in ("layers", "hidden", "heads", "vocab", "model") if self.weights is not None else ():
            if getattr(self, name) != getattr(ModelSettings(), name):
                raise ConfigError(
                    f"--{name} {getattr(self, name)} is for a new model, and the model of --weights {self.weights} has "
                    f"its shape; leave one of them out"
                )

    def shape(self, vocab: int) -> Shape:
        """The shape of the model; `vocab` is the tokenizer's, which --vocab may exceed."""
        if (start := self.start()) is not None:
            if vocab > start.shape.vocab:
                raise ConfigError(
                    f"the tokens go up to {vocab - 1}, and the model in {self.weights} knows {start.shape.vocab}; give "
                    f"the tokenizer it was trained with"
                )
            return start.shape_of(self.seq)
        given = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "seq")}
        if self.vocab is not None and self.vocab < vocab:
            raise ConfigError(
                f"--vocab {self.vocab} is too small: the tokens go up to {vocab - 1}; use {vocab} or more"
            )
        given = {name: size for name, size in given.items() if size is not None}
        return dataclasses.replace(named(self.model), **given, vocab=self.vocab or vocab)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The text or tokens to train on."""

    data: Path | None = None
    """A text file, a folder of text files, a token file (.bin, .npy), or a folder of them; by default the sources of
    Python's standard library."""

    tokenizer: str = BYTES
    """How text becomes tokens: "bytes", or the path of a Hugging Face tokenizers file (tokenizer.json)."""

    val_fraction: float = 0.05
    """Fraction of the data that is held out for validation."""

    cache: Path | None = None
    """Folder that caches tokenised text; by default onefold/ in $XDG_CACHE_HOME or ~/.cache."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Steps, batches, evaluation and logging."""

    steps: int = 600
    """Optimizer steps of the whole run."""

    micro_batch: int = 4
    """Sequences per rank in one forward."""

    accumulation: int | None = None
    """Micro-batches per step; by default 1, or what --global-batch needs."""

    global_batch: int | None = None
    """Sequences per step over all ranks: micro-batch × accumulation × ranks."""

    seed: int = 0
    """Seed of the initial parameters and of the order of the data."""

    eval_every: int = 100
    """Steps between evaluations; 0 evaluates at the end only."""

    eval_windows: int = 64
    """Validation sequences per evaluation, always the same ones."""

    log_every: int = 10
    """Steps between rows of metrics.jsonl, and between lines of output where that is no terminal."""

    def split(self, ranks: int) -> tuple[int, int]:
        """The global batch and the number of micro-batches per step."""
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
    """The optimizer and its learning rate: linear warmup, then cosine decay."""

    lr: float = 3e-3
    """Learning rate of AdamW after warmup."""

    min_lr: float = 3e-4
    """Learning rate at the last step."""

    warmup: int | None = None
    """Warmup steps; by default 50, and at most a tenth of --steps."""

    weight_decay: float = 0.1
    """Weight decay of matrices; biases and norms have none."""

    beta1: float = 0.9
    """Adam's beta1."""

    beta2: float = 0.95
    """Adam's beta2."""

    clip: float = 1.0
    """Gradients are clipped to this global norm; 0 does not clip."""

    optimizer_state: str = "fp32"
    """The form of AdamW's moments: fp32, bf16 or 8bit, of 8, 4 and 2 bytes per parameter; the last two are rounded at
    random, from --seed."""

    optimizer: str = "adamw"
    """adamw, or muon: Muon for the matrices of blocks, AdamW for embeddings, norms and biases."""

    muon_lr: float | None = None
    """With muon: learning rate of the matrices, which follows the same schedule; by default 0.02 for the scaling
    original, and --lr for match_rms_adamw."""

    muon_scaling: str = "original"
    """With muon: how learning rates of matrices follow their shapes, by torch's names: original or match_rms_adamw."""

    muon_momentum: float = 0.95
    """Muon's momentum."""

    @property
    def matrices_lr(self) -> float:
        """Muon's learning rate after warmup."""
        if self.muon_lr is not None:
            return self.muon_lr
        return MUON_LR if self.muon_scaling == "original" else self.lr

    def warmup_steps(self, steps: int) -> int:
        """The number of warmup steps of a run of so many steps."""
        return min(WARMUP, max(1, steps // 10)) if self.warmup is None else self.warmup


@dataclass(frozen=True, kw_only=True)
class ZeroSettings:
    """How training state is sharded over ranks, and where it is kept."""

    stage: int | str = 3
    """ZeRO stage 0, 1, 2 or 3, or auto: the lowest of 1, 2 and 3 that fits into device memory."""

    precision: str = "fp32"
    """fp32, bf16, or fp16 (with a loss scale); with 16 bits the optimizer updates fp32 master parameters."""

    bucket_mb: float = 128.0
    """Largest unit (flat buffer of parameters), in MiB."""

    prefetch: int | str = 1
    """Stage 3: units that are all-gathered ahead of their use; auto times the first passes and chooses."""

    reshard_after_forward: bool = True
    """Stage 3: reshard after forward. If not, parameters stay unsharded until backward, and a third less is sent."""

    overlap_param_gather: bool = False
    """Stages 1 and 2: gather updated parameters while the next forward runs."""

    reduce: str = "each"
    """With accumulation: "each" reduces gradients after every micro-batch, "once" at the end of the step (more memory,
    less traffic)."""

    mesh: str | None = None
    """Mesh axes and their sizes, such as replica=2,shard=4, shard=2,sequence=2 or shard=*,tp=2, where * takes the ranks
    that are left; by default state is sharded over all ranks."""

    sequence: bool = False
    """Sequence parallelism over the mesh axis tp."""

    activations: str = "keep"
    """What blocks keep for backward: keep (all activations), checkpoint (their inputs; blocks are recomputed) or
    partition (1/tp of their inputs); checkpoint+host and partition+host keep inputs in host memory; or auto."""

    offload: str | None = None
    """Keep optimizer state, and run the update, on the host or on disk; auto offloads only units that do not fit on
    the device."""

    offload_parameters: str | None = None
    """Stage 3, with --offload: keep the parameter shards on the host or on disk."""

    offload_path: Path | None = None
    """With disk or auto: a folder on a fast disk of this node, for scratch files that the run removes at its end."""

    def zero(self, seed: int) -> Zero:
        """The settings of shard(), without the mesh, which exists only once ranks have started."""
        if self.precision not in PRECISIONS:
            raise ConfigError(f"--precision {self.precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
        if not 1e-4 <= self.bucket_mb < 1e9:
            raise ConfigError(f"--bucket-mb {self.bucket_mb:g} is not a size in MiB; try 128")
        if self.reduce not in REDUCE:
            raise ConfigError(f"--reduce {self.reduce!r} is unknown; use one of {', '.join(REDUCE)}")
        fields: dict[str, Any] = {"stage": self.stage, "prefetch": self.prefetch, "activations": self.activations}
        fields |= {
            "reshard_after_forward": self.reshard_after_forward, "overlap_param_gather": self.overlap_param_gather,
        }  # fmt: skip
        tiers: dict[str, Any] = {"optimizer": self.offload, "parameters": self.offload_parameters}
        offload = Offload(**tiers, path=self.offload_path)
        fields["offload"] = offload if offload.optimizer is not None else None
        return Zero(precision=self.precision, bucket_bytes=int(self.bucket_mb * (1 << 20)), seed=seed, **fields)

    def axes(self, ranks: int) -> dict[str, int]:
        """The axes of the mesh and their sizes; empty if state is sharded over all ranks."""
        if self.mesh is None:
            return {}
        axes = parse_axes(self.mesh, AXES)
        known = math.prod(size for size in axes.values() if size > 0)
        axes = {name: size if size > 0 else ranks // known for name, size in axes.items()}
        if math.prod(axes.values()) != ranks:
            raise ConfigError(
                f"--mesh {self.mesh!r} has {math.prod(axes.values())} places, but there are {ranks} ranks; name each "
                f"axis once, with sizes whose product is {ranks}"
            )
        return {name: axes.get(name, 1) for name in AXES}

    def data_parallel_ranks(self, ranks: int) -> int:
        """How many ranks read data of their own: all ranks of one tp or sequence group read the same."""
        axes = self.axes(ranks)
        return ranks // (axes.get("tp", 1) * axes.get("sequence", 1))


class Bounds(NamedTuple):
    """The least and the most ranks of a run that goes on after ranks were lost."""

    least: int
    most: int

    @classmethod
    def of(cls, text: str) -> Bounds:
        """The bounds of --elastic MIN:MAX; raises for what is none."""
        try:
            least, most = map(int, text.split(":"))
        except ValueError as error:
            raise ConfigError(f"--elastic {text!r} is not MIN:MAX ranks, such as 2:3") from error
        if not 1 <= least <= most:
            raise ConfigError(f"--elastic {text!r} has no ranks between its bounds; use MIN:MAX, such as 2:3")
        if most > MOST_RANKS:
            raise ConfigError(f"--elastic {text!r} is out of range; use at most {MOST_RANKS:,} ranks, such as 2:3")
        return cls(least, most)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Checkpoints, restarts and signals."""

    save_every: int = 100
    """Steps between checkpoints; 0 saves at the end only."""

    keep: int = 2
    """Number of checkpoints to keep; 0 keeps all."""

    store: str | None = None
    """Keep the checkpoints in an object store, such as s3://bucket/run, and not in --out, which keeps the rest. A
    run that is not resumed wants none there."""

    resume: bool = False
    """Resume the run at --out from its last checkpoint, with its own settings unless flags change them."""

    resume_or_start: bool = False
    """Resume the run at --out if there is one, else start it."""

    accept_changed_data: bool = False
    """Resume even if the data are not those that the run began with."""

    max_restarts: int = 0
    """How often to restart all ranks from the last checkpoint after a rank was lost."""

    elastic: str | None = None
    """MIN:MAX ranks, such as 2:3. The state is copied to memory beside training; when ranks are lost, the run goes on
    from there with those that are left."""

    copy_every: int = 10
    """With --elastic: steps between copies of the state in memory."""

    shutdown_s: float = 3600.0
    """Seconds that the ranks have after a signal, to finish their step and save it."""

    timeout_s: float = 600.0
    """Seconds that a rank waits for another before it gives up."""

    def of_stage(self, name: str) -> CheckpointSettings:
        """Those of one run of a comparison, whose checkpoints have a place of their own in the store."""
        return self if self.store is None else dataclasses.replace(self, store=f"{self.store.rstrip('/')}/{name}")

    @property
    def bounds(self) -> Bounds | None:
        """The least and the most ranks of --elastic; None without it."""
        return None if self.elastic is None else Bounds.of(self.elastic)

    @property
    def may_resume(self) -> bool:
        """--resume or --resume-or-start was given."""
        return self.resume or self.resume_or_start


@dataclass(frozen=True, kw_only=True)
class OutputSettings:
    """What the run writes."""

    out: Path = Path("run")
    """The run folder: settings, metrics, checkpoints and report."""

    compile: bool = False
    """Compile the blocks with torch.compile."""

    log: str | None = None
    """Log metrics elsewhere too: tensorboard (files in the run folder), wandb (Weights & Biases; offline, in the run
    folder, unless you are logged in), or both: tensorboard,wandb."""

    profile: bool = False
    """Profile a few early steps: a Chrome trace of each rank, and a summary of where the time goes."""

    profile_steps: int | None = None
    """With --profile: how many steps, after two of warmup; by default 3."""

    @property
    def logs(self) -> list[str]:
        """The programs of --log."""
        return [] if self.log is None else list(dict.fromkeys(name.strip() for name in self.log.split(",")))

    @property
    def profiled(self) -> int:
        """Number of steps to profile."""
        return PROFILE_STEPS if self.profile_steps is None else self.profile_steps
