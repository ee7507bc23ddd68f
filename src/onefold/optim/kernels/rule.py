"""One step of Adam, AdamW or SGD in numbers: what a kernel needs of torch's settings, and the state that torch keeps.

The kernels (one for CUDA, one for the CPU) know torch's three most used classes. They step for them: the state has
torch's own names and shapes, so that a class and a kernel can go on where the other has stopped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

KNOWN = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
PLAIN_SETTINGS = ("amsgrad", "maximize", "capturable", "differentiable", "dampening")  # known when false or zero


class Rule(NamedTuple):
    """What happens to every element of a slice in this step."""

    adam: bool  # else SGD
    fused: bool  # torch's fused Adam rounds the second moment elsewhere
    decay: float
    size: float  # of the step
    beta1: float  # of SGD: the momentum
    first: Tensor | None  # moments, where there are any
    second: Tensor | None = None
    beta2: float = 0.0
    root: float = 1.0  # corrects the second moment, which is too small in the first steps
    eps: float = 0.0
    decoupled: bool = False  # AdamW: the value shrinks, and the gradient knows nothing of it
    shrink: float = 1.0
    nesterov: bool = False

    def at(self, start: int, stop: int) -> Rule:
        """The same for some elements of the slice."""
        first = self.first if self.first is None else self.first[start:stop]
        return self._replace(first=first, second=self.second if self.second is None else self.second[start:stop])


def knows(cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> bool:
    """Whether a class with these settings is one of the known rules."""
    return cls in KNOWN and not any(group.get(key) for key in PLAIN_SETTINGS)


def next_step(
    cls: type[torch.optim.Optimizer], group: dict[str, Any], state: dict[str, Any], numel: int, device: torch.device
) -> Rule:
    """The rule of this step, which counts from now on. `state` is the class's own, and is made if there is none."""
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


def take_back_count(state: dict[str, Any]) -> None:
    """A step that the device did not take does not count."""
    if "step" in state:
        state["step"] -= 1


def _moment(numel: int, device: torch.device, value: float = 0.0) -> Tensor:
    return torch.full((numel,), value, dtype=torch.float32, device=device)
