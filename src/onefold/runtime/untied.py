"""Parameters tied across pipeline stages: what the engine asks of them, answered for a model that has none."""

from __future__ import annotations


class NoTiedParameters:
    """A model that shares no parameter with another pipeline stage."""

    names: tuple[str, ...] = ()
    units: tuple[int, ...] = ()
    summed = False  # gradients of this step have been added to the other stage's

    def saves(self, name: str) -> bool:
        """Whether this stage writes a parameter to checkpoints, and not the other stage that has it."""
        return True

    def counts(self, index: int) -> bool:
        """Whether this stage's copy of a unit counts in sums over all stages, such as the gradient norm."""
        return True

    def sum(self) -> None:
        """Sums the tied gradients of both stages. Collective over both; once per step."""

    def forget(self) -> None:
        """Called when the gradients of this step have been dropped."""
