"""The DeepSpeed configurations in the repositories of Axolotl, Accelerate and Transformers: their keys and values, put
together from what several of them share, and what they ask of Onefold. Some files have been there in two forms, which
are both here; what is marked `old` is there no more."""

from __future__ import annotations

from typing import Any, NamedTuple

import onefold

AUTO = "auto"
CPU = {"device": "cpu", "pin_memory": True}
NVME = {**CPU, "nvme_path": "/nvme"}  # which is not used: the device is the CPU
SCALE = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
BATCH = {
    "gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO, "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO, "wall_clock_breakdown": False,
}  # fmt: skip
HOST = onefold.Offload(optimizer="host")
ALL_ON_HOST = onefold.Offload(optimizer="host", parameters="host")

# -- Axolotl

EITHER = {
    "bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO, "auto_cast": False, **SCALE, "initial_scale_power": 32},
}  # fmt: skip
BF16 = {"bf16": {"enabled": True}}
COMPILED = {"compile": {"disable": False, "backend": "inductor"}}
ADAMW = {
    "optimizer": {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}},
}  # fmt: skip
ON_CPU = {
    "stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True,
}  # fmt: skip
OWN_OPTIMIZER = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}


def stage3(size: float, prefix: str = "stage3_", **more: Any) -> dict[str, Any]:
    """A section of stage 3; some files leave the prefix of some keys out."""
    return {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": size,
        "reduce_bucket_size": AUTO, f"{prefix}prefetch_bucket_size": AUTO, f"{prefix}param_persistence_threshold": AUTO,
        f"{prefix}max_live_parameters": size, f"{prefix}max_reuse_distance": size, **more,
    }  # fmt: skip


SAVED_16_BIT = {"stage3_gather_16bit_weights_on_model_save": True}
SAVED_AUTO = {"stage3_gather_16bit_weights_on_model_save": AUTO}
SAVED_FP16 = {"stage3_gather_fp16_weights_on_model_save": True}
MIXED = {
    **stage3(0), "max_live_parameters": 0, "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True,
}  # fmt: skip
for unused in ("stage3_max_live_parameters", "stage3_max_reuse_distance"):
    del MIXED[unused]

# -- Accelerate and Transformers

