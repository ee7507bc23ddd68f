"""What shard() adds to the modules and parameters of a model, recorded, so that it can be taken off again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn


class Handle(Protocol):
    def remove(self) -> None: ...


class Attachments:
    """Hooks, and attributes that hide those of a module's class. `remove` takes off what was added last first."""

    def __init__(self) -> None:
        self._removals: list[Callable[[], None]] = []

    def hook(self, handle: Handle) -> None:
        """Records the handle of a hook that was registered."""
        self._removals.append(handle.remove)

    def attribute(self, module: nn.Module, name: str, value: Any) -> None:
        """Sets an attribute of one module. When it is removed, the module has what it had before; an attribute that a
        user has set meanwhile stays."""
        own = module.__dict__
        had, before = name in own, own.get(name)
        own[name] = value

        def remove() -> None:
            if own.get(name) is value:
                own.pop(name)
                own.update({name: before} if had else {})

        self._removals.append(remove)

    def change(self, removal: Callable[[], None]) -> None:
        """Something else was changed; `removal` changes it back."""
        self._removals.append(removal)

    def remove(self) -> None:
        while self._removals:
            self._removals.pop()()
