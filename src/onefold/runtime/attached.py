"""The Optimizers and EMAs of one model and the store of its block inputs, as its engine sees them.

A model may have several Optimizers, each for parameters of its own. They are held weakly: an Optimizer that nobody
holds any more is gone, with its state. A new Optimizer replaces every older one that has one of its parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from onefold.cost.states import StateCost
from onefold.runtime.seen_inputs import Growth
from onefold.runtime.update_policy import NoUpdates, Policies, UpdatePolicy


class Update(NamedTuple):
    """What updates one parameter."""

    name: str
    shape: tuple[int, ...]
    cls: str
    """The name of the optimizer class."""
    owner: int | None
    """The rank, among those that share the states, that updates all of it; None if every rank updates its elements."""
    why: str
    """What decided on the class; empty if a param group says it."""


class AttachedOptimizer(Protocol):
    """What an engine and its reports ask of an Optimizer that was made for a model."""

    param_groups: list[dict[str, Any]]

    @property
    def clipped(self) -> bool:
        """True if gradients of this step are to be clipped when step() reads them."""
        ...

    @property
    def pending_clip(self) -> float | Tensor:
        """What step() will multiply 16-bit gradients by: the clipping factor."""
        ...

    @property
    def indices(self) -> frozenset[int]:
        """The trained parameters, by number, that the Optimizer updates."""
        ...

    def gradients_change(self) -> None:
        """Another backward of the step begins."""
        ...

    def forget_clipping(self) -> None:
        """The gradients that were clipped are gone."""
        ...

    def run_gradient_hooks(self) -> None:
        """Shows each gradient to the user's hooks, once per step. All are complete."""
        ...

    def planned_state(self, index: int, *, full: bool = False) -> tuple[int, int]:
        """Bytes of one unit's optimizer state: of vectors, and of step counts. With `full`, once all of it has been
        updated."""
        ...

    def full_vectors(self) -> list[int]:
        """Bytes of each unit's optimizer state once all of it has been updated, without step counts."""
        ...

    @property
    def state_form(self) -> str:
        """The form of the optimizer state: fp32, bf16 or 8bit."""
        ...

    @property
    def state_cost(self) -> StateCost | None:
        """What the optimizer state costs, at most; None if it updates nothing."""
        ...

    @property
    def in_backward(self) -> bool:
        """Whether units are updated in backward."""
        ...

    def planned_traffic(self) -> dict[str, int]:
        """Bytes that this rank sends in a step for the update itself, by purpose."""
        ...

    def updates(self) -> list[Update]:
        """Which class updates each parameter, in the model's order; none if one element-wise class updates all."""
        ...

    def replaced(self, index: int) -> None:
        """A newer Optimizer has this parameter: the older one's state is freed, and it refuses to update."""
        ...

    def follow_units(self) -> UpdatePolicy:
        """The model has other units: state of those that stay is kept. How the Optimizer updates from now on."""
        ...

    def follow_placement(self, moved: Sequence[int]) -> None:
        """The optimizer state of these units is on other tiers now, and they are updated there."""
        ...

    def make_room(self) -> None:
        """The device has run out of memory: moves optimizer state to the host, if there is some."""
        ...

    def make_way(self, growth: Growth) -> None:
        """A forward begins that may take so much more memory than any before: optimizer state is in host memory until
        step(), if there may be too little room for both."""
        ...

    def adopt(self, taken: frozenset[int]) -> None:
        """Parameters have been unfrozen: updates them if it was made for all that train, but for `taken` ones (ids)."""
        ...

    def unsharded(self) -> None:
        """The model is plain again: the state is freed."""
        ...


class Attached(NamedTuple):
    optimizer: weakref.ref[AttachedOptimizer]
    policy: UpdatePolicy


