"""For an Optimizer whose class needs whole tensors: its unit optimizers, their owners, and the class beside it"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from onefold.cost.text import format_bytes
from onefold.errors import OptimizerError
from onefold.offload.host_memory import available_bytes
from onefold.optim.elementwise import NotElementwise, examine
from onefold.optim.ownership import Ownership
from onefold.optim.state_costs import StateCosts
from onefold.optim.unit_optimizer import NOT_SETTINGS, UnitOptimizer
from onefold.optim.whole_unit_optimizer import Forms, WholeUnitOptimizer
from onefold.runtime.engine import Engine
from onefold.state.unit import Unit


class WholeTensors:
    """With `rest`, an element-wise class updates the parameters of param groups that name it as their "cls"."""

    def __init__(
        self,
        engine: Engine,
        cls: type[torch.optim.Optimizer],
        settings: dict[str, Any],
        rest: RestClass | None,
        *,
        in_backward: bool,
    ) -> None:
        self.ownership, self.rest = Ownership(engine), rest
        self._cls, self._settings, self._in_backward = cls, settings, in_backward
        self._added: list[tuple[int, Mapping[int, Sequence[int]], dict[str, Any]]] = []  # and have no owners yet
        self._forms: Forms = {}
        self.rest_groups: set[int] = set()  # numbers of param groups that the rest's class updates

    def unit_optimizer(self, unit: Unit) -> UnitOptimizer:
        made = WholeUnitOptimizer(unit, self._cls, self._settings, self.ownership, self._forms)
        if self.rest is not None:
            made.add_rest(UnitOptimizer(unit, self.rest.cls, self.rest.settings))
        return made

    def add(
        self, by_unit: Sequence[UnitOptimizer], slots: Mapping[int, Sequence[int]], number: int, group: dict[str, Any]
    ) -> None:
        """Adds parameters, by unit and slot, to a param group; `assign_owners` follows."""
        if number in self.rest_groups:
            for index, some in slots.items():
                whole(by_unit[index]).add_to_rest(number, some)
            return
        self.check(by_unit, slots, number, group)
        self._added.append((number, slots, group))

    def check(
        self, by_unit: Sequence[UnitOptimizer], slots: Mapping[int, Sequence[int]], number: int, group: dict[str, Any]
    ) -> None:
        """Raises unless the class takes the shapes of these parameters, by unit and slot, of a param group."""
        settings = {key: value for key, value in group.items() if key not in NOT_SETTINGS}
        needed: dict[str, int] = {}
        for index, some in slots.items():
            whole(by_unit[index]).check_shapes(some, number, settings)
            needed |= whole(by_unit[index]).update_bytes(some, number)
        if needed:
            check_room(needed, _memory_bytes(by_unit[0].device))

    def assign_owners(self, by_unit: Sequence[UnitOptimizer]) -> None:
        """Chooses owners of the parameters that were added since the last call. Collective."""
        added, self._added = self._added, []
        together = self._in_backward or any(one.unit.updated_on_host for one in by_unit)
        tensors = [
            tensor
            for _, slots, group in added
            for index, some in slots.items()
            for tensor in whole(by_unit[index]).to_own(some, group)
        ]
        self.ownership.assign(tensors, by_unit=together)
        for number, slots, _ in added:
            for index, some in slots.items():
                by_unit[index].add_group(number, some)

    def forget_added(self) -> None:
        """Parameters that were added get no owners, because ranks do not agree on them."""
        self._added = []

    def updater(
        self, optimizer: UnitOptimizer, name: str, number: int
    ) -> tuple[type[torch.optim.Optimizer], int | None]:
        """The class that updates a parameter of a unit and of a param group, and the rank that does it; None if every
        rank updates its elements, or all of them."""
        if number in self.rest_groups:
            assert self.rest is not None
            return self.rest.cls, None
        return self._cls, self.ownership.of(name) if self.ownership.is_shared(name) else None


class RestClass:
    """The class that updates what the Optimizer's own does not take, as param groups name it with "cls"."""

    def __init__(self, cls: type[torch.optim.Optimizer], settings: dict[str, Any]) -> None:
        self.cls, self.settings = cls, settings
        self.costs = StateCosts(cls, settings)

    @classmethod
    def of(cls, groups: Sequence[Any]) -> RestClass | None:
        """The class that groups name, with the settings of the first that does; None if none does."""
        named = [group for group in groups if isinstance(group, dict) and "cls" in group]
        if len({group["cls"] for group in named}) > 1:
            names = ", ".join(sorted({getattr(group["cls"], "__name__", str(group["cls"])) for group in named}))
            raise OptimizerError(
                f"param groups name several classes ({names}); name one, or make an Optimizer for each"
            )
        settings = {key: value for key, value in (named[0] if named else {}).items() if key not in NOT_SETTINGS}
        return cls(settings.pop("cls"), settings) if named else None

    def examine(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raises unless the class is element-wise."""
        try:
            self.costs.learn(dtype, examine(self.cls, self.settings, device, dtype))
        except NotElementwise as error:
            raise OptimizerError(
                f"a param group names cls={self.cls.__name__}, which is not element-wise; name an element-wise class "
                f"such as AdamW there, or make a second Optimizer"
            ) from error

    def check(self, cls: object) -> None:
        """Raises if a group that is added later names another class."""
        if cls is not self.cls:
            raise OptimizerError(
                f"a param group names cls={getattr(cls, '__name__', cls)}, but groups before it named "
                f"{self.cls.__name__}; name that, or make a second Optimizer"
            )


def planned_traffic(by_unit: Iterable[UnitOptimizer]) -> dict[str, int]:
    """Bytes that this rank sends in a step that updates every tensor, by purpose; none for other classes."""
    sent: dict[str, int] = {}
    for optimizer in by_unit:
        if isinstance(optimizer, WholeUnitOptimizer):
            for purpose, sent_bytes in optimizer.planned_traffic().items():
                sent[purpose] = sent.get(purpose, 0) + sent_bytes
    return sent


def whole(optimizer: UnitOptimizer) -> WholeUnitOptimizer:
    assert isinstance(optimizer, WholeUnitOptimizer)
    return optimizer


def check_room(needed: Mapping[str, int], there_bytes: int) -> None:
    """Raises if one rank has not as many bytes as the update of a tensor needs, by name."""
    name = max(needed, key=needed.__getitem__)
    if needed[name] > there_bytes:
        raise OptimizerError(
            f"{name} is too large to be updated as a whole tensor: its gradient, master and optimizer state are "
            f"{format_bytes(needed[name])} on the rank that updates it, which has {format_bytes(there_bytes)}; give "
            f"this tensor to an element-wise class such as AdamW, or split it into several parameters"
        )


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return available_bytes()
