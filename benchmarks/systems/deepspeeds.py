"""DeepSpeed's stages 1 to 3, on a CPU, on a GPU, and with its optimizer on the host. An extra: onefold[peers]."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fill import filler, real
from benchmarks.systems.loop import Ready, numel, recompute_blocks
from benchmarks.work import Work


def deepspeed(work: Work, *, stage: int) -> Ready:
    import deepspeed as library

    library.logger.setLevel(logging.ERROR)
    settings = configuration(work, stage)
    count = numel(work.blank())
    model = partitioned(work, settings) if stage == 3 else whole(work)
    if work.recompute:
        recompute_blocks(model)
    engine, *_ = library.initialize(model=model, optimizer=optimizer(work, model), config=settings)

    def step(tokens: Tensor) -> Tensor:
        total = torch.zeros((), device=tokens.device)
        for rows in tokens.chunk(work.micro_batches):
            loss: Tensor = engine(rows[:, :-1], rows[:, 1:])
            engine.backward(loss)  # divided by their number there
            engine.step()
            total += loss.detach() / work.micro_batches
        return total

    return Ready(step, count)


def configuration(work: Work, stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True}
    if work.device == "cuda":
        zero["contiguous_gradients"] = True
    if work.away:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": work.batch,
        "gradient_accumulation_steps": work.micro_batches,
        "bf16": {"enabled": work.precision == "bf16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def whole(work: Work) -> nn.Module:
    return real(work.blank(), on=work.target, maker=work.target)


def partitioned(work: Work, settings: dict[str, Any]) -> nn.Module:
    """Built in parts, so that the model is never whole; each module is gathered once to get its values."""
    import deepspeed as library

    with library.zero.Init(config_dict_or_path=settings):
        model = work.model()
    fill = filler(model, work.target)
    for module in model.modules():
        if own := list(module.parameters(recurse=False)):
            with library.zero.GatheredParameters(own, modifier_rank=0):
                fill(module)
    return model


def optimizer(work: Work, model: nn.Module) -> torch.optim.Optimizer:
    """DeepSpeed's own where it has one for the device."""
    if work.device == "cpu":
        return torch.optim.AdamW(model.parameters(), fused=True, **work.adamw)
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    if work.away:
        return DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **work.adamw)
    return FusedAdam(model.parameters(), **work.adamw)
