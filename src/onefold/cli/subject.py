"""Options that commands share: which model (by name, by shape or by its config.json), and how it is trained."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from onefold.cli.tables import console
from onefold.cost.activations import check_policy
from onefold.cost.case import Choice
from onefold.cost.decoders import Decoder
from onefold.cost.estimate import refuse_unfit
from onefold.cost.families import config_file, model_shape
from onefold.cost.hardware import Hardware
from onefold.cost.run_summary import run_summary
from onefold.cost.search import Question
from onefold.cost.shapes import Shape
from onefold.cost.states import named_cost
from onefold.cost.work import Work
from onefold.errors import ConfigError
from onefold.settings.limited import read_json
from onefold.settings.offload import Offload
from onefold.settings.widths import widths_of

if TYPE_CHECKING:  # a plan by formula needs no torch
    from torch import nn

    from onefold.settings.precision import Precision
    from onefold.settings.zero import Zero

MOST = 10**6  # of ranks, batches and steps: what is beyond is a mistake
Master = Literal["fp32", "split"]
Compute = Literal["fp32", "bf16", "fp16"]
Policy = Literal["keep", "checkpoint", "checkpoint+host", "partition", "partition+host"]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model."""

    model: str | None = None
    """By name: gpt2, gpt2-1.5b, 8b, 100b, 128b, 1t, gpt-tiny …; to plan also llama-3-8b, qwen3-8b, mixtral-8x7b …, or
    the path of a Hugging Face config.json or its folder."""

    config: Path | None = None
    """A Hugging Face config.json, or the folder that holds it (needs transformers)."""

    layers: int | None = None
    """Blocks of a GPT by shape; needs --hidden and --heads."""

    hidden: int | None = None
    """Hidden size of a GPT by shape."""

    heads: int | None = None
    """Attention heads of a GPT by shape."""

    seq: int | None = None
    """Tokens per sequence."""

    vocab: int | None = None
    """Vocabulary size."""

    def shape(self) -> Shape | None:
        """The shape of a GPT, if it is one."""
        sizes = {name: getattr(self, name) for name in ("layers", "hidden", "heads", "seq", "vocab")}
        given = {name: size for name, size in sizes.items() if size is not None}
        if self.model is not None:
            return dataclasses.replace(model_shape(self.model), **given)
        if self.config is not None or not given.keys() & {"layers", "hidden", "heads"}:
            return None
        missing = [name for name in ("layers", "hidden", "heads") if name not in given]
        if missing:
            raise ConfigError(f"a shape needs --layers, --hidden and --heads; missing: {', '.join(missing)}")
        return Shape(**given)

    @property
    def name(self) -> str:
        if self.config is not None:
            return str(self.config)
        if self.model is not None:
            return self.model
        return f"GPT {self.layers}×{self.hidden}"

    def arguments(self) -> list[str]:
        """The command line that gives these settings."""
        given: list[str] = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                name = field.name.replace("_", "-")
                flag = f"--no-{name}" if value is False else f"--{name}"
                given += [flag] if isinstance(value, bool) else [flag, _word(value)]
        return given

    def build(self) -> nn.Module:
        """The module, on torch's default device."""
        shape = self.shape()
        if isinstance(shape, Decoder):
            raise ConfigError(
                f"{self.name} is known by its shape alone, which is enough to plan; to build it give --config with a "
                f"Hugging Face config.json (needs transformers), or the name of a GPT"
            )
        if shape is not None:
            from onefold.train.run.model import GPT

            return GPT(shape)
        if self.config is not None:
            return hugging_face(self.config)
        raise ConfigError("which model? give --model NAME, --layers with --hidden and --heads, or --config FILE")

    def sample(self, batch: int) -> Any:
        """A sample input of the model."""
        import torch

        shape = self.shape()
        if shape is not None:
            tokens = torch.zeros(batch, shape.seq, dtype=torch.long)
            return tokens, tokens
        length = self.seq or 512
        tokens = torch.zeros(batch, length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens}


