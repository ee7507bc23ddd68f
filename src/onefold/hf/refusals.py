"""What cannot stand beside Onefold in an accelerate or Trainer script. Each is said once, before training."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from onefold import ConfigError, ModelError, OptimizerError, Precision, Zero
from onefold.comm.mesh import Mesh

ENGINES = {
    "deepspeed_plugin": "DeepSpeed", "deepspeed_plugins": "DeepSpeed", "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM", "parallelism_config": "a ParallelismConfig",
    "torch_tp_plugin": "a TorchTensorParallelPlugin",
}  # fmt: skip
VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a ParallelismConfig",
}  # fmt: skip
WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine")
COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}


class TrainingFlags(Protocol):
    """The fields of TrainingArguments that name another engine, or ask for what a sharded model cannot do."""

    fp16_full_eval: bool
    bf16_full_eval: bool

    @property
    def deepspeed(self) -> object: ...

    @property
    def fsdp(self) -> object: ...

    @property
    def n_gpu(self) -> int: ...


def refuse_engines(settings: Mapping[str, Any]) -> None:
    """Raises if the keywords of an Accelerator, or the environment of `accelerate launch`, name another engine."""
    for name, engine in ENGINES.items():
        if settings.get(name) is not None:
            raise ConfigError(
                f"{name} asks for {engine} beside Onefold, and one model has one engine; leave {name} out, or use "
                f"accelerate.Accelerator"
            )
    for variable, engine in VARIABLES.items():
        if os.environ.get(variable, "false").lower() == "true":
            raise ConfigError(
                f"{variable}=true asks for {engine} beside Onefold, and one model has one engine; start the script "
                f"with torchrun, or with an accelerate configuration of distributed_type MULTI_GPU or MULTI_CPU"
            )


def refuse_engine_flags(args: TrainingFlags) -> None:
    """Raises if TrainingArguments ask for another engine."""
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise ConfigError(
                f"TrainingArguments({name}=...) asks for another engine beside Onefold, and one model has one engine; "
                f"leave {name}= out, or use the plain Trainer"
            )


class TrainerWithLoss(Protocol):
    """What a Trainer may compute a loss by, instead of the model's own."""

    compute_loss_func: object
    label_smoother: object
    args: Any


def refuse_untiled(trainer: TrainerWithLoss) -> None:
    """Raises if a Trainer whose loss is to be tiled makes a loss of logits by itself."""
    asked = {
        "compute_loss_func": trainer.compute_loss_func,
        "label_smoothing_factor": trainer.label_smoother,
        "use_liger_kernel": getattr(trainer.args, "use_liger_kernel", False),
    }
    for name, given in asked.items():
        if given:
            raise ConfigError(
                f"tile_loss computes the model's own loss, without logits, and {name} another one; leave one out"
            )


def refuse_flags(args: TrainingFlags) -> None:
    """Raises if TrainingArguments ask for another engine, for DataParallel, or for a dtype that Zero decides."""
    refuse_engine_flags(args)
    for name in ("fp16_full_eval", "bf16_full_eval"):
        if getattr(args, name, False):
            raise ConfigError(
                f"{name}=True casts the model for evaluation, and a sharded model has the dtypes it was sharded with; "
                f"leave it out: with {name[:4]}=True evaluation runs in {name[:4]} anyway"
            )
    if args.n_gpu > 1:
        raise ConfigError(
            f"one process sees {args.n_gpu} GPUs, which the Trainer would use by DataParallel; start one process per "
            f"GPU: torchrun --nproc-per-node {args.n_gpu} script.py"
        )


def refuse_dealt_batches(args: object, mesh: Mesh | None) -> None:
    """Raises if a Trainer's own sampler deals batches to ranks, and a mesh has ranks that read the same ones."""
    strategy = getattr(args, "train_sampling_strategy", None)
    if mesh is not None and "sequence" in (mesh.mesh_dim_names or ()) and strategy == "batch_rebalance":
        raise ConfigError(
            'train_sampling_strategy="batch_rebalance" gives every rank a batch of its own, and ranks over which the '
            'mesh cuts sequences ("sequence") read the same one; use "random" or "group_by_length"'
        )


def refuse_instance(given: tuple[object, object] | None) -> None:
    """Raises if optimizer_cls_and_kwargs holds no class."""
    if given is not None and not isinstance(given[0], type):
        raise OptimizerError(
            f"optimizer_cls_and_kwargs wants a class, found an instance of {type(given[0]).__name__}; give the class "
            f"and its settings, or the instance as optimizers=(optimizer, None)"
        )


def refuse_wrapped(model: nn.Module) -> None:
    """Raises if another engine has the model already."""
    for cls in type(model).__mro__:
        if cls.__name__ in WRAPPERS:
            raise ModelError(
                f"the model is wrapped by {cls.__name__} already, and one model has one engine; prepare the model "
                f"itself"
            )


def with_precision(zero: Zero, mixed_precision: str | None) -> Zero:
    """The settings with the precision that mixed_precision= or the Trainer's bf16 and fp16 flags ask for."""
    if mixed_precision in (None, "no"):
        return zero
    if mixed_precision not in COMPUTE:
        raise ConfigError(f"mixed_precision={mixed_precision!r} is unsupported; use 'no', 'bf16' or 'fp16'")
    found = Precision.of(zero.precision).compute
    if found is COMPUTE[mixed_precision]:
        return zero
    if zero.precision != "fp32":
        raise ConfigError(
            f"mixed_precision={mixed_precision!r} and Zero(precision={zero.precision!r}) ask for two precisions; leave "
            f"one of them out"
        )
    return replace(zero, precision=mixed_precision)
