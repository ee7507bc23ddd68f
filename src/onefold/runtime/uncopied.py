"""Hooks of a sharded model that a deep copy of one of its modules leaves behind: below stage 3, where a module can be
copied, the copy is a plain one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Uncopied:
    """A hook that does nothing in a deep copy of its module."""

    def __init__(self, hook: Callable[..., None] | None) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        if self._hook is not None:
            self._hook(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Uncopied:
        return Uncopied(None)
