"""Parameters that were frozen when shard() was called and are unfrozen later: what the engine asks about them, answered
for a model that is not attached yet."""

from __future__ import annotations

from torch import Tensor, nn


class NoUnfreezing:
    """A model whose frozen parameters stay frozen."""

    def follow(self, taken: frozenset[int] = frozenset(), *, in_forward: bool = False) -> None:
        """Lets parameters train that have been unfrozen. Those whose ids are `taken` are about to join a param group;
        the others join the Optimizer that was made for all that train. Collective; with `in_forward` if there are any,
        and then a rank that sees none hears of it when it steps."""

    def keep_loaded(self, param: nn.Parameter, value: Tensor) -> None:
        """A state dict has fp32 values of a parameter that has been unfrozen and has no master yet."""

    def never_trained(self) -> set[str]:
        """Names of parameters that have been frozen since shard(), in units that train because others of theirs were
        unfrozen."""
        return set()
