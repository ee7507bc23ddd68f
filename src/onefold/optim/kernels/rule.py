"""One step of Adam, AdamW or SGD in numbers: what an update kernel needs, from torch's settings and torch's state.

The kernels (one for CUDA, one for the CPU) support torch's three most used classes. Their state has torch's own names
and shapes, so that torch's class can continue from a kernel's state, and a kernel from torch's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.cost.layout import ALIGN

KNOWN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
MOMENTS = {"exp_avg": 0, "exp_avg_sq": 1, "momentum_buffer": 0}  # torch's names: 0 a first moment, 1 a second one
SCALE = "_scale"  # behind the name of a moment in 8 bits: the scales of its blocks
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}  # forms of state, and dtypes of moments
PLAIN_SETTINGS = ("amsgrad", "maximize", "capturable", "differentiable", "dampening")  # supported when false or zero


class Rule(NamedTuple):
    """The arithmetic of this step, the same for every element of a vector."""

    adam: bool  # else SGD
    fused: bool  # torch's fused Adam rounds the second moment elsewhere
    decay: float
    size: float  # of the step: the learning rate, for Adam divided by the first bias correction
    beta1: float  # of SGD: the momentum
    first: Tensor | None  # moments, where there are any
    second: Tensor | None = None
    beta2: float = 0.0
    root: float = 1.0  # of the second bias correction
    eps: float = 0.0
    decoupled: bool = False  # AdamW: weight decay shrinks the parameter, not through the gradient
    shrink: float = 1.0
    nesterov: bool = False

    def at(self, start: int, stop: int) -> Rule:
        """The rule for some elements of the vector."""
        first = self.first if self.first is None else self.first[start:stop]
        return self._replace(first=first, second=self.second if self.second is None else self.second[start:stop])


def knows(cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> bool:
    """Whether the kernels support a class with these settings."""
    return cls in KNOWN and not any(group.get(key) for key in PLAIN_SETTINGS)


def moments_of(cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> tuple[str, ...]:
    """The moments that a class keeps with these settings, by torch's names."""
    if cls is torch.optim.SGD:
        return ("momentum_buffer",) if float(group["momentum"]) else ()
    return ("exp_avg", "exp_avg_sq")


def next_step(
    cls: type[torch.optim.Optimizer],
    group: dict[str, Any],
    state: dict[str, Any],
    numel: int,
    device: torch.device,
    form: str = "fp32",
) -> Rule:
    """The rule of the next step, and counts it in `state`, torch's own of this class, which is made if it is empty.
    In a small `form` the moments have that form, and SGD counts its steps too."""
    lr, decay, fused = float(group["lr"]), float(group["weight_decay"]), bool(group.get("fused"))
    if "step" not in state and (cls is not torch.optim.SGD or form != "fp32"):
        state["step"] = torch.zeros((), dtype=torch.float32)
    for key in moments_of(cls, group):
        if state.get(key) is None:
            state |= _moment(key, numel, device, form)
    if "step" in state:
        state["step"] += 1
    if cls is torch.optim.SGD:
        momentum = float(group["momentum"])
        first = state["momentum_buffer"] if momentum else None
        return Rule(False, fused, decay, lr, momentum, first, nesterov=bool(group["nesterov"]))
    count, (beta1, beta2) = float(state["step"]), map(float, group["betas"])
    size, root = lr / (1 - beta1**count), (1 - beta2**count) ** 0.5
    decoupled = cls is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
    shrink = 1 - lr * decay if decoupled else 1.0
    first, second = state["exp_avg"], state["exp_avg_sq"]
    return Rule(True, fused, decay, size, beta1, first, second, beta2, root, float(group["eps"]), decoupled, shrink)


def undo_count(state: dict[str, Any]) -> None:
    """Takes back the count of a step in which the device wrote nothing."""
    if "step" in state:
        state["step"] -= 1


def _moment(key: str, numel: int, device: torch.device, form: str) -> dict[str, Tensor]:
    """A moment of zeros. SGD's is -0 where it can be: -0 plus a gradient is that gradient, to its sign."""
    zero = -0.0 if key == "momentum_buffer" and form != "8bit" else 0
    made = {key: torch.full((numel,), zero, dtype=STORED[form], device=device)}
    if form == "8bit":
        made[key + SCALE] = torch.zeros(numel // ALIGN, dtype=torch.uint8, device=device)
    return made
