"""Everything a training run can be told, as one tree of frozen dataclasses; what cannot be is refused before it starts.

The command line reads the same tree (every field is a flag), and so does a TOML file (every group is a table).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from onefold.cost.activations import check_policy
from onefold.cost.shapes import named
from onefold.errors import ConfigError
from onefold.settings.zero import AUTO, LONGEST_S
from onefold.train.run.folder import STAGE_FOLDER, STAGES
from onefold.train.run.groups import (
    PROFILE_WARMUP,
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

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    steps: StepSettings = field(default_factory=StepSettings)
    adam: AdamSettings = field(default_factory=AdamSettings)
    zero: ZeroSettings = field(default_factory=ZeroSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    output: OutputSettings = field(default_factory=OutputSettings)

    def check(self, ranks: int) -> None:
        """Raises for every mistake that can be found without reading the data."""
        check_numbers(self)
        named(self.model.model)
        policy = self.zero.zero(self.steps.seed).activations
        if policy != AUTO:
            check_policy(policy, self.zero.axes(ranks).get("tp", 1))
        self.steps.split(self.zero.data_parallel_ranks(ranks))
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
                f"--profile records {self.output.profiled} steps after {PROFILE_WARMUP} of warmup, but "
                f"--steps is {self.steps.steps}; raise it, or lower --profile-steps"
            )
        for one in self.stages():
            one.zero.zero(one.steps.seed)

    def updates_in_backward(self, ranks: int) -> bool:
        """Whether host updates start in backward: only if no gradient is clipped, accumulated or skipped."""
        one_backward = self.steps.split(self.zero.data_parallel_ranks(ranks))[1] == 1
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
    """Raises for a number that is out of range."""
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
    """The fields of all groups in one dict, by name."""
    found: dict[str, Any] = {}
    for one in dataclasses.fields(settings):
        value = getattr(settings, one.name)
        found |= flat(value) if dataclasses.is_dataclass(value) else {one.name: value}
    return found