EITHER_16 = {"fp16": {"enabled": AUTO, **SCALE}, "bf16": {"enabled": AUTO}}
FP16 = {"fp16": {"enabled": True, **SCALE}}
OLD_BF16 = {"bfloat16": {"enabled": AUTO}}
ADAMW_BRIEF = {"optimizer": {"type": "AdamW", "params": {"lr": AUTO, "weight_decay": AUTO}}}
ADAMW_TORCH = {
    "optimizer": {
        "type": "AdamW", "params": {"lr": AUTO, "weight_decay": AUTO, "torch_adam": True, "adam_w_mode": True},
    },
}  # fmt: skip
RATES = {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": RATES}}
DECAY = {"scheduler": {"type": "WarmupDecayLR", "params": {**RATES, "total_num_steps": AUTO}}}
PRINTED = {**BATCH, "steps_per_print": 2000}
ONE = {**PRINTED, "gradient_accumulation_steps": 1}


def replicated(stage: int, bucket: Any = AUTO, **more: Any) -> dict[str, Any]:
    return {
        "stage": stage, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True,
        "reduce_scatter": True, "reduce_bucket_size": bucket, "contiguous_gradients": True, **more,
    }  # fmt: skip


ON_HOST = {"offload_optimizer": CPU}
BOTH = {"offload_optimizer": CPU, "offload_param": CPU}
OLD_ZERO3 = {
    **stage3(1e9, **BOTH, **SAVED_FP16), "sub_group_size": 1e14, "reduce_bucket_size": 0,
    "stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0,
}  # fmt: skip
OLD_NUMBERS = {
    "optimizer": {
        "type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
    "steps_per_print": 2000, "wall_clock_breakdown": False,
}  # fmt: skip


class Shipped(NamedTuple):
    """A section zero_optimization, the rest of the file, and what becomes of both."""

    section: dict[str, Any]
    rest: dict[str, Any]
    stage: int
    precision: str
    offload: onefold.Offload | None

    @property
    def content(self) -> dict[str, Any]:
        return {**self.rest, "zero_optimization": self.section}


AXOLOTL = {
    "zero1": Shipped({"stage": 1, "overlap_comm": True}, {**EITHER, **BATCH}, 1, "fp32", None),
    "zero1, old": Shipped({"stage": 1, "overlap_comm": True}, {**EITHER, **ADAMW, **BATCH}, 1, "fp32", None),
    "zero1_torch_compile": Shipped(
        {"stage": 1, "overlap_comm": True}, {**EITHER, **COMPILED, **BATCH}, 1, "fp32", None
    ),
    "zero2": Shipped(ON_CPU, {**EITHER, **BATCH}, 2, "fp32", HOST),
    "zero2_torch_compile": Shipped(ON_CPU, {**EITHER, **COMPILED, **BATCH}, 2, "fp32", HOST),
    "zero3": Shipped(stage3(0, **SAVED_16_BIT), {**EITHER, **BATCH}, 3, "fp32", None),
    "zero3_bf16": Shipped(stage3(0, **SAVED_16_BIT), {**BF16, **BATCH}, 3, "bf16", None),
    "zero3_bf16, other names": Shipped(
        stage3(0, "", gather_16bit_weights_on_model_save=True), {**BF16, **BATCH}, 3, "bf16", None
    ),
    "zero3_bf16_cpuoffload_all": Shipped(
        {**MIXED, **BOTH}, {**OWN_OPTIMIZER, **BF16, **BATCH}, 3, "bf16", ALL_ON_HOST
    ),
    "zero3_bf16_cpuoffload_params": Shipped(
        {**MIXED, "offload_param": CPU}, {**OWN_OPTIMIZER, **BF16, **BATCH}, 3, "bf16", ALL_ON_HOST
    ),
    "zero3_cpuoffload, old": Shipped(stage3(0, **BOTH, **SAVED_16_BIT), {**EITHER, **BATCH}, 3, "fp32", ALL_ON_HOST),
}  # fmt: skip
ACCELERATE = {
    "sp-alst": Shipped(
        {"stage": 3},
        {**BF16, "gradient_accumulation_steps": 1, "train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO,
         "seq_parallel_communication_data_type": "bf16"}, 3, "bf16", None,
    ),
    "zero_stage1": Shipped(replicated(1), {**FP16, **ADAMW_TORCH, **DECAY, **ONE}, 1, "fp16", None),
    "zero_stage2": Shipped(replicated(2), {**FP16, **ADAMW_TORCH, **DECAY, **ONE}, 2, "fp16", None),
    "zero_stage2_offload": Shipped(
        replicated(2, **ON_HOST), {**FP16, **ADAMW_TORCH, **DECAY, **ONE}, 2, "fp16", HOST
    ),
    "zero_stage3": Shipped(stage3(1e9, **SAVED_AUTO), {**FP16, **ADAMW_BRIEF, **DECAY, **ONE}, 3, "fp16", None),
    "zero_stage3_offload": Shipped(
        stage3(1e9, **BOTH, **SAVED_AUTO), {**FP16, **ADAMW_BRIEF, **DECAY, **ONE}, 3, "fp16", ALL_ON_HOST
    ),
    "tests zero2": Shipped(
        replicated(2, **ON_HOST), {**EITHER_16, **ADAMW_TORCH, **WARMUP, **ONE}, 2, "fp32", HOST
    ),
    "tests zero2_model_only": Shipped(replicated(2, **ON_HOST), {**EITHER_16, **ONE}, 2, "fp32", HOST),
    "tests zero3": Shipped(
        stage3(1e9, offload_optimizer=NVME, offload_param=NVME, **SAVED_AUTO),
        {**EITHER_16, **ADAMW_TORCH, **WARMUP, **ONE}, 3, "fp32", ALL_ON_HOST,
    ),
    "tests zero3_model_only": Shipped(
        stage3(1e9, **BOTH, **SAVED_AUTO), {**EITHER_16, "train_batch_size": 1}, 3, "fp32", ALL_ON_HOST
    ),
}  # fmt: skip
TRANSFORMERS = {
    "zero2": Shipped(replicated(2, 2e8, **ON_HOST), {**EITHER_16, **ADAMW, **WARMUP, **PRINTED}, 2, "fp32", HOST),
    "zero3": Shipped(
        stage3(1e9, **BOTH, **SAVED_16_BIT), {**EITHER_16, **ADAMW, **WARMUP, **PRINTED}, 3, "fp32", ALL_ON_HOST
    ),
    "zero2_bf16, old": Shipped(
        replicated(2, 2e8, **ON_HOST), {**OLD_BF16, **ADAMW, **WARMUP, **PRINTED}, 2, "fp32", HOST
    ),
    "zero3_bf16, old": Shipped(
        stage3(1e9, **BOTH, **SAVED_FP16), {**OLD_BF16, **ADAMW, **WARMUP, **PRINTED}, 3, "fp32", ALL_ON_HOST
    ),
    "zero3, fp16 alone": Shipped(
        {**stage3(1e9, **BOTH, **SAVED_FP16), "sub_group_size": 1e14},
        {"fp16": {"enabled": AUTO, **SCALE}, **ADAMW, **WARMUP, **PRINTED}, 3, "fp32", ALL_ON_HOST,
    ),
    "zero3, old": Shipped(OLD_ZERO3, {**FP16, **OLD_NUMBERS}, 3, "fp16", ALL_ON_HOST),
}  # fmt: skip
SHIPPED = {
    f"{repository}: {name}": one
    for repository, files in (("axolotl", AXOLOTL), ("accelerate", ACCELERATE), ("transformers", TRANSFORMERS))
    for name, one in files.items()
}
