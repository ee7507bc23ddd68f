"""Checks that a model still has the parameters that it had when it was sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from torch import nn

from onefold.errors import StateError
from onefold.model.dtensor_shards import is_dtensor


class ParameterTree:
    """The parameters of a model at one moment, and whether it still has the same.

    A walk through all modules is slow, and every step checks twice. So a check compares the ids of parameters and
    submodules of the modules that the last walk found; only if they have changed does it walk again.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = dict(_named(model))
        self._ids = [id(param) for param in _params(model)]
        self._walk()

    def _walk(self) -> None:
        self._modules = list(self._model.modules())  # references, so that no new module gets the id of a freed one
        self._known_ids = self._current_ids()

    def _current_ids(self) -> list[int]:
        found: list[int] = []
        for module in self._modules:
            found += map(id, module._parameters.values())
            found += map(id, module._modules.values())
        return found

    def check(self) -> None:
        """Raises, naming the parameter, if one was added, replaced or removed."""
        if self._current_ids() == self._known_ids:
            return
        if [id(param) for param in _params(self._model)] != self._ids:
            self._raise_change()
        self._walk()

    def swapped(self) -> set[int]:
        """The ids of parameters in whose place plain tensors are now, as inside torch.func.functional_call."""
        if self._current_ids() == self._known_ids:
            return set()
        now, names = dict(_named(self._model)), self._before.keys()
        if now.keys() != names:
            return set()
        changed = [name for name in names if now[name] is not self._before[name]]
        plain = all(not isinstance(now[name], nn.Parameter) for name in changed)
        return {id(self._before[name]) for name in changed} if plain else set()

    def _raise_change(self) -> NoReturn:
        after = dict(_named(self._model))
        changed = [name for name in {**self._before, **after} if self._before.get(name) is not after.get(name)]
        if any(is_dtensor(after[name]) for name in changed if name in after):
            raise StateError(
                f"{', '.join(changed[:5])} became a DTensor after shard(); call parallelize_module first, then shard()"
            )
        raise StateError(
            f"{', '.join(changed[:5]) or 'a parameter'} was added, replaced or removed after shard() (or swapped by "
            f"torch.func.functional_call, which trains plain tensors, at stages 0 to 2); change values in place "
            f"(param.copy_ under no_grad), or change the model (add adapters, merge them) before shard() or after "
            f"onefold.unshard(model)"
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
