"""Which parameters another stage of a pipeline holds too: none, for a model that is no part of a pipeline."""

from __future__ import annotations


class Untied:
    """Nothing is shared with another pipeline stage."""

    names: tuple[str, ...] = ()
    units: tuple[int, ...] = ()
    summed = False  # gradients of this step have been added to the other stage's

    def speaks_for(self, name: str) -> bool:
        """Whether this stage, not another one, saves a parameter."""
        return True

    def counts(self, index: int) -> bool:
        """Whether this stage's copy of a unit counts in sums over the whole model, such as a norm."""
        return True

    def sum(self) -> None:
        """Add this stage's and the other stage's gradients. Collective over both; once per step."""

    def forget(self) -> None:
        """The gradients of this step are gone."""
