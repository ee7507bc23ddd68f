"""A tensor that this rank owns: a wrapped optimizer of its own, which has its state and updates it.

The tensor has memory in an update only. Where the host keeps the state, it is on the device of the update meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from onefold.optim.guarded_step import GuardedStep
from onefold.optim.newton_schulz import ReducedGradient, direct, direction_settings
from onefold.optim.trials import bare_step
from onefold.optim.unit_optimizer import NOT_SETTINGS


class OwnedTensor:
    def __init__(self, slot: int, cls: type[torch.optim.Optimizer], kwargs: dict[str, Any], empty: Tensor) -> None:
        """`empty` stands for the tensor outside an update, where its state is kept."""
        self.slot = slot
        self._cls, self._kwargs, self._empty = cls, kwargs, empty
        self._tensor = nn.Parameter(empty)
        self._inner: torch.optim.Optimizer | None = None  # once the tensor has been updated or loaded
        self._guarded: GuardedStep | None = None  # the last step, under a flag

    @property
    def state(self) -> dict[str, Any]:
        return dict(self._inner.state.get(self._tensor, {})) if self._inner is not None else {}

    def follow(self, device: torch.device) -> None:
        """The state is on this device now."""
        self._guarded, self._empty = None, self._empty.to(device)
        self._tensor.data = self._empty

    def update(self, master: Tensor, gradient: Tensor, group: dict[str, Any], bad: Tensor | None) -> None:
        """Updates `master`, the tensor's values, in place. Nothing changes if the device flag `bad` is set."""
        self._tensor.data, self._tensor.grad = master, gradient
        self._step(group, bad, gradient.device, partial(bare_step, self._made()))
        self._tensor.grad, self._tensor.data = None, self._empty

    def find_direction(self, out: Tensor, gradient: ReducedGradient, group: dict[str, Any], bad: Tensor | None) -> None:
        """Of Muon: updates the state, and writes the direction in which the tensor is to move. The state does not
        change if the device flag `bad` is set."""
        settings = direction_settings(self._cls, group)
        assert settings is not None
        self._tensor.data = self._empty.new_zeros(()).expand(out.shape)  # torch's class looks at the form
        state = self._made().state
        self._tensor.data = self._empty
        self._step(group, bad, out.device, lambda: direct(state[self._tensor], gradient, settings, out))

    def undo_step(self) -> None:
        if self._guarded is not None:
            self._guarded.undo()
            self._guarded = None

    def replace_state(self, state: dict[str, Any], like: Tensor) -> None:
        """Sets the state; an empty one begins again with the next update. `like` has the tensor's form, not its
        values."""
        self._inner = None
        if state:
            self._tensor.data = like
            self._made().state[self._tensor] = state
            self._tensor.data = self._empty

    def _made(self) -> torch.optim.Optimizer:
        """The wrapped optimizer. It is made when the tensor has its form, since a class may make its state at once."""
        if self._inner is None:
            self._inner = self._cls([self._tensor], **self._kwargs)
        return self._inner

    def _step(self, group: dict[str, Any], bad: Tensor | None, device: torch.device, run: Callable[[], None]) -> None:
        """Runs an update with the settings of a param group, with the state on this device."""
        inner = self._made()
        inner.param_groups[0].update((key, value) for key, value in group.items() if key not in NOT_SETTINGS)
        self._guarded = None
        with self._state_on(device):
            if bad is None:
                run()
            else:
                self._guarded = GuardedStep(inner, [self._tensor], bad, run)

    @contextmanager
    def _state_on(self, device: torch.device) -> Iterator[None]:
        """Inside, optimizer state that the host keeps is on the device of the update."""
        if device == self._empty.device:
            yield
            return
        state = self._made().state[self._tensor]
        kept, form = tree_flatten(dict(state))
        on_device = [leaf.to(device) if _is_large(leaf) else leaf for leaf in kept]
        state.update(tree_unflatten(on_device, form))
        yield
        leaves, new_form = tree_flatten(dict(state))
        if new_form != form:  # the first update has made the state
            state.update(tree_map_only(Tensor, Tensor.cpu, dict(state)))
            return
        for old, new in zip(kept, leaves, strict=True):
            if _is_large(old):
                old.copy_(new)
        small = [new if not _is_large(old) else old for old, new in zip(kept, leaves, strict=True)]
        state.update(tree_unflatten(small, form))


def _is_large(leaf: Any) -> bool:
    """Whether a leaf of the state is a tensor that is worth a copy; step counts stay where they are."""
    return isinstance(leaf, Tensor) and leaf.ndim > 0
