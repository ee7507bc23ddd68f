"""Which state is whole and which is sharded, and where it lies. The ZeRO family is this table; communication and
copies follow from it.

| stage | optimizer | gradients | parameters |
|---|---|---|---|
| 0 | whole | whole | whole |
| 1 | shard | whole | whole |
| 2 | shard | shard | whole |
| 3 | shard | shard | shard |

A stage is a row of data. Nothing below this module asks for a stage number. Beside its scope a state has a tier: where
the optimizer's state is not on the device, gradients go down to the host, which updates, and values come up again.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Scope(Enum):
    """How much of a state one rank holds."""

    WHOLE = "whole"
    SHARD = "shard"


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
    late: bool = False  # values are seen in forward and backward only, so an update may run beside the next forward

    @property
    def away(self) -> bool:
        """The host updates."""
        return self.optimizer_tier is not Tier.DEVICE

    def on(self, optimizer: Tier, parameters: Tier) -> Placement:
        """The same scopes on other tiers."""
        late = optimizer is not Tier.DEVICE and self.parameters is Scope.SHARD
        return self._replace(optimizer_tier=optimizer, parameters_tier=parameters, late=late)

    def over(self, ranks: int) -> Placement:
        """A shard of one is the whole: nothing need be reduced, copied or gathered over a single rank. But values that
        are not on the device come there for use."""
        if ranks > 1:
            return self
        kept = self.parameters if self.parameters_tier is not Tier.DEVICE else Scope.WHOLE
        return self._replace(optimizer=Scope.WHOLE, gradients=Scope.WHOLE, parameters=kept)


STAGES: dict[int, Placement] = {
    0: Placement(optimizer=Scope.WHOLE, gradients=Scope.WHOLE, parameters=Scope.WHOLE),
    1: Placement(optimizer=Scope.SHARD, gradients=Scope.WHOLE, parameters=Scope.WHOLE),
    2: Placement(optimizer=Scope.SHARD, gradients=Scope.SHARD, parameters=Scope.WHOLE),
    3: Placement(optimizer=Scope.SHARD, gradients=Scope.SHARD, parameters=Scope.SHARD),
}
