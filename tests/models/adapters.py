"""A frozen GPT with LoRA on every linear layer of its blocks, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn

from onefold.cost.shapes import Shape
from onefold.train.run.model import GPT


class Adapted(nn.Module):
    """A frozen linear layer and LoRA beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def adapted(shape: Shape, rank: int) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(shape).requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.startswith("blocks."):
            above, _, own = name.rpartition(".")
            setattr(model.get_submodule(above), own, Adapted(module, rank))
    return model
