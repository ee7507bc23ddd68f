"""Which parameters hang where in a model, and whether that is still so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from torch import nn

from onefold.errors import StateError
from onefold.parts import is_split


class ParameterTree:
    """The parameters of a model at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before = dict(_named(model))
        self._ids = [id(param) for param in _params(model)]

    def check(self) -> None:
        """Raise, naming it, if a parameter was added, replaced or removed since."""
        if [id(param) for param in _params(self._model)] != self._ids:
            self._name_the_change()

    def _name_the_change(self) -> NoReturn:
        after = dict(_named(self._model))
        changed = [name for name in {**self._before, **after} if self._before.get(name) is not after.get(name)]
        if any(is_split(after[name]) for name in changed if name in after):
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
