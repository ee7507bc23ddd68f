"""The optimizer of a run, from its settings: AdamW, or Muon with an AdamW beside it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from onefold.optim.muon import Muon
from onefold.optim.optimizer import Optimizer
from onefold.runtime.engine import engine_of
from onefold.train.run.settings import Settings


def make_optimizer(settings: Settings, model: nn.Module, ranks: int) -> Optimizer:
    """Collective."""
    adam = settings.adam
    in_backward = settings.updates_in_backward(ranks)
    if adam.optimizer == "muon":
        rest = {"lr": adam.lr, "betas": (adam.beta1, adam.beta2), "weight_decay": adam.weight_decay}
        scaling: Any = adam.muon_scaling
        return Muon(
            model, lr=adam.matrices_lr, weight_decay=adam.weight_decay, momentum=adam.muon_momentum,
            adjust_lr_fn=scaling, ns_dtype=newton_schulz_dtype(engine_of(model).device), adamw=rest,
            step_in_backward=in_backward, skip_spikes=settings.faults.spikes(),
        )  # fmt: skip
    form: Any = adam.optimizer_state
    return Optimizer(
        model, torch.optim.AdamW, groups=param_groups(settings, model), fused=True, step_in_backward=in_backward,
        state=form, state_seed=settings.steps.seed,
        skip_spikes=settings.faults.spikes(),
    )  # fmt: skip


def newton_schulz_dtype(device: torch.device) -> Literal["bf16", "fp32"]:
    """The dtype of Muon's products: fp32 on a CPU, which multiplies it faster. Some CPUs cannot multiply bf16 at all;
    torch finds that out at the first product, and multiplies fp32 otherwise from then on."""
    return "bf16" if device.type == "cuda" else "fp32"


def param_groups(settings: Settings, model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, vectors (biases, norms) without."""
    adam = settings.adam
    common = {"lr": adam.lr, "betas": (adam.beta1, adam.beta2)}
    decayed = [param for param in model.parameters() if param.ndim >= 2]
    undecayed = [param for param in model.parameters() if param.ndim < 2]
    return [
        {"params": decayed, **common, "weight_decay": adam.weight_decay},
        {"params": undecayed, **common, "weight_decay": 0.0},
    ]


def lr_ratios(settings: Settings, optimizer: Optimizer) -> list[float]:
    """What the learning rate of the schedule is multiplied by, for each param group."""
    adam = settings.adam
    return [adam.matrices_lr / adam.lr if "matrices" in group else 1.0 for group in optimizer.param_groups]
