"""What optimizer state of one class costs, by the dtype of what it updates and by the settings of param groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from onefold.cost.states import StateCost
from onefold.optim.elementwise import cost_with

COMPARED = (bool, int, str, type(None))  # settings of these types; of floats, whether they are zero


class StateCosts:
    """The costs of one class. `settings` are those that the Optimizer was made with, `form` is that of its moments."""

    def __init__(self, cls: type[torch.optim.Optimizer], settings: dict[str, Any], form: str = "fp32") -> None:
        self.defaults: dict[str, Any] = {}  # all settings of the class, as the Optimizer has them
        self.by_dtype: dict[torch.dtype, StateCost] = {}  # with the defaults
        self._cls, self._settings, self._form = cls, settings, form
        self._by_settings: dict[tuple[torch.dtype, frozenset[Any]], StateCost] = {}  # with others

    def learn(self, dtype: torch.dtype, found: tuple[dict[str, Any], StateCost]) -> None:
        """A trial of the class has found its defaults, and what its state costs with them."""
        self.defaults, cost = found
        self.by_dtype[dtype] = cost.in_form(self._form)

    def of_group(self, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> StateCost:
        """The cost with the settings of a param group, such as amsgrad or momentum, that differ from the defaults."""
        shared = [key for key in self.defaults if key in group]
        others = {key: group[key] for key in shared if _compared(group[key]) != _compared(self.defaults[key])}
        if not others:
            return self.by_dtype[dtype]
        known = dtype, frozenset((key, _compared(value)) for key, value in others.items())
        if known not in self._by_settings:
            try:
                cost = cost_with(self._cls, self._settings, others, device, dtype).in_form(self._form)
            except Exception:  # the first step says what is wrong with these settings
                cost = self.by_dtype[dtype]
            self._by_settings[known] = cost
        return self._by_settings[known]


def _compared(setting: Any) -> Any:
    """What matters of a setting for the state that a class keeps: numbers such as a momentum are zero or not."""
    if isinstance(setting, float):
        return setting != 0
    return setting if isinstance(setting, COMPARED) else None
