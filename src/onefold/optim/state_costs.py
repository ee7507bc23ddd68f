"""What optimizer state of one class costs, by the dtype of what it updates and by the settings of param groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from onefold.cost.states import StateCost
from onefold.optim.elementwise import cost_with

PLAIN = (bool, int, float, str, type(None))


class StateCosts:
    """Of an element-wise class and the settings with which an Optimizer makes it; `form` is that of its moments."""

    def __init__(self, cls: type[torch.optim.Optimizer], settings: dict[str, Any], form: str = "fp32") -> None:
        self.defaults: dict[str, Any] = {}  # of all settings
        self.by_dtype: dict[torch.dtype, StateCost] = {}  # with these
        self._cls, self._settings, self._form = cls, settings, form
        self._switched: dict[tuple[torch.dtype, frozenset[str]], StateCost] = {}

    def learn(self, dtype: torch.dtype, found: tuple[dict[str, Any], StateCost]) -> None:
        """What a trial of the class has found: its defaults, and what its state costs with them."""
        self.defaults, cost = found
        self.by_dtype[dtype] = cost.in_form(self._form)

    def of_group(self, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> StateCost:
        """With the settings of a param group. What counts is which are switched on (amsgrad) or not zero (momentum)."""
        switched = {
            key: group[key]
            for key, default in self.defaults.items()
            if key in group and isinstance(group[key], PLAIN) and isinstance(default, PLAIN)
            if bool(group[key]) != bool(default)
        }
        if not switched:
            return self.by_dtype[dtype]
        known = dtype, frozenset(switched)
        if known not in self._switched:
            try:
                cost = cost_with(self._cls, self._settings, switched, device, dtype).in_form(self._form)
            except Exception:  # the first step says what is wrong with these settings
                cost = self.by_dtype[dtype]
            self._switched[known] = cost
        return self._switched[known]

    def most(self, groups: Iterable[Mapping[str, Any]], device: torch.device) -> StateCost | None:
        """That of the param group whose state takes the most, or with the class's settings; None before a trial."""
        costs = [cost for dtype in self.by_dtype for cost in (self.of_group(one, dtype, device) for one in groups)]
        return max([*self.by_dtype.values(), *costs], key=lambda cost: cost.per_element, default=None)
