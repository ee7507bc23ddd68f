"""`onefold plan`: what fits, what it costs, what to choose."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from onefold.cli import throughput
from onefold.cli.plots import check_plot, draw
from onefold.cli.subject import Compute, Master, ModelOptions, bucket_bytes, policy
from onefold.cli.tables import show_plan
from onefold.cost.hardware import Hardware, hardware
from onefold.cost.search import Question
from onefold.cost.work import Work
from onefold.errors import ConfigError
from onefold.optim.elementwise import cost_of
from onefold.planner.measure import measured
from onefold.planner.plan import Plan, answer, plan


@dataclass(frozen=True, kw_only=True)
class PlanCommand(ModelOptions):
    """What fits, what it costs, what to choose. Try: onefold plan --params 7.5e9 --ranks 64"""

    params: float | None = None
    """Instead of a model: a number of parameters alone."""

    ranks: int = 1
    """Total number of ranks (devices)."""

    tp: int = 1
    """Tensor-parallel degree; 0 lets the plan choose, up to the size of a node."""

    pp: int = 1
    """Pipeline stages."""

    replica: int = 1
    """Replicas of the sharded state (hybrid sharding)."""

    batch: int | None = None
    """Sequences per replica and micro-batch; by default the largest that fits."""

    micro_batches: int = 1
    """Micro-batches per step (gradient accumulation)."""

    max_global_batch: int | None = None
    """Upper limit of the global batch: sequences per step over all replicas."""

    precision: Compute = "bf16"
    """The dtype of forward and backward."""

    master: Master = "fp32"
    """With 16 bits: the fp32 master that the optimizer updates; split saves 2 bytes per parameter."""

    optimizer: str = "adamw"
    """adamw, adam, sgd, momentum, adagrad or rmsprop."""

    activations: Literal["auto", "keep", "checkpoint", "checkpoint+host", "partition", "partition+host"] | None = None
    """What blocks keep for backward; by default only inputs, from which blocks are recomputed."""

    hardware: str = "a100-80"
    """v100-32, a100-80, h100-80, h200, ethernet, laptop; or measure: benchmark this machine."""

    memory_gb: float | None = None
    """Memory per device in GB, if it differs from the hardware table's."""

    bucket_mb: float = 128.0
    """Largest unit (flat buffer of parameters), in MiB."""

    prefetch: int = 1
    """Stage 3: units that are all-gathered ahead of their use."""

    reshard_after_forward: bool = True
    """Stage 3: reshard after forward. If not, parameters stay unsharded until backward, and a third less is sent."""

    step_in_backward: bool = False
    """Update in backward, so that host updates overlap with it; no clipping."""

    scaling: bool = False
    """Show expected throughput against the number of ranks, up to 1024, instead. A model, not a measurement."""

    tokens: float | None = None
    """Tokens to train on: adds how many days that takes."""

    json: bool = False
    """Print the plan as JSON."""

    plot: Path | None = None
    """Draw charts into this .png or .html file."""

    def run(self) -> int:
        if self.plot is not None:
            check_plot(self.plot)
        if self.tokens is not None and not 0 < self.tokens < math.inf:
            raise ConfigError(f"--tokens {self.tokens:g} is not a positive number")
        if self.scaling:
            return self._scaling()
        found = self.answer()
        if self.json:
            sys.stdout.write(json.dumps(found.to_dict(), indent=1) + "\n")
        else:
            show_plan(found)
        if self.plot is not None:
            draw(self.plot, found, self.question() if self.config is None else None)
        return 0

    def _scaling(self) -> int:
        if self.config is not None:
            raise ConfigError("--scaling is for shapes: give --model, or --layers with --hidden and --heads")
        question = self.question()
        found = throughput.curves(question, self.tp)
        if self.json:
            sys.stdout.write(json.dumps(throughput.as_dict(self.name, question, found), indent=1) + "\n")
        else:
            throughput.show(self.name, question, found)
        if self.plot is not None:
            throughput.draw(self.plot, self.name, question, found)
        return 0

    def answer(self) -> Plan:
        if self.config is not None:
            return self._of_module()
        name = self.name if self.params is None else f"{self.params:.4g} parameters"
        precision = self.precision if self.precision == "fp32" else f"{self.precision}, {self.master} master"
        return answer(self.question(), name, precision, self.tokens)

    def question(self) -> Question:
        shape = self.shape()
        if (shape is None) == (self.params is None):
            raise ConfigError("which model? give one of --params, --model, --layers with --hidden, or --config")
        if self.params is not None and (self.seq or self.vocab or self.activations):
            raise ConfigError("--seq, --vocab and --activations need a shape: a bare count has none")
        if self.params is not None and not 1 <= self.params < 1e16:
            raise ConfigError(f"--params {self.params:g} is not a number of parameters between 1 and 1e16")
        chosen = policy(self.precision, self.master).decided(own_sum=True, cuda=True)
        widths = chosen.dtypes(torch.float32 if self.precision == "fp32" else chosen.compute).widths  # type: ignore[arg-type]
        if self.micro_batches > 1 and widths.narrow:
            widths = widths._replace(grad=4)
        return Question(
            work=Work(
                widths=widths,
                numel=None if self.params is None else int(self.params),
                shape=shape,
                bucket_bytes=self._bucket_bytes(),
                auto_wire=True,
            ),
            ranks=self.ranks,
            hardware=self.machine(),
            cost=cost_of(self.optimizer),
            tp=self.tp or None,
            pp=self.pp,
            replica=self.replica,
            batch=self.batch,
            micro_batches=self.micro_batches,
            max_global_batch=self.max_global_batch,
            activations=self.activations,
            prefetch=self.prefetch,
            reshard_after_forward=self.reshard_after_forward,
            in_backward=self.step_in_backward,
        )

    def machine(self) -> Hardware:
        if self.memory_gb is not None and not 0 < self.memory_gb < 1e9:
            raise ConfigError(f"--memory-gb {self.memory_gb:g} is not a positive size")
        memory = None if self.memory_gb is None else int(self.memory_gb * 1e9)
        if self.hardware != "measure":
            return hardware(self.hardware, memory)
        found = measured()
        return found if memory is None else dataclasses.replace(found, memory_bytes=memory)

    def _bucket_bytes(self) -> int:
        return bucket_bytes(self.bucket_mb)

    def _of_module(self) -> Plan:
        for_shapes = ("step_in_backward", "tp", "pp", "replica", "params", "model", "layers", "hidden", "heads")
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        if given := [name for name in for_shapes if getattr(self, name) != fields[name]]:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise ConfigError(
                f"{flags}: not with --config, whose model is planned as it is, for data parallelism alone"
            )
        for name, least in (("ranks", self.ranks), ("batch", self.batch), ("seq", self.seq)):
            if least is not None and least < 1:
                raise ConfigError(f"{name}={least} is not a positive whole number")
        if self.activations not in (None, "keep", "checkpoint"):
            raise ConfigError(f"--activations {self.activations}: a config.json is planned with keep or checkpoint")
        with torch.device("meta"):
            model = self.build()
        return plan(
            model, self.sample(self.batch or 1), ranks=self.ranks, hardware=self.machine(), optimizer=self.optimizer,
            tokens=self.tokens, max_global_batch=self.max_global_batch, micro_batches=self.micro_batches,
            activations="checkpoint" if self.activations == "checkpoint" else "keep",
            precision=policy(self.precision, self.master), bucket_bytes=self._bucket_bytes(), prefetch=self.prefetch,
            reshard_after_forward=self.reshard_after_forward,
        )  # fmt: skip
