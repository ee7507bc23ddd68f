"""The optimizer of a run, from its settings: AdamW, or Muon with an AdamW beside it."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.optim.muon import Muon
from onefold.optim.optimizer import Optimizer
from onefold.runtime.engine import engine_of
from onefold.train.run.settings import Settings


def make_optimizer(settings: Settings, model: nn.Module, ranks: int) -> Optimizer:
    """Collective."""
    adam = settings.adam
    in_backward = settings.updates_in_backward(ranks)
    if adam.optimizer == "muon":
        engine = engine_of(model)
        dtype = newton_schulz_dtype(engine.comms.world, engine.device, fast=multiplies_bf16())
        rest = {"lr": adam.lr, "betas": (adam.beta1, adam.beta2), "weight_decay": adam.weight_decay}
        scaling: Any = adam.muon_scaling
        return Muon(
            model, lr=adam.matrices_lr, weight_decay=adam.weight_decay, momentum=adam.muon_momentum,
            adjust_lr_fn=scaling, ns_dtype=dtype, adamw=rest,
            step_in_backward=in_backward, skip_spikes=settings.faults.spikes(),
        )  # fmt: skip
    form: Any = adam.optimizer_state
    return Optimizer(
        model, torch.optim.AdamW, groups=param_groups(settings, model), fused=True, step_in_backward=in_backward,
        state=form, state_seed=settings.steps.seed,
        skip_spikes=settings.faults.spikes(),
    )  # fmt: skip


def newton_schulz_dtype(comm: Comm, device: torch.device, *, fast: bool) -> Literal["bf16", "fp32"]:
    """The dtype of Muon's products, the same on all ranks: on CPUs bf16 only if every rank's multiplies it fast.
    Collective.

    bf16 elsewhere takes several times as long as fp32; and where a CPU cannot multiply it at all, torch finds that out
    at the first product, and multiplies fp32 otherwise from then on."""
    if device.type == "cuda":
        return "bf16"
    rows = comm.all_gather_bytes(bytes([fast]), Label("agree", "the dtype of Newton-Schulz"))
    return "bf16" if all(row == bytes([True]) for row in rows) else "fp32"


def multiplies_bf16() -> bool:
    """Whether this CPU has instructions that multiply bf16. (x86; others have not been measured.)"""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def newton_schulz_of(optimizer: Optimizer) -> str | None:
    """The dtype of Newton-Schulz of a run's optimizer; None if that is not Muon."""
    return next((group["ns_dtype"] for group in optimizer.param_groups if "ns_dtype" in group), None)


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
