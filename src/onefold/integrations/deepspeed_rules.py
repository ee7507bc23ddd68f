"""The rule of each key of a DeepSpeed configuration: what it does to the settings, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onefold.integrations.deepspeed_reading import OPTIMIZERS, Outcome, Reading
from onefold.integrations.deepspeed_schedules import KNOWN

DEVICES = {"none": None, "cpu": "host", "nvme": "disk"}
DTYPES = {"fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}

Said = tuple[Outcome, str]
Rule = Callable[[Reading, str, Any], Said]


def became(text: str) -> Said:
    return Outcome.BECAME, text


def not_needed(text: str) -> Rule:
    return lambda reading, name, value: (Outcome.NOT_NEEDED, text)


def yours(text: str) -> Rule:
    return lambda reading, name, value: (Outcome.YOURS, text)


def refused(text: str) -> Rule:
    return lambda reading, name, value: (Outcome.REFUSED, text)


def unless(usual: Any, text: str, otherwise: str = "that is how Onefold works") -> Rule:
    """Refuses a value other than the usual one."""
    return lambda reading, name, value: (Outcome.NOT_NEEDED, otherwise) if value == usual else (Outcome.REFUSED, text)


def stage(reading: Reading, name: str, value: Any) -> Said:
    if value not in (0, 1, 2, 3) or isinstance(value, bool):
        raise ValueError("stages are 0, 1, 2 and 3")
    reading.zero["stage"] = int(value)
    return became(f"stage={int(value)}")


def enabled(compute: str) -> Rule:
    def rule(reading: Reading, name: str, value: Any) -> Said:
        if value is not True:
            return Outcome.NOT_NEEDED, "it is switched off"
        reading.precision["compute"] = "both" if reading.precision.get("compute") else compute
        return became(f'precision="{compute}"')

    return rule


def dtype_of(setting: str) -> Rule:
    def rule(reading: Reading, name: str, value: Any) -> Said:
        if value is None:
            return Outcome.NOT_NEEDED, "Onefold's default"
        reading.precision[setting] = DTYPES[value]
        return became(f'Precision({setting}="{DTYPES[value]}") in 16 bits')

    return rule


def scale(setting: str, of: Callable[[Any], Any] = float) -> Rule:
    def rule(reading: Reading, name: str, value: Any) -> Said:
        reading.loss_scale[setting] = of(value)
        return became(f"LossScale({setting}={reading.loss_scale[setting]!r}) for fp16")

    return rule


def device(which: str) -> Rule:
    def rule(reading: Reading, name: str, value: Any) -> Said:
        tier = DEVICES[value]
        if tier is None:
            return Outcome.NOT_NEEDED, "nothing is offloaded"
        reading.offload[which] = tier
        return became(f'Offload({which}="{tier}")')

    return rule


def switched_offload(which: str) -> Rule:
    return lambda reading, name, value: device(which)(reading, name, "cpu" if value else "none")


def path_of_disk(reading: Reading, name: str, value: Any) -> Said:
    if value is None:
        return Outcome.NOT_NEEDED, "nothing is on disk"
    reading.offload["path"] = str(value)
    return became(f'Offload(path="{value}")')


def number(setting: str, kind: type[int] | type[float], text: str, nothing: Any = None) -> Rule:
    def rule(reading: Reading, name: str, value: Any) -> Said:
        if isinstance(value, bool) or kind(value) != value or value < 0:
            raise ValueError(f"a {kind.__name__} is wanted")
        if value == nothing:
            return Outcome.NOT_NEEDED, "0 is none"
        reading.numbers[setting] = kind(value)
        return became(text.format(kind(value)))

    return rule


def optimizer_type(reading: Reading, name: str, value: Any) -> Said:
    kind = str(value).lower()
    if kind not in OPTIMIZERS:
        return Outcome.REFUSED, f"{value} is none of {', '.join(OPTIMIZERS)}; give your own class to onefold.Optimizer"
    reading.optimizer = kind
    cls = reading.optimizer_class()
    return became(f"torch.optim.{cls.__name__ if cls else kind}" + " (DeepSpeed's Adam is AdamW)" * (kind == "adam"))


def optimizer_setting(reading: Reading, name: str, value: Any) -> Said:
    reading.optimizer_settings[name] = tuple(value) if isinstance(value, list) else value
    return became(f"{name}={reading.optimizer_settings[name]!r}")


def decay_mode(reading: Reading, name: str, value: Any) -> Said:
    reading.decoupled = bool(value)
    return became("torch.optim.AdamW" if value else "torch.optim.Adam, if the type is Adam")


def schedule_type(reading: Reading, name: str, value: Any) -> Said:
    if value not in KNOWN:
        return Outcome.REFUSED, f"{value} is none of {', '.join(KNOWN)}; use a scheduler of torch"
    reading.schedule = value
    return became("schedule.scheduler(optimizer)")


def schedule_setting(reading: Reading, name: str, value: Any) -> Said:
    reading.schedule_settings[name] = value
    return became(f"{name}={value!r}")


BUFFERS = not_needed("units have at most 128 MiB and buffers are constant; bucket_bytes= changes that")
SMALL = not_needed("small blocks share units; keep_whole= keeps small units replicated")
KEPT = not_needed("units are resharded after forward; reshard_after_forward=False keeps them")
EXPORT = not_needed("onefold.export and full_state_dict give whole weights at any stage")
ALWAYS = not_needed("Onefold always does that")
COPIES = not_needed("buffers are pinned and sized automatically")
QUANTIZED = unless(False, "weights and gradients are not quantised on the wire")
MONITOR = yours("write what you like from your loop")

RULES: dict[str, Rule] = {
    "train_batch_size": number("global_batch_size", int, "{} samples per step"),
    "train_micro_batch_size_per_gpu": number("micro_batch_size", int, "{} samples of a micro-batch"),
    "gradient_accumulation_steps": number("micro_batches", int, "{} micro-batches, with onefold.accumulate"),
    "gradient_clipping": number("clip_norm", float, "optimizer.clip_grad_norm({})", nothing=0),
    "bf16.enabled": enabled("bf16"),
    "bf16.immediate_grad_update": not_needed("gradients are reduced as they arrive"),
    "bf16.check_grad_overflow": not_needed("clip_grad_norm finds gradients that are not finite"),
    "bf16.bf16_master_weights_and_grads": unless(False, "the master is fp32"),
    "bf16.bf16_optimizer_states": unless(False, "optimizer state is fp32 here; give state='bf16' to onefold.Optimizer"),
    "fp16.enabled": enabled("fp16"),
    "fp16.auto_cast": not_needed("inputs are cast; Precision(cast_inputs=…) says which"),
    "fp16.loss_scale": unless(0, "a constant loss scale; Onefold's falls and grows", "the loss scale falls and grows"),
    "fp16.initial_scale_power": scale("initial", lambda power: 2.0 ** int(power)),
    "fp16.loss_scale_window": scale("growth_interval", int),
    "fp16.hysteresis": scale("hysteresis", int),
    "fp16.consecutive_hysteresis": unless(False, "hysteresis counts overflows since the scale last grew"),
    "fp16.min_loss_scale": scale("floor"),
    "fp16.fp16_master_weights_and_grads": unless(False, "the master is fp32"),
    "amp": refused("apex's amp; use bf16 or fp16"),
    "communication_data_type": dtype_of("wire"),
    "data_types.grad_accum_dtype": dtype_of("grad"),
    "optimizer.type": optimizer_type,
    "optimizer.params.torch_adam": not_needed("it is torch's class"),
    "optimizer.params.adam_w_mode": decay_mode,
    "optimizer.params.bias_correction": unless(True, "Adam without bias correction"),
    "optimizer.params.*": optimizer_setting,
    "optimizer.legacy_fusion": not_needed("kernels are chosen automatically"),
    "scheduler.type": schedule_type,
    "scheduler.params.*": schedule_setting,
    "zero_optimization.stage": stage,
    "zero_optimization.offload_optimizer.device": device("optimizer"),
    "zero_optimization.offload_optimizer.nvme_path": path_of_disk,
    "zero_optimization.offload_optimizer.ratio": unless(1.0, 'a part; Offload(optimizer="auto") fills the device'),
    "zero_optimization.offload_optimizer.super_offload": unless(False, "SuperOffload"),
    "zero_optimization.offload_optimizer.*": COPIES,
    "zero_optimization.offload_param.device": device("parameters"),
    "zero_optimization.offload_param.nvme_path": path_of_disk,
    "zero_optimization.offload_param.*": COPIES,
    "zero_optimization.cpu_offload": switched_offload("optimizer"),
    "zero_optimization.cpu_offload_params": switched_offload("parameters"),
    "zero_optimization.cpu_offload_param": switched_offload("parameters"),
    "zero_optimization.cpu_offload_use_pin_memory": COPIES,
    "zero_optimization.mics_shard_size": unless(-1, "MiCS; shard over a mesh: mesh=onefold.mesh(replica=…, shard=…)"),
    "zero_optimization.mics_hierarchical_params_gather": unless(False, "MiCS; shard over a mesh: mesh=onefold.mesh(…)"),
    "zero_optimization.zero_hpz_partition_size": unless(1, "ZeRO++'s secondary shards"),
    "zero_optimization.zero_quantized_weights": QUANTIZED,
    "zero_optimization.zero_quantized_nontrainable_weights": QUANTIZED,
    "zero_optimization.zero_quantized_gradients": QUANTIZED,
    "zero_optimization.zenflow": refused("ZenFlow"),
    "zero_optimization.ignore_unused_parameters": unless(True, "unused parameters are always allowed"),
    "zero_optimization.elastic_checkpoint": not_needed("checkpoints are read by any number of ranks"),
    "zero_optimization.load_from_fp32_weights": ALWAYS,
    "zero_optimization.legacy_stage1": unless(False, "an old stage 1"),
    **{f"zero_optimization.{name}": BUFFERS for name in (
        "reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "prefetch_bucket_size",
        "stage3_prefetch_bucket_size", "use_multi_rank_bucket_allreduce",
    )},
    **{f"zero_optimization.{name}": SMALL for name in (
        "param_persistence_threshold", "stage3_param_persistence_threshold", "model_persistence_threshold",
        "stage3_model_persistence_threshold", "module_granularity_threshold", "stage3_module_granularity_threshold",
    )},
    **{f"zero_optimization.{name}": KEPT for name in (
        "max_live_parameters", "stage3_max_live_parameters", "max_reuse_distance", "stage3_max_reuse_distance",
    )},
    **{f"zero_optimization.{name}": EXPORT for name in (
        "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save", "gather_fp16_weights_on_model_save",
    )},
    **{f"zero_optimization.{name}": ALWAYS for name in (
        "contiguous_gradients", "overlap_comm", "reduce_scatter", "allgather_partitions", "round_robin_gradients",
        "memory_efficient_linear", "override_module_apply", "parameter_alignment", "pipeline_loading_checkpoint",
        "use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params", "allgather_sequential",
        "stage3_allgather_sequential", "compute_grad_norm",
    )},
    "zero_optimization.log_trace_cache_warnings": not_needed("there is no such cache"),
    "zero_optimization.enable_sanity_checks": ALWAYS,
    "zero_optimization.leaf_module": not_needed("units= names blocks; ranks may skip experts"),
    "zero_allow_untested_optimizer": not_needed("a trial admits optimizers that are element-wise"),
    "zero_force_ds_cpu_optimizer": not_needed("where state is on the host, Onefold's own kernels update it"),
    "prescale_gradients": not_needed("gradients are averaged without overflow: 16-bit sums run in fp32"),
    "gradient_predivide_factor": not_needed("gradients are averaged without overflow: 16-bit sums run in fp32"),
    "sparse_gradients": unless(False, "sparse gradients"),
    "disable_allgather": unless(False, "all-gathers are not replaced by broadcasts"),
    "dataloader_drop_last": yours("the data loader is yours"),
    "seed": yours("torch.manual_seed"),
    "steps_per_print": MONITOR, "dump_state": MONITOR, "memory_breakdown": yours("onefold.memory"),
    "wall_clock_breakdown": yours("onefold.profile shows where a step goes"),
    "flops_profiler": yours("onefold.profile shows where a step goes"), "comms_logger": yours("onefold.traffic"),
    "tensorboard": MONITOR, "wandb": MONITOR, "comet": MONITOR, "csv_monitor": MONITOR, "monitor_config": MONITOR,
    "autotuning": yours("onefold.plan says what fits and what it costs"),
    "compile": yours("compile=True compiles blocks; torch.compile(model) works too"),
    "activation_checkpointing": yours('activations="checkpoint" or "checkpoint+host" computes blocks again'),
    "aio": not_needed("reads and writes of files are tuned automatically"),
    "checkpoint": yours("onefold.save"), "use_node_local_storage": yours("onefold.save"),
    "seq_parallel_communication_data_type": not_needed("sequences are not cut over ranks"),
    **{name: refused("Onefold has nothing like it") for name in (
        "sparse_attention", "compression_training", "data_efficiency", "curriculum_learning", "elasticity",
        "eigenvalue", "progressive_layer_drop", "quantize_training", "hybrid_engine", "weight_quantization", "nebula",
        "data_efficiency_config",
    )},
    "pipeline": refused("pipelines run in your script: docs/pipeline.md"),
    "tensor_parallel": refused("give a mesh with an axis tp: docs/parallelism.md"),
    "sequence_parallel_size": unless(1, "sequences are not cut over ranks"),
}  # fmt: skip
RULES |= {f"bfloat16{path.removeprefix('bf16')}": rule for path, rule in RULES.items() if path.startswith("bf16.")}
SECTIONS = {
    "amp", "flops_profiler", "comms_logger", "tensorboard", "wandb", "comet", "csv_monitor", "monitor_config",
    "compile", "activation_checkpointing", "aio", "checkpoint", "sparse_attention", "compression_training",
    "data_efficiency", "curriculum_learning", "elasticity", "eigenvalue", "progressive_layer_drop",
    "quantize_training", "hybrid_engine", "weight_quantization", "nebula", "autotuning", "pipeline", "tensor_parallel",
    "zero_optimization.zenflow", "zero_optimization.leaf_module",
}  # fmt: skip
