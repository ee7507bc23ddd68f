"""What trials of optimizer classes share: steps without hooks, settings, and what to use instead of a refused class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from onefold.errors import OptimizerError

# Sizes of the gradients of each step. They fall and rise, by little and by much, so that a class that clips what is
# larger than a bound, or than the steps before, is seen to do so.
GRADIENTS = (1.0, 0.1, 3.0, 1e4, 1e-3)


class SendsMessages(OptimizerError):
    """The class runs collectives of its own."""


@contextmanager
def on_numbers() -> Iterator[None]:
    """Inside, a class runs on numbers, also in a rehearsal, draws none from the user's random generator, and is refused
    if it sends messages. Nothing is compiled."""
    with (
        unset_fake_temporarily(),
        torch.random.fork_rng(devices=[]),
        torch.compiler.set_stance("force_eager"),
        _NoMessages(),
        torch.enable_grad(),
    ):
        yield


class _NoMessages(TorchDispatchMode):
    """Raises if ranks are to send each other messages."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise SendsMessages(
                f"the optimizer class sends messages to other ranks itself ({func.namespace}.{func.__name__}), but "
                f"each rank runs it for other parameters, at other times; give its form for one process, which Onefold "
                f"shards"
            )
        return func(*args, **(kwargs or {}))


REMEDY = "Use an element-wise class: SGD, Adam, AdamW, Adagrad, RMSprop, NAdam"


def trained(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: list[list[Tensor]]) -> list[Tensor]:
    """Steps with these gradients, of each step by parameter: what the parameters are after every step, as vectors."""
    seen = []
    for rows in grads:
        for param, grad in zip(params, rows, strict=True):
            param.grad = grad.to(param.device, copy=True)
        bare_step(optimizer)
        seen.append(torch.cat([param.detach().flatten() for param in params]))
    return seen


def alike(some: list[Tensor], others: list[Tensor]) -> bool:
    """Whether parameters are the same after every step, but for rounding."""
    pairs = zip(some, others, strict=True)
    return all(torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True) for one, other in pairs)


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """Steps without the hooks and profiler ranges that torch adds: those are for the Optimizer that users call."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def group_settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    return {key: repr(value) for key, value in optimizer.param_groups[0].items() if key != "params"}
