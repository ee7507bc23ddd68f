"""Muon for one process, as a plain torch class: torch.optim.Muon's arithmetic, also for stacks and fused matrices.

An update has two parts. The direction depends on gradient and momentum alone, and needs the whole tensor. The move
along it treats each element by itself, so ranks can move the pieces that they hold if they are told the direction.

A tensor is updated as one matrix or as several, which `matrices` says. Equal matrices of one tensor are multiplied
together (bmm). Tensors are multiplied one by one: products of a batch may have other bits than single ones, and which
tensors a rank has depends on the number of ranks. Newton-Schulz runs in bf16, as torch's does, on every device, so that
tensor cores can run it; `ns_dtype="fp32"` is for devices that are slow in bf16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from onefold.errors import OptimizerError
from onefold.optim.kernels import cuda_muon

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Keller Jordan's
EPS = 1e-7
NS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LR_RULES = (None, "original", "match_rms_adamw")  # torch's names; None is "original"

Matrices = Literal["whole", "stack", "flat"] | Sequence[int]
"""The matrices of a tensor: "whole": one; "stack": one for each index of the first dimension (experts); "flat": one,
whose rows are the filters of a convolution; or the number of rows of each (heads; q, k and v)."""


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon, whose param groups also say by `matrices` of which matrices each of their tensors consists."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Sequence[float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_dtype: str = "bf16",
        matrices: Matrices = "whole",
    ) -> None:
        settings = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps,
            "nesterov": nesterov, "ns_coefficients": tuple(ns_coefficients), "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn, "ns_dtype": ns_dtype, "matrices": matrices,
        }  # fmt: skip
        check_settings(settings)
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, param.grad, group)

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        move = Move.of(tuple(param.shape), group)
        for place, direction in _directions(self.state[param], ReducedGradient(grad, 1.0, grad.dtype), group):
            move.along(direction, place.part(param))


def direction_settings(cls: type[torch.optim.Optimizer], group: dict[str, Any]) -> dict[str, Any] | None:
    """The settings with which `direct` stands for the update of this class, torch's Muon or ours; None for others."""
    if cls is torch.optim.Muon:
        return {"matrices": "whole", "ns_dtype": "bf16", **group}
    return group if cls is Muon else None


class ReducedGradient(NamedTuple):
    """A gradient as it was reduced. The update uses its `values` in another dtype, which momentum has, multiplied by a
    factor."""

    values: Tensor
    factor: float | Tensor
    dtype: torch.dtype

    def fused(self, settings: dict[str, Any]) -> bool:
        """Whether a kernel scales the gradient while it updates the momentum; else a copy is made."""
        return self.dtype is torch.float32 and cuda_muon.takes_gradient(self.values, self.factor, settings)

    @property
    def has_factor(self) -> bool:
        return not (isinstance(self.factor, float) and self.factor == 1.0)

    def copied(self) -> Tensor:
        values = self.values.to(self.dtype)
        return values * self.factor if self.has_factor else values


@torch.no_grad()
def direct(state: dict[str, Any], grad: ReducedGradient, settings: dict[str, Any], out: Tensor) -> None:
    """Updates the momentum in the state of a tensor, and writes the direction in which the tensor is to move: to `out`,
    of its shape and of `direction_dtype`. The tensor itself is not needed."""
    for place, direction in _directions(state, grad, settings):
        part = place.part(out)
        part.copy_(direction.reshape(part.shape))


def _directions(
    state: dict[str, Any], grad: ReducedGradient, settings: dict[str, Any]
) -> Iterator[tuple[EqualMatrices, Tensor]]:
    """Updates the momentum; the direction of each place of the tensor."""
    if not state:
        state["momentum_buffer"] = torch.zeros_like(grad.values, dtype=grad.dtype, memory_format=torch.preserve_format)
    average, momentum = state["momentum_buffer"], settings["momentum"]
    kernels = grad.fused(settings) and cuda_muon.takes_momentum(average)
    if kernels:
        update = cuda_muon.move_momentum(grad.values, grad.factor, average, settings)
    else:
        copied = grad.copied()
        average.lerp_(copied, 1 - momentum)
        update = copied.lerp(average, momentum) if settings["nesterov"] else average
    size = tuple(average.shape)
    places, unequal = places_of(size, settings["matrices"]), len(_lr_ratios(size, settings)) > 1
    for place in places:
        found = orthogonal(place.of(update), settings, overwrites=kernels and len(places) == 1)
        if unequal:
            found = found.to(grad.dtype).mul_(lr_ratio(place.shape, settings["adjust_lr_fn"]))
        yield place, found


class Move(NamedTuple):
    """How a tensor moves along its direction: each element is multiplied by `shrink`, then `alpha` times the direction
    is added. If matrices of one tensor have unequal learning rates, its direction was multiplied by their ratios."""

    shrink: float
    alpha: float

    @classmethod
    def of(cls, size: tuple[int, ...], settings: dict[str, Any]) -> Move:
        lr, ratios = float(settings["lr"]), _lr_ratios(size, settings)
        return cls(1 - lr * settings["weight_decay"], -lr * (ratios.pop() if len(ratios) == 1 else 1.0))

    def along(self, direction: Tensor, param: Tensor) -> None:
        """Moves a tensor, or consecutive elements of one."""
        if cuda_muon.adds(param, direction):
            cuda_muon.add(param, direction, *self)
        else:
            param.mul_(self.shrink)
            param.add_(direction.reshape(param.shape), alpha=self.alpha)


