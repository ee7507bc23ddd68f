"""Which parameters hang where in a model, and whether that is still so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from torch import nn

from onefold.errors import StateError
from onefold.model.dtensor_shards import is_dtensor


class ParameterTree:
    """The parameters of a model at one moment.

    A walk through all modules takes a while, and every step looks twice. So a look is at what hangs on the modules that
    the last walk met; only if that has changed is there another walk.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = dict(_named(model))
        self._ids = [id(param) for param in _params(model)]
        self._walk()

    def _walk(self) -> None:
        self._modules = list(self._model.modules())  # held, so that no other module gets the id of one
        self._hanging = self._look()

    def _look(self) -> list[int]:
        found: list[int] = []
        for module in self._modules:
            found += map(id, module._parameters.values())
            found += map(id, module._modules.values())
        return found

    def check(self) -> None:
        """Raise, naming it, if a parameter was added, replaced or removed since."""
        if self._look() == self._hanging:
            return
        if [id(param) for param in _params(self._model)] != self._ids:
            self._name_the_change()
        self._walk()

    def _name_the_change(self) -> NoReturn:
        after = dict(_named(self._model))
        changed = [name for name in {**self._before, **after} if self._before.get(name) is not after.get(name)]
        if any(is_dtensor(after[name]) for name in changed if name in after):
            raise StateError(
                f"{', '.join(changed[:5])} became a DTensor after shard(); call parallelize_module first, then shard()"
            )
        raise StateError(
            f"{', '.join(changed[:5]) or 'a parameter'} was added, replaced or removed after shard() (or swapped by "
            f"torch.func.functional_call, which works under no_grad only); change values in place (param.copy_ under "
            f"no_grad), or change the model before shard()"
        )


def _params(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                yield param


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                yield f"{prefix}.{name}" if prefix else name, param
