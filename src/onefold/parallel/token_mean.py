"""token_mean(): the mean loss over all tokens that count, on all ranks, however they are spread.

Ranks average their gradients. So each rank's share of the mean, its own sum over all ranks' tokens, is multiplied by
the number of ranks in backward: the average over ranks is then the gradient of the mean over tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onefold.comm.communicator import Comm
from onefold.comm.mesh import Mesh
from onefold.comm.meter import Label
from onefold.comm.sequence import sequence_group
from onefold.errors import ConfigError

LABEL = Label("token-mean", "the loss")


@torch._disable_dynamo
def token_mean(total: Tensor, tokens: Tensor | int, mesh: Mesh) -> Tensor:
    """The mean loss over all tokens of all ranks that read data, those of "replica", "shard" and "sequence".

    `total` is the sum of this rank's losses, `tokens` the number of tokens that count here, which may differ between
    ranks. The result is the same number on all ranks, and its gradients, averaged over ranks as a sharded model's are,
    are those of the mean over all tokens, as one process would compute them. One message of 16 bytes. Collective.

    >>> import torch, onefold
    >>> onefold.init()
    >>> logits, targets = torch.randn(5, 9, requires_grad=True), torch.tensor([1, 2, -100, 4, -100])
    >>> total = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    >>> loss = onefold.token_mean(total, (targets != -100).sum(), onefold.mesh())
    >>> torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, targets))
    """
    if not isinstance(total, Tensor) or total.dim():
        found = tuple(total.shape) if isinstance(total, Tensor) else type(total).__name__
        raise ConfigError(f'token_mean() got {found}; it needs the sum of the losses, a scalar: reduction="sum"')
    loss: Tensor = _TokenMean.apply(total, _count(tokens, total.device), sequence_group(mesh, total.device).readers)
    return loss


@torch._disable_dynamo
def sequence_mean(total: Tensor, items: Tensor | int, mesh: Mesh) -> Tensor:
    """The sum of the losses of one sequence's ranks, over `items`, a number that all of them know: what one process
    with the whole sequences would compute, the same number on each rank. Its gradients, averaged over ranks, are those
    of the average over sequences. Collective over "sequence"."""
    comm = sequence_group(mesh, total.device).comm
    count = _count(items, total.device)
    loss: Tensor = _TokenMean.apply(total, count if comm.rank == 0 else torch.zeros_like(count), comm)
    return loss


def _count(tokens: Tensor | int, device: torch.device) -> Tensor:
    if isinstance(tokens, Tensor):
        return tokens.to(device, torch.float64, non_blocking=True).reshape(())
    return torch.full((), tokens, dtype=torch.float64, device=device)


class _TokenMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, comm: Comm) -> Tensor:
        table = torch.empty(comm.size, 2, dtype=torch.float64, device=total.device)
        table[comm.rank, 0], table[comm.rank, 1] = total, count
        comm.all_gather(table.view(-1), LABEL).wait()
        sums, tokens = table.unbind(1)
        ctx.save_for_backward(comm.size / tokens.sum().clamp(min=1))  # no tokens: gradients are 0 and the loss is NaN
        return (sums.sum() / tokens.sum()).to(total.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (share,) = ctx.saved_tensors
        return grad * share.to(grad.dtype), None, None
