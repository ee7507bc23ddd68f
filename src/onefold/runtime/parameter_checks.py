"""Whether a model still has the parameters that shard() saw, in the memory that shard() gave them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from onefold.model.tree import ParameterTree
from onefold.state.unit import Unit


class ParameterChecks:
    """`frozen` are the parameters outside units; frozen parameters inside units are found in `units`."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], frozen: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._tree, self._units = ParameterTree(model), list(units)
        inside = [(s.name, p) for u in units if not u.trained for s, p in zip(u.layout.slots, u.params, strict=True)]
        self._frozen = [*frozen, *inside]

    def swapped(self) -> set[int]:
        """The ids of parameters in whose place plain tensors are now, as inside torch.func.functional_call."""
        return self._tree.swapped()

    def check(self) -> None:
        """Raises if a parameter was added, replaced, removed or moved."""
        self._tree.check()
        for unit in self._units:
            unit.flat_params.check()

    def unfrozen(self) -> list[str]:
        """Names of parameters that were frozen when their unit was made, and are not now."""
        return [name for name, param in self._frozen if param.requires_grad]
