"""Guarded parameters: while a unit is sharded, its parameters have their shape, dtype and device, and no values to use.

A parameter is guarded by its class, which changes to a subclass of nn.Parameter and back; the object stays the same.
torch shows every operation on such a tensor to `__torch_function__`. What needs no values passes. Before anything else
the unit is unsharded, so that the operation runs as usual, or an error is raised; `on_use` decides. Functions that
torch does not show (torch.tensor(parameter), scripted functions, C++ extensions) read what is below: a placeholder,
NaN.

DTensors are not guarded, since their class is torch's own: an operation on one reads its placeholder.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from onefold.errors import StateError

T = TypeVar("T")

# Of the attributes of a tensor, those that give values; all others describe it, or its place in autograd.
VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}
CREATE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
DESCRIBE = {
    "size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "untyped_storage",
    "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_set_to", "is_same_size", "is_inference",
    "is_pinned", "is_shared", "is_conj", "is_neg", "is_distributed", "get_device", "dim_order", "__len__", "__hash__",
    "_is_view", "_has_symbolic_sizes_strides",
}  # fmt: skip
AUTOGRAD = {"requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "backward", "grad"}
NO_VALUES = DESCRIBE | AUTOGRAD | {f"{name}_like" for name in CREATE} | {f"new_{name}" for name in (*CREATE, "tensor")}


class ShardedParameter(nn.Parameter):
    """A guarded parameter. `guard` and `plain` are set in a subclass for each unit and class of parameters; `guard`
    does not keep the unit alive."""

    guard: Callable[[], ParameterGuard | None]
    plain: type[nn.Parameter]  # its class while it is not guarded

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedParameter({tuple(self.shape)}, {self.dtype}: each rank holds its shard)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _torch_function(func, args, kwargs or {})


@torch._disable_dynamo
def _torch_function(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if needs_no_values(func):
        with no_guard():
            return func(*args, **kwargs)
    param = next((one for one in _tensors([*args, *kwargs.values()]) if isinstance(one, ShardedParameter)), None)
    if param is None:  # all are unsharded by now
        with no_guard():
            return func(*args, **kwargs)
    guard = type(param).guard()
    if guard is None:
        raise StateError(f"{name_of(func)} was called on a sharded parameter of a model that is gone")
    return guard.run(param, name_of(func), lambda: func(*args, **kwargs))


def needs_no_values(func: Any) -> bool:
    """Whether an operation asks for no values of a tensor, but for its description or its place in autograd."""
    if getattr(func, "__name__", "") in ("__get__", "__set__"):  # of an attribute
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return func.__name__ == "__set__" or attribute not in VALUES
    return getattr(func, "__name__", "") in NO_VALUES


def name_of(func: Any) -> str:
    """The operation, as a message names it."""
    if getattr(func, "__name__", "") == "__get__":
        return f".{func.__self__.__name__}"
    return f"{getattr(func, '__name__', func)}()"


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among arguments, and in lists of them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


class OnUse(Protocol):
    """What decides over an operation on the values of a guarded parameter."""

    def __call__(self, name: str, use: str, run: Callable[[], T]) -> T:
        """Makes the parameter's values available and runs the operation, or raises."""
        ...


class ParameterGuard:
    """The guard of one unit's parameters: while it is set, `on_use` decides over operations on their values."""

    def __init__(self, params: Sequence[nn.Parameter], names: Sequence[str]) -> None:
        self._params, self._names, self.is_set = list(params), list(names), False
        self._classes = {type(param): self._guarded(type(param)) for param in params if _may_be_guarded(type(param))}
        self._on_use: OnUse | None = None

    def _guarded(self, plain: type[nn.Parameter]) -> type[ShardedParameter]:
        """The class of guarded parameters that are otherwise `plain`; a subclass of nn.Parameter keeps its name and
        attributes, by which libraries know it."""
        own = plain is not nn.Parameter
        bases = (ShardedParameter, plain) if own else (ShardedParameter,)
        members = {"guard": staticmethod(weakref.ref(self)), "plain": plain}
        return type(plain.__name__ if own else "ShardedParameter", bases, members)

    def ask(self, on_use: OnUse) -> None:
        self._on_use = on_use

    def set(self) -> None:
        self.is_set = True
        for param in self._params:
            if guarded := self._classes.get(type(param)):
                param.__class__ = guarded

    def lift(self) -> None:
        if self.is_set:
            self.is_set = False
            for param in self._params:
                if isinstance(param, ShardedParameter):
                    param.__class__ = type(param).plain  # type: ignore[assignment]

    def run(self, param: nn.Parameter, use: str, run: Callable[[], T]) -> T:
        """An operation uses the values of a guarded parameter."""
        assert self._on_use is not None
        place = next(place for place, one in enumerate(self._params) if one is param)
        return self._on_use(self._names[place], use, run)


def _may_be_guarded(cls: type[nn.Parameter]) -> bool:
    """Whether a class of parameters is nn.Parameter, or made of it in Python: not a DTensor, or another tensor around
    tensors."""
    return issubclass(cls, nn.Parameter) and cls.__torch_dispatch__ is nn.Parameter.__torch_dispatch__


def no_guard() -> AbstractContextManager[None]:
    """Inside, operations on guarded parameters see what is below the guard; and are faster."""
    return torch._C.DisableTorchFunctionSubclass()