def direction_dtype(size: tuple[int, ...], settings: dict[str, Any], dtype: torch.dtype) -> torch.dtype:
    """What `direct` writes for a tensor of this shape, whose gradient has this dtype when it is updated."""
    return dtype if len(_lr_ratios(size, settings)) > 1 else NS_DTYPES[settings["ns_dtype"]]


def _lr_ratios(size: tuple[int, ...], settings: dict[str, Any]) -> set[float]:
    return {lr_ratio(place.shape, settings["adjust_lr_fn"]) for place in places_of(size, settings["matrices"])}


def check_settings(settings: dict[str, Any]) -> None:
    """Raises for settings of a param group that Muon cannot use."""
    for name in ("lr", "weight_decay", "momentum", "eps"):
        value = settings[name]
        if not isinstance(value, Tensor) and not (isinstance(value, int | float) and 0.0 <= value < math.inf):
            raise ValueError(f"{name}={value!r} is out of range; use a number of at least 0")
    coefficients, steps, rule = (settings[name] for name in ("ns_coefficients", "ns_steps", "adjust_lr_fn"))
    if not (isinstance(steps, int) and 1 <= steps < 100):
        raise ValueError(f"ns_steps={steps!r} is out of range; use 1 to 99")
    if len(coefficients) != 3:
        raise ValueError(f"ns_coefficients={coefficients} has {len(coefficients)} numbers; give three")
    if rule not in LR_RULES:
        raise ValueError(f"adjust_lr_fn={rule!r} is unknown; use 'original' or 'match_rms_adamw'")
    if settings["ns_dtype"] not in NS_DTYPES:
        raise ValueError(f"ns_dtype={settings['ns_dtype']!r} is unknown; use 'bf16' or 'fp32'")


class EqualMatrices(NamedTuple):
    """Neighbouring rows of a tensor that are one matrix, or several of one shape."""

    start: int  # rows of the tensor
    stop: int
    shape: tuple[int, ...]  # of the matrix, or of the stack of matrices

    def part(self, tensor: Tensor) -> Tensor:
        return tensor if self.stop - self.start == tensor.shape[0] else tensor[self.start : self.stop]

    def of(self, tensor: Tensor) -> Tensor:
        return self.part(tensor).reshape(self.shape)


def places_of(size: tuple[int, ...], matrices: Matrices) -> list[EqualMatrices]:
    """The matrices of a tensor, neighbours of one shape together; raises if the tensor has no such matrices.

    >>> [place.shape for place in places_of((8, 5), (2, 2, 4))]
    [(2, 2, 5), (4, 5)]
    """
    rows = size[0] if size else 0
    wanted = {"whole": len(size) == 2, "stack": len(size) == 3, "flat": len(size) > 2}
    if isinstance(matrices, str):
        if not wanted.get(matrices, False):
            raise OptimizerError(
                f"a tensor of shape {size} is no matrix, and Muon cannot take it as {matrices!r}; Muon takes matrices, "
                f"stacks of matrices and filters of convolutions, and AdamW the rest"
            )
        return [EqualMatrices(0, rows, (rows, math.prod(size[1:])) if matrices == "flat" else size)]
    if len(size) != 2 or sum(matrices) != rows or not all(count > 0 for count in matrices):
        raise OptimizerError(f"rows of {tuple(matrices)} are {sum(matrices)}, but the tensor's shape is {size}")
    return list(_row_places(matrices, size[1]))


def _row_places(counts: Sequence[int], columns: int) -> Iterator[EqualMatrices]:
    start = 0
    for count, equal in groupby(counts):
        number = sum(1 for _ in equal)
        yield EqualMatrices(start, start + number * count, (number, count, columns) if number > 1 else (count, columns))
        start += number * count


def work_of(size: tuple[int, ...], matrices: Matrices) -> int:
    """Multiplications of one product of Newton-Schulz for a tensor."""
    return sum(math.prod(place.shape) * min(place.shape[-2:]) for place in places_of(size, matrices))


def orthogonal(update: Tensor, settings: dict[str, Any], *, overwrites: bool = False) -> Tensor:
    """The matrix, or each of a stack, with singular values near 1, by Newton-Schulz; with `overwrites`, `update` is
    scratch."""
    a, b, c = settings["ns_coefficients"]
    wide = update.shape[-2] <= update.shape[-1]
    x = update.to(NS_DTYPES[settings["ns_dtype"]], copy=not overwrites)
    x = x if wide else x.mT
    single = x.ndim == 2
    norm = x.norm() if single else torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    norm = norm.clamp(min=settings["eps"])
    if cuda_muon.divides(x, norm):
        cuda_muon.divide(x, norm)
    else:
        x.div_(norm)  # the spectral norm is at most 1
    add_product = torch.addmm if single else torch.baddbmm
    for _ in range(settings["ns_steps"]):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


def lr_ratio(shape: tuple[int, ...], rule: str | None) -> float:
    """What the learning rate is multiplied by, so that updates of matrices of all shapes have like sizes.

    >>> lr_ratio((4, 1), "original"), lr_ratio((25, 100), "match_rms_adamw")
    (2.0, 2.0)
    """
    rows, columns = shape[-2:]
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))  # Moonshot's: as large as AdamW's
    return math.sqrt(max(1, rows / columns))
