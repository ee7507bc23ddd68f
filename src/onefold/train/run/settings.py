"""Everything a training run can be told, as one tree of frozen dataclasses; what cannot be is refused before it starts.

The command line reads the same tree (every field is a flag), and so does a TOML file (every group is a table).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from onefold.checkpoint.format.address import Address, place
from onefold.cost.activations import check_policy
from onefold.errors import ConfigError
from onefold.settings.values import STATE_BYTES
from onefold.settings.zero import AUTO, LONGEST_S
from onefold.train.run.axes import REST
from onefold.train.run.fault_settings import FaultSettings
from onefold.train.run.folder import STAGE_FOLDER, STAGES
from onefold.train.run.groups import (
    MOST_RANKS,
    OPTIMIZERS,
    PROFILE_WARMUP,
    SCALINGS,
    AdamSettings,
    CheckpointSettings,
    DataSettings,
    ModelSettings,
    OutputSettings,
    StepSettings,
    ZeroSettings,
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a run."""

    ranks: int | None = None
    """Local ranks (processes); by default one per GPU, or 2 on a CPU. Under torchrun: its number of ranks."""

    compare: str | None = None
    """Run several stages one after another, such as 0,1,2,3, and compare them in one report."""

    plan: bool = True
    """Ask the plan first: refuse a run that cannot fit into memory, and keep what a rank is to hold and send, for the
    report. --no-plan does neither."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    steps: StepSettings = field(default_factory=StepSettings)
    adam: AdamSettings = field(default_factory=AdamSettings)
    zero: ZeroSettings = field(default_factory=ZeroSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    faults: FaultSettings = field(default_factory=FaultSettings)
    output: OutputSettings = field(default_factory=OutputSettings)

    def check(self, ranks: int) -> None:
        """Raises for every mistake that can be found without reading the data."""
        check_numbers(self)
        self.model.check()
        self._check_weights(ranks)
        self._check_elastic(ranks)
        if self.adam.optimizer_state not in STATE_BYTES:
            forms = ", ".join(STATE_BYTES)
            raise ConfigError(f"--optimizer-state {self.adam.optimizer_state!r} is unknown; use one of {forms}")
        if self.adam.optimizer_state != "fp32" and self.zero.offload == "disk":
            raise ConfigError(
                f"--optimizer-state {self.adam.optimizer_state} is kept on the device or on the host, not on disk; use "
                f"--offload host, or --optimizer-state fp32"
            )
        if self.adam.optimizer_state != "fp32" and self.adam.optimizer != "adamw":
            raise ConfigError(
                f"--optimizer-state {self.adam.optimizer_state} is for adamw, and --optimizer is "
                f"{self.adam.optimizer}; leave one of them out"
            )
        policy = self.zero.zero(self.steps.seed).activations
        if policy != AUTO:
            check_policy(policy, self.zero.axes(ranks).get("tp", 1))
        self.steps.split(self.zero.data_parallel_ranks(ranks))
        seq, cut = self.model.length, self.zero.axes(ranks).get("sequence", 1)
        if seq % cut:
            raise ConfigError(
                f"--mesh {self.zero.mesh} cuts sequences over {cut} ranks, and {seq} tokens are no multiple of {cut}; "
                f"give --seq {-(-seq // cut) * cut}, or another mesh"
            )
        if self.zero.sequence and self.zero.axes(ranks).get("tp", 1) == 1:
            raise ConfigError("--sequence splits along the ranks of tp, and there is one; give --mesh shard=…,tp=2")
        if self.zero.sequence and self.zero.activations.startswith("partition"):
            raise ConfigError(
                f"--sequence splits block inputs over tp already, so --activations {self.zero.activations} has nothing "
                f"left to share; use {self.zero.activations.replace('partition', 'checkpoint')}"
            )
        self._check_optimizer()
        if self.checkpoints.resume and self.checkpoints.resume_or_start:
            raise ConfigError("--resume wants a run at --out and --resume-or-start does not; give one of them")
        store = self.checkpoints.store
        if store is not None and not isinstance(place(store), Address):
            raise ConfigError(
                f"--store {store} is no address of a store, as s3://bucket/run; a folder belongs to --out"
            )
        if self.checkpoints.accept_changed_data and not self.checkpoints.may_resume:
            raise ConfigError("--accept-changed-data is for a run that is resumed; add --resume, or leave it out")
        if self.output.profile_steps is not None and not self.output.profile:
            raise ConfigError(f"--profile-steps {self.output.profile_steps} records nothing without --profile; add it")
        if self.output.profile and self.steps.steps < PROFILE_WARMUP + self.output.profiled:
            raise ConfigError(
                f"--profile records {self.output.profiled} steps after {PROFILE_WARMUP} of warmup, but "
                f"--steps is {self.steps.steps}; raise it, or lower --profile-steps"
            )
        for one in self.stages():
            one.zero.zero(one.steps.seed)

    def _check_weights(self, ranks: int) -> None:
        """Raises for a mesh that splits what only the built-in GPT can split."""
        start = self.model.start()
        if start is None or start.built_in:
            return
        if split := [name for name in ("tp", "sequence") if self.zero.axes(ranks).get(name, 1) > 1]:
            raise ConfigError(
                f"--mesh {self.zero.mesh}: {split[0]} splits the built-in GPT, and --weights {start.folder} is a "
                f"{start.kind!r} of transformers; use replica and shard"
            )

    def _check_elastic(self, ranks: int) -> None:
        """Raises unless a run can have both the least and the most ranks of --elastic, with one global batch."""
        bounds, flag = self.checkpoints.bounds, f"--elastic {self.checkpoints.elastic}"
        if bounds is None:
            return
        if self.compare is not None:
            raise ConfigError(f"{flag}: stages are compared on one number of ranks; leave out --compare or --elastic")
        if not bounds.least <= ranks <= bounds.most:
            raise ConfigError(f"{flag}, but there are {ranks} ranks; widen its bounds, or start as many as they allow")
        for count in bounds:
            try:
                self.zero.axes(count)
            except ConfigError as error:
                raise ConfigError(
                    f"{flag}: {count} ranks do not fit --mesh {self.zero.mesh}; let an axis take the ranks that are "
                    f"left, as in --mesh shard={REST},tp=2, with bounds that the others divide"
                ) from error
        batch, unit = self.elastic_batch(), self._elastic_unit()
        if batch % unit:
            raise ConfigError(
                f"{flag}: a global batch of {batch} cannot be shared by {bounds.least} and by {bounds.most} ranks with "
                f"--micro-batch {self.steps.micro_batch}; use a --global-batch that is a multiple of {unit}"
            )

    def _elastic_unit(self) -> int:
        """Sequences that every global batch is a multiple of which both bounds of --elastic can share."""
        assert self.checkpoints.bounds is not None
        return self.steps.micro_batch * math.lcm(*map(self.zero.data_parallel_ranks, self.checkpoints.bounds))

    def elastic_batch(self) -> int:
        """The global batch of a run with --elastic, at any number of ranks."""
        assert self.checkpoints.bounds is not None
        steps, most = self.steps, self.zero.data_parallel_ranks(self.checkpoints.bounds.most)
        if steps.global_batch is None and steps.accumulation is None:
            return self._elastic_unit()
        return steps.global_batch or steps.micro_batch * most * (steps.accumulation or 1)

    def elastic_ranks(self) -> list[int]:
        """The numbers of ranks that the run may have, with --elastic; else none."""
        bounds = self.checkpoints.bounds
        return [] if bounds is None else [n for n in range(bounds.least, bounds.most + 1) if self._fits(n)]

    def _fits(self, ranks: int) -> bool:
        try:
            return self.elastic_batch() % (self.steps.micro_batch * self.zero.data_parallel_ranks(ranks)) == 0
        except ConfigError:  # of the mesh
            return False

    def _check_optimizer(self) -> None:
        adam = self.adam
        if adam.optimizer not in OPTIMIZERS:
            raise ConfigError(f"--optimizer {adam.optimizer!r} is unknown; use one of {', '.join(OPTIMIZERS)}")
        if adam.muon_scaling not in SCALINGS:
            raise ConfigError(f"--muon-scaling {adam.muon_scaling!r} is unknown; use one of {', '.join(SCALINGS)}")
        if adam.optimizer != "muon" and adam.muon_lr is not None:
            raise ConfigError(f"--muon-lr {adam.muon_lr:g} says nothing of {adam.optimizer}; add --optimizer muon")

    def updates_in_backward(self, ranks: int) -> bool:
        """Whether host updates start in backward: only if no gradient is clipped, accumulated or skipped."""
        one_backward = self.steps.split(self.zero.data_parallel_ranks(ranks))[1] == 1
        asked = self.zero.offload is not None and self.adam.optimizer == "adamw"
        skips = self.zero.precision == "fp16" or self.faults.skip_spikes
        return asked and not self.adam.clip and one_backward and not skips

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
                checkpoints=self.checkpoints.of_stage(STAGE_FOLDER.format(name)),
            )
            for name in names
        ]


AT_LEAST = {
    "ranks": 1, "steps": 1, "micro_batch": 1, "accumulation": 1, "global_batch": 1, "seed": 0, "eval_every": 0,
    "eval_windows": 1, "log_every": 1, "warmup": 0, "weight_decay": 0, "clip": 0, "min_lr": 0, "save_every": 0,
    "keep": 0, "max_restarts": 0, "copy_every": 1, "vocab": 1, "profile_steps": 1,
    "check_replicas": 0,
}  # fmt: skip
MOST = 2**53  # of any whole number: files of metrics and reports keep it exactly
AT_MOST = {"ranks": MOST_RANKS, "micro_batch": 10**6, "accumulation": 10**6, "eval_windows": 10**6}
ABOVE_ZERO = ("lr", "muon_lr", "shutdown_s", "timeout_s")
ABOVE_ONE = ("spike_norm", "spike_loss")
FRACTIONS = ("beta1", "beta2", "muon_momentum")


def check_numbers(settings: Settings) -> None:
    """Raises for a number that is out of range."""
    for name, value in flat(settings).items():
        flag = f"--{name.replace('_', '-')} {value}"
        if value is None:
            continue
        if name in AT_LEAST and not AT_LEAST[name] <= value < math.inf:
            raise ConfigError(f"{flag} is out of range; use a number of at least {AT_LEAST[name]}")
        if type(value) is int and value > AT_MOST.get(name, MOST):
            raise ConfigError(f"{flag} is out of range; use a number of at most {AT_MOST.get(name, MOST):,}")
        if name == "timeout_s" and value > LONGEST_S:
            raise ConfigError(f"{flag} is out of range; use a number of seconds up to {LONGEST_S}")
        if name in ABOVE_ZERO and not 0 < value < math.inf:
            raise ConfigError(f"{flag} is out of range; use a number above 0")
        if name in ABOVE_ONE and not 1 < value < math.inf:
            raise ConfigError(f"{flag} is out of range; use a number above 1")
        if name in FRACTIONS and not 0 <= value < 1:
            raise ConfigError(f"{flag} is out of range; use a number of at least 0 and below 1")
        if name == "val_fraction" and not 0 < value <= 0.5:
            raise ConfigError(f"{flag} is out of range; use a number above 0 and up to 0.5")
    if settings.adam.min_lr > settings.adam.lr:
        raise ConfigError(f"--min-lr {settings.adam.min_lr:g} is above --lr {settings.adam.lr:g}; lower it")


def flat(settings: Any) -> dict[str, Any]:
    """The fields of all groups in one dict, by name."""
    found: dict[str, Any] = {}
    for one in dataclasses.fields(settings):
        value = getattr(settings, one.name)
        found |= flat(value) if dataclasses.is_dataclass(value) else {one.name: value}
    return found