@dataclass(frozen=True, kw_only=True)
class TrialOptions(ModelOptions):
    """How a model is trained for a few steps."""

    stage: int = 3
    """ZeRO stage 0, 1, 2 or 3."""

    master: Literal["fp32", "split"] | None = None
    """With 16 bits: the fp32 master that the optimizer updates."""

    tp: int = 1
    """Tensor-parallel degree: ranks that split the tensors of a GPT."""

    pp: int = 1
    """Pipeline stages of a GPT; micro-batches run in the order of 1F1B."""

    micro_batches: int = 1
    """Micro-batches per step (gradient accumulation); with --pp one for each stage at least."""

    activations: Policy = "keep"
    """What blocks keep for backward: all activations, their inputs (checkpoint), or with --tp a part of their inputs
    (partition); +host keeps inputs in host memory."""

    optimizer: str = "adamw"
    """adamw, adam, sgd, momentum, adagrad, rmsprop, or muon with an AdamW beside it."""

    optimizer_state: Literal["fp32", "bf16", "8bit"] = "fp32"
    """The form of the moments of adamw, adam or momentum; 8bit and bf16 are rounded at random."""

    bucket_mb: float = 128.0
    """Largest unit (flat buffer of parameters), in MiB."""

    prefetch: int = 1
    """Stage 3: units that are all-gathered ahead of their use."""

    reshard_after_forward: bool = True
    """Stage 3: reshard after forward. If not, parameters stay unsharded until backward, and a third less is sent."""

    offload: Literal["host", "disk", "auto"] | None = None
    """Keep optimizer state on the host or on disk; auto offloads only units that do not fit on the device."""

    offload_parameters: Literal["host", "disk"] | None = None
    """Stage 3, with --offload: keep the parameter shards on the host or on disk."""

    offload_path: Path | None = None
    """With disk or auto: a folder on a fast disk of this node, for scratch files."""

    json: bool = False
    """Print the figures as JSON."""

    def tell_plan(self, precision: Compute, ranks: int, batch: int, machine: Hardware) -> None:
        """Prints what is planned, in three lines, where the model is known by its shape; raises where it cannot fit."""
        shape = self.shape()
        if shape is None or self.offload == "auto":
            return
        widths = widths_of(precision, self.master or usual_master(precision, machine))
        if self.micro_batches > 1 and widths.narrow:
            widths = widths._replace(grad=4)
        work = Work(widths=widths, shape=shape, bucket_bytes=bucket_bytes(self.bucket_mb), auto_wire=True)
        question = Question(
            work=work, ranks=ranks, hardware=machine, cost=named_cost(self.optimizer, self.optimizer_state),
            tp=self.tp, pp=self.pp, micro_batches=self.micro_batches, prefetch=self.prefetch,
            reshard_after_forward=self.reshard_after_forward,
        )  # fmt: skip
        choice = Choice(
            self.stage, optimizer=self.offload or "device", parameters=self.offload_parameters or "device",
            activations=self.activations,
        )  # fmt: skip
        found = question.price(choice, question.grid(), batch)
        refuse_unfit(found)
        for sentence in () if self.json else run_summary(found):
            console().print(sentence, markup=False, soft_wrap=False)

    def zero(self, precision: Compute, *counts: str) -> Zero:
        """The settings of shard(); raises ConfigError for settings that cannot be, before anything runs."""
        for name in (*counts, "tp", "pp", "micro_batches"):
            if not 1 <= getattr(self, name) <= MOST:
                raise ConfigError(f"{name}={getattr(self, name)} is not a positive whole number up to {MOST:,}")
        from onefold.settings.zero import Zero

        named_cost(self.optimizer, self.optimizer_state)
        check_policy(self.activations, self.tp)
        return Zero(
            stage=self.stage, precision=policy(precision, self.master), bucket_bytes=bucket_bytes(self.bucket_mb),
            prefetch=self.prefetch, reshard_after_forward=self.reshard_after_forward, activations=self.activations,
            offload=Offload(optimizer=self.offload, parameters=self.offload_parameters, path=self.offload_path),
        )  # fmt: skip


def hugging_face(path: Path) -> nn.Module:
    """A model of transformers from its configuration alone, with no weights."""
    file = config_file(path)
    if not file.is_file():
        raise ConfigError(f"{file} is not there; give a config.json or the folder that holds it")
    fields = read_json(file)
    if not isinstance(fields, dict) or not isinstance(fields.get("model_type"), str):
        raise ConfigError(f"{file} names no model_type; is it a Hugging Face config.json?")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("a Hugging Face config needs transformers: pip install transformers") from error
    kind = fields.pop("model_type")
    try:
        config = AutoConfig.for_model(kind, **fields)
        return AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers and its validators raise many kinds
        reason = str(error).strip().splitlines()[-1].strip()[:160] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{file}: model_type {kind!r} cannot be built as a language model: {reason}") from error


def bucket_bytes(mebibytes: float) -> int:
    if not 1e-4 <= mebibytes < 1e9:
        raise ConfigError(f"--bucket-mb {mebibytes:g} is not a size in MiB; try 32")
    return int(mebibytes * (1 << 20))


def _word(value: object) -> str:
    """A setting as a user would write it: 3e+11 for 300000000000.0, if that is the same number."""
    short = f"{value:.12g}" if isinstance(value, float) else ""
    return short if short and float(short) == value else str(value)


def usual_master(precision: Compute, machine: Hardware) -> Master:
    """The master of 16-bit parameters where none is asked for, as Precision decides it."""
    return "split" if machine.device == "cuda" and precision == "bf16" else "fp32"


def policy(precision: Compute, master: Master | None) -> Precision:
    """The Precision of these settings; fp32 parameters are their own master."""
    from onefold.settings.precision import Precision

    return Precision(compute=precision, master=None if precision == master else master)
