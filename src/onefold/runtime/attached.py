"""What an engine and its reports ask of objects that rooms above attach to a model: its Optimizer, its block inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor


class AttachedOptimizer(Protocol):
    """What an engine and its reports ask of the Optimizer that was made for a model."""

    @property
    def clipped(self) -> bool:
        """True if gradients of this step are to be clipped when step() reads them."""
        ...

    def gradients_change(self) -> None:
        """Another backward of the step begins."""
        ...

    def forget_clipping(self) -> None:
        """The gradients that were clipped are gone."""
        ...

    def planned_state(self, index: int) -> tuple[int, int]:
        """Bytes of one unit's optimizer state: of vectors, and of step counts."""
        ...


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
