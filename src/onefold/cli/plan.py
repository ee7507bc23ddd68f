"""`onefold plan`: what fits, what it costs, what to choose."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onefold.cli import throughput
from onefold.cli.answer import show_answer
from onefold.cli.subject import Compute, Master, ModelOptions, bucket_bytes, usual_master
from onefold.cli.tables import show_all
from onefold.cost.hardware import Hardware, hardware
from onefold.cost.search import Question
from onefold.cost.states import named_cost
from onefold.cost.work import Work
from onefold.errors import ConfigError
from onefold.planner.answer import Plan, answer
from onefold.planner.page.form import FORM, Value
from onefold.planner.page.script import Settings
from onefold.planner.page.view import View, view, view_of
from onefold.settings.widths import widths_of

MOST_TOKENS = 1e18  # what is beyond is a mistake
OnTier = Literal["none", "host", "disk"]


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

    sequence: int = 1
    """Ranks over which each sequence is cut."""

    stage: int | None = None
    """Ask about this stage: it comes first, whether or not another is better."""

    offload: OnTier | None = None
    """Ask about choices with the optimizer state on the host, on disk, or neither (none)."""

    offload_parameters: OnTier | None = None
    """Likewise for the parameters."""

    batch: int | None = None
    """Sequences per replica and micro-batch; by default the largest that fits."""

    micro_batches: int = 1
    """Micro-batches per step (gradient accumulation)."""

    max_global_batch: int | None = None
    """Upper limit of the global batch: sequences per step over all replicas."""

    precision: Compute = "bf16"
    """The dtype of forward and backward."""

    master: Master | None = None
    """With 16 bits: the fp32 master that the optimizer updates; split saves 2 bytes per parameter. By default as in a
    run: split for bf16 on GPUs, else fp32; of a bare count fp32, as the paper counts."""

    optimizer: str = "adamw"
    """adamw, adam, sgd, momentum, adagrad, rmsprop, or muon with an AdamW beside it."""

    lora: int = 0
    """Rank of LoRA adapters on every linear layer of the blocks; the model itself is frozen."""

    optimizer_state: Literal["fp32", "bf16", "8bit"] = "fp32"
    """The form of the moments of adamw, adam or momentum: 8, 4 or 2 bytes per parameter with Adam."""

    activations: Literal["auto", "keep", "checkpoint", "checkpoint+host", "partition", "partition+host"] | None = None
    """What blocks keep for backward; by default only inputs, from which blocks are recomputed."""

    tile: int | None = None
    """Tokens in a tile of the loss and of MLPs (`tiled_cross_entropy`, `tiled`); by default they run whole."""

    hardware: str = "a100-80"
    """v100-32, a100-80, h100-80, h200, ethernet, laptop; a file that `onefold measure` wrote; or measure: benchmark
    this machine in seconds."""

    memory_gb: float | None = None
    """Memory per device in GB, if it differs from the hardware table's."""

    node_link_gb: float | None = None
    """GB/s from one device to others of its node, if it differs from the hardware table's."""

    network_gb: float | None = None
    """GB/s of a node's network, all interfaces together, if it differs from the hardware table's."""

    bucket_mb: float = 128.0
    """Largest unit (flat buffer of parameters), in MiB."""

    prefetch: int = 1
    """Stage 3: units that are all-gathered ahead of their use."""

    reshard_after_forward: bool = True
    """Stage 3: reshard after forward. If not, parameters stay unsharded until backward, and a third less is sent."""

    step_in_backward: bool = False
    """Update in backward, so that host updates overlap with it; no clipping."""

    compile: bool = False
    """Blocks are compiled (compile=True): what lies between their products runs in fewer kernels."""

    scaling: bool = False
    """Show expected throughput against the number of ranks, up to 1024, instead. A model, not a measurement."""

    tokens: float | None = None
    """Tokens to train on: adds how many days that takes."""

    all: bool = False
    """Print every choice, also with offload, with its bytes by category, its traffic and its time."""

    json: bool = False
    """Print the plan as JSON, with all of that."""

    page: Path | None = None
    """Write the plan with its charts into this .html file, which needs nothing else."""

    serve: bool = False
    """Open the plan as a page in the browser, whose fields ask again: on this machine alone, until Ctrl-C."""

    port: int | None = None
    """With --serve: the port, by default a free one."""

    def run(self) -> int:
        if self.page is not None and self.page.suffix != ".html":
            raise ConfigError(f"--page {self.page} is not an .html file")
        if self.port is not None and not self.serve:
            raise ConfigError("--port is the port of --serve")
        self._check_tokens()
        if self.serve:
            if self.config is not None:
                raise ConfigError("--serve is for shapes: give the config.json as --model, or write a --page of it")
            from onefold.cli.page import serve  # what it needs of http takes longer to import than a plan takes

            return serve(self, self.asked, self.port or 0)
        if self.page is not None:
            from onefold.cli.page import write

            write(self.page, self.view())
        if self.scaling:
            return self._scaling()
        found = self.answer()
        if self.json:
            sys.stdout.write(json.dumps(found.to_dict(), indent=1) + "\n")
        elif self.all:
            show_all(found)
        else:
            show_answer(found)
        return 0

    def asked(self, fields: dict[str, Value]) -> View:
        """The view with these settings instead of the fields of the form; the others stay."""
        blank = {name: getattr(type(self), name) for name in FORM}
        return dataclasses.replace(self, **{**blank, **fields}).view()

    def view(self) -> View:
        """What the page shows."""
        self._check_tokens()
        again = dataclasses.replace(self, page=None, serve=False, port=None, json=False, all=False, scaling=False)
        command = shlex.join(["onefold", "plan", *again.arguments()])
        if self.config is not None:
            return view_of(self._of_module(), self.tokens, command)
        question = self.question()
        return view(question, self.subject, self._settings(question.hardware), self.tokens, command)

    def _scaling(self) -> int:
        if self.config is not None:
            raise ConfigError("--scaling is for shapes: give --model, or --layers with --hidden and --heads")
        question = self.question()
        found = throughput.curves(question, self.tp)
        if self.json:
            sys.stdout.write(json.dumps(throughput.as_dict(self.name, question, found), indent=1) + "\n")
        else:
            throughput.show(self.name, question, found)
        return 0

    def _check_tokens(self) -> None:
        if self.tokens is not None and not 0 < self.tokens <= MOST_TOKENS:
            raise ConfigError(f"--tokens {self.tokens:g} is not a positive number up to {MOST_TOKENS:g}")

    def answer(self) -> Plan:
        if self.config is not None:
            return self._of_module()
        question = self.question()
        settings = self._settings(question.hardware).text
        return answer(question, self.subject, settings, self.tokens, every_row=self.all or self.json)

    def _settings(self, machine: Hardware) -> Settings:
        return Settings(self.precision, self._master(machine), self.optimizer, self.lora, self.optimizer_state)

    def _master(self, machine: Hardware) -> Master:
        """The master that was asked for, or that a run has on this machine."""
        return self.master or ("fp32" if self.params is not None else usual_master(self.precision, machine))

    @property
    def subject(self) -> str:
        return self.name if self.params is None else "a bare count"

    def question(self) -> Question:
        shape = self.shape()
        if (shape is None) == (self.params is None):
            raise ConfigError("which model? give one of --params, --model, --layers with --hidden, or --config")
        if self.params is not None and (self.seq or self.vocab or self.activations or self.sequence != 1):
            raise ConfigError("--seq, --vocab, --activations and --sequence need a shape: a bare count has none")
        if self.params is not None and not 1 <= self.params < 1e16:
            raise ConfigError(f"--params {self.params:g} is not a number of parameters between 1 and 1e16")
        if self.lora and named_cost(self.optimizer).whole:
            raise ConfigError(f"lora={self.lora} is planned with element-wise optimizers, not with {self.optimizer}")
        machine = self.machine()
        widths = widths_of(self.precision, self._master(machine))
        if self.micro_batches > 1 and widths.narrow:
            widths = widths._replace(grad=4)
        return Question(
            work=Work(
                widths=widths,
                numel=None if self.params is None else int(self.params),
                shape=shape,
                bucket_bytes=self._bucket_bytes(),
                lora=self.lora,
                tile=self.tile,
                auto_wire=True,
            ),
            ranks=self.ranks,
            hardware=machine,
            cost=named_cost(self.optimizer, self.optimizer_state),
            tp=self.tp or None,
            pp=self.pp,
            replica=self.replica,
            sequence=self.sequence,
            batch=self.batch,
            micro_batches=self.micro_batches,
            max_global_batch=self.max_global_batch,
            activations=self.activations,
            prefetch=self.prefetch,
            reshard_after_forward=self.reshard_after_forward,
            in_backward=self.step_in_backward,
            compiled=self.compile,
            stage=self.stage,
            optimizer_tier=_tier(self.offload),
            parameters_tier=_tier(self.offload_parameters),
        )

    def machine(self) -> Hardware:
        if self.memory_gb is not None and not 0 < self.memory_gb < 1e9:
            raise ConfigError(f"--memory-gb {self.memory_gb:g} is not a positive number below 1e9")
        for flag, rate in (("--node-link-gb", self.node_link_gb), ("--network-gb", self.network_gb)):
            if rate is not None and not 1e-6 <= rate < 1e6:
                raise ConfigError(f"{flag} {rate:g} is not a rate from 1e-6 to 1e6 GB/s")
        memory = None if self.memory_gb is None else int(self.memory_gb * 1e9)
        if self.hardware != "measure":
            found = hardware(self.hardware, memory)
        else:
            from onefold.planner.measure import measured

            found = measured()
            found = found if memory is None else dataclasses.replace(found, memory_bytes=memory)
        node_link = found.node_link if self.node_link_gb is None else self.node_link_gb * 1e9
        nic_rate = found.nic_rate if self.network_gb is None else self.network_gb * 1e9 / found.nics
        return dataclasses.replace(found, node_link=node_link, nic_rate=nic_rate)

    def _bucket_bytes(self) -> int:
        return bucket_bytes(self.bucket_mb)

    def _of_module(self) -> Plan:
        for_shapes = (
            "stage", "offload", "offload_parameters", "node_link_gb", "network_gb", "lora", "step_in_backward",
            "compile", "tile", "tp", "pp", "replica", "sequence", "params", "model", "layers", "hidden", "heads",
        )  # fmt: skip
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
        import torch

        from onefold.cli.subject import policy
        from onefold.planner.plan import plan

        with torch.device("meta"):
            model = self.build()
        return plan(
            model, self.sample(self.batch or 1), ranks=self.ranks, hardware=self.machine(), optimizer=self.optimizer,
            optimizer_state=self.optimizer_state, tokens=self.tokens, max_global_batch=self.max_global_batch,
            micro_batches=self.micro_batches,
            activations="checkpoint" if self.activations == "checkpoint" else "keep",
            precision=policy(self.precision, self.master), bucket_bytes=self._bucket_bytes(), prefetch=self.prefetch,
            reshard_after_forward=self.reshard_after_forward,
        )  # fmt: skip


def _tier(asked: OnTier | None) -> str | None:
    return "device" if asked == "none" else asked
