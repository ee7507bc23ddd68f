"""Which state is replicated on every rank, which is sharded, and in which memory it is. The ZeRO family is this table;
communication and copies follow from it.

| stage | optimizer | gradients | parameters |
|---|---|---|---|
| 0 | replicated | replicated | replicated |
| 1 | sharded | replicated | replicated |
| 2 | sharded | sharded | replicated |
| 3 | sharded | sharded | sharded |

A stage is a row of data. The engine never asks for a stage number. Beside its scope a state has a tier: where
the optimizer state is not on the device, gradients are copied to the host, which runs the update, and the updated
parameters are copied back.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Scope(Enum):
    """How much of a state one rank holds."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


class Tier(Enum):
    """Which memory holds a state."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Placement(NamedTuple):
    """The scope and the tier of each state of one unit."""

    optimizer: Scope
    gradients: Scope
    parameters: Scope
    optimizer_tier: Tier = Tier.DEVICE
    parameters_tier: Tier = Tier.DEVICE
    hidden_between_passes: bool = False  # parameters are visible in forward and backward only: updates may overlap

    @property
    def updated_on_host(self) -> bool:
        """The optimizer runs on the host, because its state is there or on disk."""
        return self.optimizer_tier is not Tier.DEVICE

    @property
    def gathers_updated(self) -> bool:
        """Each rank updates its shard of parameters that are replicated, so an all-gather follows the update."""
        return self.optimizer is Scope.SHARDED and self.parameters is Scope.REPLICATED

    def on(self, optimizer: Tier, parameters: Tier) -> Placement:
        """This placement with other tiers."""
        hidden = optimizer is not Tier.DEVICE and self.parameters is Scope.SHARDED
        return self._replace(optimizer_tier=optimizer, parameters_tier=parameters, hidden_between_passes=hidden)

    def over(self, ranks: int) -> Placement:
        """The placement on so many ranks. One rank holds everything, so nothing is reduced or all-gathered; offloaded
        parameters are still copied to the device for use."""
        if ranks > 1:
            return self
        kept = self.parameters if self.parameters_tier is not Tier.DEVICE else Scope.REPLICATED
        return self._replace(optimizer=Scope.REPLICATED, gradients=Scope.REPLICATED, parameters=kept)


STAGES: dict[int, Placement] = {
    0: Placement(optimizer=Scope.REPLICATED, gradients=Scope.REPLICATED, parameters=Scope.REPLICATED),
    1: Placement(optimizer=Scope.SHARDED, gradients=Scope.REPLICATED, parameters=Scope.REPLICATED),
    2: Placement(optimizer=Scope.SHARDED, gradients=Scope.SHARDED, parameters=Scope.REPLICATED),
    3: Placement(optimizer=Scope.SHARDED, gradients=Scope.SHARDED, parameters=Scope.SHARDED),
}
