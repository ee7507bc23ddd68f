"""Models whose matrices are split over ranks by hand, as Megatron's are, or stand beside DTensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tests.models.plain import DIM, Residual


class Summed(torch.autograd.Function):
    """Sums over a group in forward, as after a row-parallel matrix. Counts the bytes, with those of Copied."""

    total_bytes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        Summed.total_bytes += x.nbytes
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Copied(torch.autograd.Function):
    """Sums gradients over a group, as before a column-parallel matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return Summed.forward(ctx, grad, ctx.group), None


class MegatronPairs(nn.Module):
    """Two pairs of a column- and a row-parallel matrix: two sums in forward, two in backward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for column, row in (self.layers[:2], self.layers[2:]):
            x = x + Summed.apply(row(torch.tanh(column(Copied.apply(x, None)))), None)
        return x


class MegatronResidual(Residual):
    """A residual block with local matrices; the norm and the bias behind the sum are the same on all ranks."""

    def __init__(self, whole: Residual, tp: DeviceMesh, marked: bool) -> None:
        super().__init__(whole.up.in_features, whole.up.out_features)
        self.group, rank, size = tp.get_group(), tp.get_local_rank(), tp.size()
        self.load_state_dict(whole.state_dict())
        for module, name, dim in ((self.up, "weight", 0), (self.up, "bias", 0), (self.down, "weight", 1)):
            part = nn.Parameter(getattr(module, name).detach().chunk(size, dim)[rank].contiguous())
            if marked:
                part.tensor_model_parallel, part.partition_dim = True, dim
            setattr(module, name, part)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.up(Copied.apply(self.norm(x), self.group)))
        return x + Summed.apply(y @ self.down.weight.t(), self.group) + self.down.bias


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a DTensor; any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Scaled(nn.Module):
    """A plain parameter beside a DTensor, which torch takes for replicated: its gradient comes as a DTensor."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(dim, dim, bias=False), nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return full_tensor(self.linear(x) * self.gain)


class NoSplitDim(nn.Module):
    """A parameter marked as a part of a larger one, but not along which dim it was split."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.weight.tensor_model_parallel = True
