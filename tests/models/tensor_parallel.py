"""Models whose matrices are split over ranks by hand, as Megatron's are, or stand beside DTensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

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


class GivenGradients(nn.Module):
    """Every gradient is a tensor of small whole numbers, whatever the parameters are. Sums of them are not rounded, so
    a run whose ranks split tensors has the bits of one process, as long as its updates have."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.parts = shapes, {name: (slice(None),) for name in shapes}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def split(self, tp: DeviceMesh, dims: dict[str, int]) -> GivenGradients:
        """Splits parameters along these dims: every other one as a DTensor, the rest as Megatron does."""
        for number, (name, dim) in enumerate(dims.items()):
            whole = getattr(self, name).detach()
            rows = -(-whole.shape[dim] // tp.size())
            here = slice(rows * tp.get_local_rank(), rows * (tp.get_local_rank() + 1))
            self.parts[name] = (*(slice(None),) * dim, here)
            if number % 2:
                part = nn.Parameter(distribute_tensor(whole, tp, [Shard(dim)]))
            else:
                part = nn.Parameter(whole[self.parts[name]].contiguous())
                part.tensor_model_parallel, part.partition_dim = True, dim
            setattr(self, name, part)
        return self

    def forward(self, step: int, stream: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + stream)
        total = torch.zeros(())
        for name, shape in self.shapes.items():
            gradient = torch.randint(-8, 9, shape, generator=generator).float()[self.parts[name]]
            param = getattr(self, name)
            total = total + ((param.to_local() if hasattr(param, "to_local") else param) * gradient).sum()
        return total