class AttachedOptimizers:
    """The Optimizers of one model, the oldest first, and when each of them updates."""

    def __init__(self) -> None:
        self._all: list[Attached] = []
        self.policy: UpdatePolicy = NoUpdates()  # of all of them together

    def __iter__(self) -> Iterator[AttachedOptimizer]:
        return (found for one in self._all if (found := one.optimizer()) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def add(self, optimizer: AttachedOptimizer, policy: UpdatePolicy) -> None:
        """A new Optimizer updates its parameters by this policy from now on. Nothing is in flight."""
        for one in list(self._all):
            older = one.optimizer()
            if older is not None and (shared := older.indices & optimizer.indices):
                one.policy.end()
                older.replaced(min(shared))
                self._all.remove(one)
        self._all.append(Attached(weakref.ref(optimizer), policy))
        self._choose()

    def follow_units(self) -> None:
        """The model has other units. Nothing is in flight."""
        self.forget_freed()
        for place, one in enumerate(self._all):
            optimizer = one.optimizer()
            assert optimizer is not None
            self._all[place] = one._replace(policy=optimizer.follow_units())
        self._choose()

    def adopt(self, taken: frozenset[int]) -> None:
        """Parameters have been unfrozen; those with the ids `taken` are another Optimizer's."""
        others = {id(param) for group in self.groups() for param in group["params"]}
        for optimizer in self:
            optimizer.adopt(taken | others)

    def follow_placement(self, moved: Sequence[int]) -> None:
        """The optimizer state of these units is on other tiers now."""
        for one in self._all:
            if (optimizer := one.optimizer()) is not None:
                optimizer.follow_placement(moved)

    def make_room(self) -> None:
        """The device has run out of memory: one of them moves optimizer state of all to the host."""
        for optimizer in self:
            optimizer.make_room()
            return

    def make_way(self, growth: Growth) -> None:
        """A forward begins that may take more memory than any before: one of them moves optimizer state of all."""
        for optimizer in self:
            optimizer.make_way(growth)
            return

    def groups(self) -> list[dict[str, Any]]:
        """The param groups of all Optimizers."""
        return [group for optimizer in self for group in optimizer.param_groups]

    def end(self) -> None:
        """The model is plain again. Nothing is in flight."""
        for one in self._all:
            one.policy.end()
            if (optimizer := one.optimizer()) is not None:
                optimizer.unsharded()
        self._all = []
        self._choose()

    def rehearse(self, policy: UpdatePolicy) -> None:
        """A rehearsal has no Optimizer; this policy stands for one."""
        self.policy = policy

    def forget_freed(self) -> None:
        """Ends the policies of Optimizers that nobody holds any more."""
        freed = [one for one in self._all if one.optimizer() is None]
        for one in freed:
            one.policy.wait()
            one.policy.end()
            self._all.remove(one)
        if freed:
            self._choose()

    def _choose(self) -> None:
        policies = [one.policy for one in self._all]
        self.policy = policies[0] if len(policies) == 1 else Policies(policies) if policies else NoUpdates()

    def of_others(self, optimizer: AttachedOptimizer) -> frozenset[int]:
        """The trained parameters, by number, that other Optimizers update."""
        return frozenset().union(*(other.indices for other in self if other is not optimizer))

    def gradients_change(self) -> None:
        """Another backward of the step begins."""
        for optimizer in self:
            optimizer.gradients_change()

    def forget_clipping(self) -> None:
        """All gradients are dropped."""
        for optimizer in self:
            optimizer.forget_clipping()

    @property
    def clipped(self) -> bool:
        """True if some Optimizer clips gradients of this step when step() reads them."""
        return any(optimizer.clipped for optimizer in self)

    @property
    def state_cost(self) -> StateCost | None:
        """What optimizer state costs, by the Optimizer whose state takes the most; None if there is none."""
        costs = [cost for optimizer in self if (cost := optimizer.state_cost) is not None]
        return max(costs, key=lambda cost: cost.per_element, default=None)

    @property
    def in_backward(self) -> bool:
        """Whether units are updated in backward, by every Optimizer."""
        return len(self) > 0 and all(optimizer.in_backward for optimizer in self)

    def planned_state(self, index: int) -> tuple[int, int]:
        """Bytes of one unit's optimizer state, of all Optimizers: of vectors, and of step counts."""
        rows = [optimizer.planned_state(index) for optimizer in self]
        return sum(vectors for vectors, _ in rows), sum(counts for _, counts in rows)


class Average(Protocol):
    """What checkpoints and the engine ask of an EMA."""

    name: str

    @property
    def vectors(self) -> Sequence[Tensor]: ...

    def restart(self) -> None: ...

    def follow_units(self) -> None: ...

    def unsharded(self) -> None: ...


class Averages:
    """The EMAs of one model, which are held weakly."""

    def __init__(self) -> None:
        self._all: list[weakref.ref[Average]] = []
        self.applied = False  # parameters are averages for a while

    def __iter__(self) -> Iterator[Average]:
        return (found for one in self._all if (found := one()) is not None)

    @property
    def names(self) -> list[str]:
        return [one.name for one in self]

    def add(self, average: Average) -> None:
        self._all = [one for one in self._all if one() is not None] + [weakref.ref(average)]

    def follow_units(self) -> None:
        """The model has other units."""
        for average in self:
            average.follow_units()

    def end(self) -> None:
        """The model is plain again."""
        for average in self:
            average.unsharded()
        self._all = []

    def apply(self, applied: bool) -> None:
        """Parameters are averages from now on, or no longer."""
        self.applied = applied


class BlockInputs(Protocol):
    """What reports and pipelines ask of the store of block inputs, where blocks are computed again in backward."""

    blind: bool  # the inputs of this forward hold nothing, so there is nothing to compare
    parts: list[int]  # bytes of each part that the last forward kept
    host_storages: set[int]

    @property
    def ranks(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...

    def planned(self) -> dict[str, int]: ...

    def planned_gathers(self) -> int: ...
