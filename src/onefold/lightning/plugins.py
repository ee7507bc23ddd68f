"""The precision plugins of Trainer and of Fabric under Onefold: they cast nothing, scale the loss in fp16, and clip."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.fabric.plugins import Precision as FabricPrecision
from lightning.pytorch.plugins import Precision
from torch import Tensor, nn

from onefold import Optimizer
from onefold.lightning.optimizers import clip_by_value, unwrapped
from onefold.model.containers import cast_tensors
from onefold.runtime.scaled import scaled_backward

Optimizers = Callable[[], Iterable[Any]]  # those that the strategy has now


def run_scaled(loss: Tensor, optimizers: Iterable[Any], backward: Callable[[Tensor], None]) -> None:
    """Runs `backward` with the loss, multiplied by the loss scale in fp16: by the smallest where several models have
    one each, so that none overflows for ever."""
    scale = min((one.loss_scale for one in map(unwrapped, optimizers) if isinstance(one, Optimizer)), default=1.0)
    with scaled_backward(scale):
        backward(loss if scale == 1.0 else loss.float() * scale)


class ZeroPrecision(Precision):
    """The precision of a Trainer whose model Onefold has sharded."""

    def __init__(self, name: str, optimizers: Optimizers) -> None:
        self.precision: Any = name
        self._optimizers = optimizers

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """`args` begin with the optimizer, or with None where the user optimizes by hand."""
        run_scaled(tensor, self._optimizers(), lambda loss: model.backward(loss, *args[1:], **kwargs))

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        unwrapped(optimizer).clip_grad_norm(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: int | float) -> None:
        clip_by_value(unwrapped(optimizer), float(clip_val))


class FabricZeroPrecision(FabricPrecision):
    """The precision of a Fabric whose model Onefold has sharded: outputs are fp32, as those of Lightning's own."""

    def __init__(self, name: str, optimizers: Optimizers, *, narrow: bool) -> None:
        self.precision: Any = name
        self._optimizers, self._narrow = optimizers, narrow

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        run_scaled(tensor, self._optimizers(), lambda loss: loss.backward(*args, **kwargs))

    def convert_output(self, data: Any) -> Any:
        return cast_tensors(data, torch.float32) if self._narrow else data
