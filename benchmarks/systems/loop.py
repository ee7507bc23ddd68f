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


def plain_loop(
    model: nn.Module, optimizer: Any, micro_batches: int, *, autocast: torch.device | None = None
) -> Callable[[Tensor], Tensor]:
    """The loop every PyTorch user writes."""

    def step(tokens: Tensor) -> Tensor:
        kind, total = autocast.type if autocast else "cpu", torch.zeros((), device=tokens.device)
        for rows in tokens.chunk(micro_batches):
            with torch.autocast(kind, torch.bfloat16, enabled=autocast is not None):
                loss: Tensor = model(rows[:, :-1], rows[:, 1:]) / micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def recompute_blocks(model: Any) -> None:
    """torch's own recomputation, for systems that have none or whose users take torch's."""
    for block in model.layers:
        block.forward = _recomputed(block.forward)


def _recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *given: checkpoint(forward, *given, use_reentrant=False)


def compile_blocks(model: Any) -> None:
    for block in model.layers:
        block.forward = torch.compile(block.forward)
