"""Gradients that add up over several backwards before a step: which backwards reduce, and that sums are fp32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

from onefold.errors import ConfigError
from onefold.settings.placement import Scope
from onefold.settings.zero import REDUCE
from onefold.state.unit import Unit


class Accumulation(Enum):
    """What happens to the gradients of a backward when it ends."""

    OFF = "they are reduced, and the gradients of the step are complete"
    EACH = "they are reduced into the sum of earlier backwards, and more backwards follow"
    ONCE = "they stay on this rank, added to its local sums, and more backwards follow"


def check_reduce(reduce: str | None) -> None:
    """Raises unless this is what accumulate(reduce=…) knows."""
    if reduce is not None and reduce not in REDUCE:
        raise ConfigError(f"reduce={reduce!r} is unknown; use one of {', '.join(map(repr, REDUCE))}")


class Accumulating:
    """Whether accumulate() is on for a model, and whether it ever was. `scope` is that of the model's gradients."""

    def __init__(self, units: Sequence[Unit], scope: Scope) -> None:
        self._units = units
        self._usual = Accumulation.ONCE if scope is Scope.REPLICATED else Accumulation.EACH
        self.now = Accumulation.OFF
        self.wide_sums = False  # gradients have accumulated: sums are fp32, and buffers of local sums stay
        self.wide_everywhere = False  # all ranks know that gradients have accumulated on some

    @property
    def final(self) -> bool:
        """True if the next backward completes the gradients of a step."""
        return self.now is Accumulation.OFF

    @property
    def reducing(self) -> bool:
        """True if the next backward reduces its gradients."""
        return self.now is not Accumulation.ONCE

    @contextmanager
    def enter(self, reduce: str | None) -> Iterator[None]:
        """Accumulate: `reduce` is "each", "once", or None for what suits the scope of gradients."""
        self.now = self._usual if reduce is None else Accumulation[reduce.upper()]
        self.keep_wide_sums()
        try:
            yield
        finally:
            self.now = Accumulation.OFF

    def keep_wide_sums(self) -> None:
        """Gradients have accumulated in this run: from now on sums are fp32."""
        self.wide_sums = True
        for unit in self._units:
            unit.gradients.widen()

    def keep_wide_sums_everywhere(self) -> None:
        """Gradients have accumulated on some rank, as all ranks know: sums are fp32 on all of them."""
        self.wide_everywhere = True
        self.keep_wide_sums()

    def follow(self, older: Accumulating) -> None:
        """The model has other units than when `older` was made."""
        self.wide_everywhere = older.wide_everywhere
        if older.wide_sums:
            self.keep_wide_sums()
