"""What an adapter hands over: a step. And what several adapters do to a model first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Ready(NamedTuple):
    """A system that has its model and its optimizer."""

    step: Callable[[Tensor], Tensor]  # trains on a batch and gives the loss before the update
    parameters: int
    says: Callable[[], str] = str  # what the system itself reports of its memory


def numel(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


def plain_loop(model: nn.Module, optimizer: Any, *, autocast: torch.device | None = None) -> Callable[[Tensor], Tensor]:
    """The loop every PyTorch user writes."""

    def step(tokens: Tensor) -> Tensor:
        kind = autocast.type if autocast else "cpu"
        with torch.autocast(kind, torch.bfloat16, enabled=autocast is not None):
            loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def recompute_blocks(model: Any) -> None:
    """torch's own recomputation, for systems that have none or whose users take torch's."""
    for block in model.layers:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def compile_blocks(model: Any) -> None:
    for block in model.layers:
        block.forward = torch.compile(block.forward)
