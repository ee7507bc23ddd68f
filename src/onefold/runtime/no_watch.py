"""The memory watch of a model whose placement is fixed: it watches nothing. memory_watch.py has the other one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import Tensor

from onefold.cost.filling import Taken
from onefold.runtime.seen_inputs import Graph, Growth


class NoWatch:
    """Where the tiers of optimizer state were all decided by shard()."""

    active = False  # a step may move optimizer state between device, host and disk
    decided = True  # a step has decided where optimizer state is
    steps = 0  # begun so far

    forward_s = 0.0  # seconds of the forward of a micro-batch, by those of the first step
    forwards = 0  # micro-batches of the first step

    def may_move_units(self, indices: frozenset[int]) -> None:
        """These trained units, by number, may be moved by the first step."""

    def may_move(self, index: int) -> bool:
        """Whether the first step may move the state of this trained unit to the device, so that it waits for step()."""
        return False

    def growth(self, inputs: Iterable[Tensor], *, sums: bool) -> Growth:
        """How much more memory than any before a forward may take that begins with these inputs, beside `sums` of
        gradients or without; nothing if a step is still to decide."""
        return Growth()

    def learn_inputs(self) -> None:
        """What the forwards of this step took is known: later ones with such inputs take no more."""

    def forget_inputs(self) -> None:
        """What the forwards of this step would have taken is not known: later ones with such inputs may take more."""

    def comes_back(self, nbytes: int) -> None:
        """So many parked bytes come back to the device, which were not there in this step until now."""

    def graph(self) -> Graph | None:
        """An object to be kept by the autograd graph of a forward that ends; None if nobody asks for it."""
        return None

    def watch_after(self, make_way: Callable[[], None]) -> None:
        """The forward that begins may take more than any before: watches this step from here on, after `make_way`."""

    def forward_begins(self) -> None:
        """A training forward begins."""

    def forward_ended(self) -> None:
        """The forward that began last has ended, and has not raised; or one that does not train has."""

    @property
    def watching(self) -> bool:
        """Whether it is measured how much memory the step takes that has begun."""
        return False

    def state_bytes_before(self, unit: str) -> int:
        """Bytes of the state of the trained unit of this name, wherever it was, when the first step began."""
        return 0

    def units_change(self) -> None:
        """The model has other units from now on."""

    def units_begin(self, indices: Collection[int]) -> None:
        """The forward of a module begins; its units, by number in `engine.unsharding`, are unsharded."""

    def reduced(self, index: int, *, final: bool) -> None:
        """The reduction of a trained unit's gradient has ended; `final` in the last micro-batch of a step."""

    def step_begins(self) -> list[Taken]:
        """step() has complete gradients. How much memory the parts of the step took, if that is known."""
        return []

    @property
    def keeps_looking(self) -> bool:
        """Whether it is known how much memory this step took."""
        return False

    def decide(self) -> None:
        """Where state is was decided."""

    def made_room(self) -> None:
        """State has left the device, or nothing more can: what was seen until now says nothing about the next step."""

    def budget(self) -> int:
        raise AssertionError("nothing is watched")

    @property
    def slack_bytes(self) -> int:
        return 0

    def was_short(self) -> bool:
        return False

    def failed(self) -> bool:
        return False
