"""The gradients users see: what a parameter's .grad holds after backward, and what users did with it.

At stage 0, where every rank updates everything, .grad is a view of the reduced gradient, which may be read and changed
in place. At stages 1 to 3 .grad is a placeholder of the right shape that raises when used. Setting .grad to None drops
that gradient, as in plain PyTorch; assigning another tensor raises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from onefold.errors import StateError
from onefold.state.guarded_parameters import no_guard


class VisibleGradients:
    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._params, self._names = params, names
        self._shown: dict[int, Tensor] = {}
        self._placeholders: list[ShardedGradient] = []

    def show(self, indices: Sequence[int], gradient: Callable[[int], Tensor]) -> None:
        with no_guard():
            for index in indices:
                param, shown = self._params[index], gradient(index)
                if shown.dtype is not param.dtype:
                    param.grad_dtype = None  # lets a 16-bit parameter have an fp32 .grad
                self._shown[index] = param.grad = shown

    def show_placeholders(self) -> None:
        """Sets every parameter's .grad to a placeholder: which parameters some rank used is known only at the step."""
        if not self._placeholders:
            self._placeholders = [ShardedGradient(param) for param in self._params]
        self.show(range(len(self._params)), self._placeholders.__getitem__)

    def dropped(self) -> list[int]:
        """The parameters whose .grad the user has set to None since `show`; raises if one was replaced."""
        found = []
        with no_guard():
            grads = [self._params[index].grad for index in self._shown]
        for (index, shown), grad in zip(self._shown.items(), grads, strict=True):
            if grad is None:
                found.append(index)
            elif grad is not shown:
                raise StateError(
                    f"{self._names[index]}.grad was replaced after backward; the optimizer reads the reduced gradient: "
                    f"change it in place (stage 0), or set it to None to leave the parameter alone"
                )
        return found

    def hide(self, indices: Sequence[int] | None = None) -> None:
        """Removes what `show` put into .grad, of all parameters or of these; a user's own tensor stays."""
        if indices is None:
            taken, self._shown = self._shown, {}
        else:
            taken = {index: self._shown.pop(index) for index in indices if index in self._shown}
        with no_guard():
            for index, shown in taken.items():
                if self._params[index].grad is shown:
                    self._params[index].grad = None

    def __len__(self) -> int:
        return len(self._shown)


class ShardedGradient(Tensor):
    """The .grad of a parameter whose gradient is sharded: the parameter's shape, no values; every operation raises."""

    @staticmethod
    def __new__(cls, param: Tensor) -> ShardedGradient:
        return Tensor._make_wrapper_subclass(
            cls, param.size(), strides=param.stride(), dtype=param.dtype, device=param.device
        )

    def __init__(self, param: Tensor) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient({tuple(self.shape)}, {self.dtype}: each rank holds its shard)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        if name := _running_optimizer():
            raise StateError(
                f"a torch.optim optimizer ({name}) was built on sharded parameters, whose gradients are spread over "
                f"ranks: use onefold.Optimizer(model, {name}, …) in its place"
            )
        raise StateError(
            f"{func} was called on a sharded gradient, which is spread over ranks: read norms by "
            f"onefold.grad_norms(model), use optimizer.clip_grad_norm() instead of torch's clip_grad_norm_, step "
            f"onefold.Optimizer instead of a plain torch optimizer, and no GradScaler; stage=0 keeps gradients "
            f"replicated"
        )


def _running_optimizer() -> str:
    """The class of the torch optimizer, not ours, whose step() is running; empty if none is."""
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, torch.optim.Optimizer) and not _is_ours(type(found)):
            return type(found).__name__
        frame = frame.f_back
    return ""


def _is_ours(cls: type) -> bool:
    """True for Optimizer and for classes made of it, such as those with which frameworks wrap an optimizer."""
    return any(base.__module__.startswith("onefold.") for base in cls.__mro__)
