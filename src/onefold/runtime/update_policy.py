"""When a unit is updated: at step(), in backward, or on the host. An engine owns one policy and tells it what happens.

The engine, reports and checkpoints never ask which policy it is; they ask what they need to know (whether gradients
stay after backward, whether anything is in flight). Calls that a policy cannot serve are in the table of refusals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


class StepInputs(NamedTuple):
    """What optimizer.step() knows when gradients are complete and finite."""

    groups: list[dict[str, Any]]  # the optimizer's param groups
    clip: float | Tensor  # what 16-bit gradients are still to be multiplied by
    unscale: float  # one over the loss scale
    bad: Tensor | None  # on the device: kernels that see it set write nothing

    def factor(self, *, narrow: bool) -> float | Tensor:
        """What a unit's gradients are multiplied by; wide ones were clipped in place."""
        return self.clip * self.unscale if narrow else self.unscale


class UpdatePolicy(Protocol):
    @property
    def keeps_gradients(self) -> bool:
        """Gradients stay from backward to zero_grad(), so that they can be seen, clipped and accumulated."""
        ...

    @property
    def awaits_step(self) -> bool:
        """A backward has updated units, and step() has not been called since."""
        ...

    @property
    def most_lent_bytes(self) -> int:
        """Most bytes of gradients that wait on the device for a host update while backward runs."""
        ...

    @property
    def lent_bytes(self) -> int:
        """Bytes of complete gradients that wait on the device now for a host update of backward."""
        ...

    def reduction_starts(self, index: int) -> None:
        """The reduction of this unit's gradient is about to start, on every rank in the same order."""
        ...

    def reduced(self, index: int, *, final: bool) -> bool:
        """This unit's reduction has ended; `final` if no more micro-batches follow. True if the policy takes the
        gradient."""
        ...

    def step(self, inputs: StepInputs) -> None:
        """Update whatever has not been updated. Collective."""
        ...

    def finish(self) -> None:
        """End the updates that backward has started, so that all ranks hold the same values. Collective."""
        ...

    def wait(self) -> None:
        """Wait until no update runs on the host."""
        ...

    def forget_prepared(self) -> None:
        """Parameters, optimizer state or settings may change before step(): updates prepared for it do not hold."""
        ...

    @property
    def spare(self) -> dict[int, tuple[list[Tensor], list[Tensor]]]:
        """Memory for prepared updates, by unit: of parameters, and of master and optimizer state."""
        ...

    def abandon(self) -> None:
        """Every value is about to be replaced: end updates in flight, also those that failed."""
        ...

    def follow_placement(self, moved: Sequence[int]) -> None:
        """The optimizer state of these units is on other tiers now. Nothing is in flight."""
        ...

    def end(self) -> None:
        """The Optimizer is gone or replaced, and nothing is in flight: frees its state."""
        ...


class NoUpdates:
    """The policy of an engine that has no Optimizer: gradients are reduced, and stay."""

    @property
    def keeps_gradients(self) -> bool:
        return True

    @property
    def awaits_step(self) -> bool:
        return False

    @property
    def most_lent_bytes(self) -> int:
        return 0

    @property
    def lent_bytes(self) -> int:
        return 0

    def reduction_starts(self, index: int) -> None:
        pass

    def reduced(self, index: int, *, final: bool) -> bool:
        return False

    def step(self, inputs: StepInputs) -> None:
        raise AssertionError("only an Optimizer steps, and it brings a policy that updates")

    def finish(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def forget_prepared(self) -> None:
        pass

    @property
    def spare(self) -> dict[int, tuple[list[Tensor], list[Tensor]]]:
        return {}

    def abandon(self) -> None:
        pass

    def follow_placement(self, moved: Sequence[int]) -> None:
        pass

    def end(self) -> None:
        pass


class Policies(NoUpdates):
    """The policies of several Optimizers, none of which updates in backward. Each Optimizer steps its own."""

    def __init__(self, policies: Sequence[UpdatePolicy]) -> None:
        self._policies = list(policies)

    @property
    def most_lent_bytes(self) -> int:
        return sum(policy.most_lent_bytes for policy in self._policies)

    def reduced(self, index: int, *, final: bool) -> bool:
        return any(policy.reduced(index, final=final) for policy in self._policies)

    def finish(self) -> None:
        for policy in self._policies:
            policy.finish()

    def wait(self) -> None:
        for policy in self._policies:
            policy.wait()

    def forget_prepared(self) -> None:
        for policy in self._policies:
            policy.forget_prepared()

    @property
    def spare(self) -> dict[int, tuple[list[Tensor], list[Tensor]]]:
        return {index: memory for policy in self._policies for index, memory in policy.spare.items()}

    def abandon(self) -> None:
        for policy in self._policies:
            policy.abandon()
