"""whole_sequence(): tensors of the whole sequence, made of the stretches that the ranks of "sequence" have.

Backward gives each rank the gradient of its own stretch, times the number of ranks: all ranks compute the same of the
whole, and their gradients are averaged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onefold.comm.communicator import Comm
from onefold.comm.mesh import Mesh
from onefold.comm.meter import Label
from onefold.comm.sequence import sequence_group
from onefold.parallel.stretches import in_order

LABEL = Label("sequence-outputs", "outputs of the model")


def whole_sequence(stretch: Tensor, mesh: Mesh, tokens: int, *, balanced: bool) -> Tensor:
    """The first `tokens` of (batch, all tokens, …), of which each rank gives (batch, its tokens, …), cut as by
    cut_sequence(balanced=…). Collective."""
    group = sequence_group(mesh, stretch.device)
    whole: Tensor = _Whole.apply(stretch, group.comm)
    return (in_order(whole, group.size, 1) if balanced else whole)[:, :tokens]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stretch: Tensor, comm: Comm) -> Tensor:
        ctx.comm, ctx.tokens = comm, stretch.shape[1]
        flat = torch.empty(comm.size, *stretch.shape, dtype=stretch.dtype, device=stretch.device)
        flat[comm.rank].copy_(stretch)
        comm.all_gather(flat.view(-1), LABEL).wait()
        return flat.transpose(0, 1).flatten(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        start = ctx.comm.rank * ctx.tokens
        return grad[:, start : start + ctx.tokens] * ctx.comm.size, None
