"""One step of Adam, AdamW or SGD in numbers: what an update kernel needs, from torch's settings and torch's state.

The kernels (one for CUDA, one for the CPU) support torch's three most used classes. Their state has torch's own names
and shapes, so that torch's class can continue from a kernel's state, and a kernel from torch's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

KNOWN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
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


def next_step(
    cls: type[torch.optim.Optimizer], group: dict[str, Any], state: dict[str, Any], numel: int, device: torch.device
) -> Rule:
    """The rule of the next step, and counts it in `state`, torch's own of this class, which is made if it is empty."""
    lr, decay, fused = float(group["lr"]), float(group["weight_decay"]), bool(group.get("fused"))
    if cls is torch.optim.SGD:
        momentum = float(group["momentum"])
        if momentum and state.get("momentum_buffer") is None:
            state["momentum_buffer"] = _moment(numel, device, -0.0)  # -0 plus a gradient is that gradient, to its sign
        first = state["momentum_buffer"] if momentum else None
        return Rule(False, fused, decay, lr, momentum, first, nesterov=bool(group["nesterov"]))
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"], state["exp_avg_sq"] = _moment(numel, device), _moment(numel, device)
    state["step"] += 1
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


def _moment(numel: int, device: torch.device, value: float = 0.0) -> Tensor:
    return torch.full((numel,), value, dtype=torch.float32, device=device)
