"""A step of torch's own class that a flag on the device takes back, so that the host need not wait to know the flag.

1 Copy what the class may write: parameters and state.  2 Run the class.  3 If the flag is set, the device selects the
copies, else what was written: then bits are those of a bare step.

Classes with `fused=True` that torch lets skip a step themselves (`found_inf`, as torch.amp.GradScaler uses it) need no
copies. State on the host (step counts) is written back in the next step, when the host has read the flag. State that
the class makes in this very step cannot be selected: there the host waits for the flag, once, and drops such state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from onefold.optim.trials import bare_step

PLAIN = (bool, int, float, str, type(None))


class _Before(NamedTuple):
    """What one parameter and its state were before the step."""

    param: nn.Parameter
    value: Tensor | None  # None where the class itself skips
    leaves: list[Any]
    spec: TreeSpec


class GuardedStep:
    """One step of a class, and what the host needs to take it back."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        params: Sequence[nn.Parameter],
        bad: Tensor,
        run: Callable[[], None] | None = None,
    ) -> None:
        """Takes the step, or runs what stands for it; `bad` is a float on the parameters' device, 1 if nothing may be
        written, else 0."""
        self._optimizer, self._bad = optimizer, bad
        self._numbers = {key: value for key, value in vars(optimizer).items() if isinstance(value, PLAIN)}
        self._skips = skips_by_itself(optimizer)
        self._before = [self._copied(param) for param in params]
        if self._skips:
            given: Any = optimizer
            given.grad_scale, given.found_inf = None, bad
            try:
                bare_step(optimizer)
            finally:
                del given.grad_scale, given.found_inf
        elif run is not None:
            run()
        else:
            bare_step(optimizer)
        flag = bad.bool()
        self._on_host = [(one.param, leaves) for one in self._before if (leaves := self._select(one, flag)) is not None]
        self._before = []

    def undo(self) -> None:
        """Writes state on the host back to what it was; the device has written nothing."""
        for param, before in self._on_host:
            leaves, spec = tree_flatten(dict(self._optimizer.state[param]))
            if any(value is not None for value in before):
                kept = [now if old is None else old.value for now, old in zip(leaves, before, strict=True)]
                self._optimizer.state[param].update(tree_unflatten(kept, spec))
        vars(self._optimizer).update(self._numbers)

    def _copied(self, param: nn.Parameter) -> _Before:
        leaves, spec = tree_flatten(dict(self._optimizer.state.get(param, {})))
        copies = [leaf.clone() if self._copies(leaf) else leaf for leaf in leaves]
        return _Before(param, None if self._skips else param.detach().clone(), copies, spec)

    def _copies(self, leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and not (self._skips and leaf.device == self._bad.device)

    def _select(self, before: _Before, flag: Tensor) -> list[_Old | None] | None:
        """Selects on the device; what must be written back on the host if the flag was set, by leaf of the state. None
        where there is nothing left to write back."""
        param, state = before.param, self._optimizer.state
        if before.value is not None:
            torch.where(flag, before.value, param.data, out=param.data)
        leaves, spec = tree_flatten(dict(state.get(param, {})))
        if spec != before.spec or not all(map(_alike, before.leaves, leaves)):
            if self._bad.item():  # state made in this step: the host waits
                state.pop(param, None)
                if before.leaves:
                    state[param] = tree_unflatten(before.leaves, before.spec)
                vars(self._optimizer).update(self._numbers)
            return None
        left: list[_Old | None] = []
        for old, new in zip(before.leaves, leaves, strict=True):
            on_device = isinstance(new, Tensor) and new.device == flag.device
            if on_device and not self._skips:
                torch.where(flag, old, new, out=new)
            left.append(None if on_device else _Old(old))
        return left


class _Old(NamedTuple):
    """A leaf of the state on the host, as it was."""

    value: Any


def skips_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's kernels of this class read a flag on the device and write nothing if it is set."""
    able = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(able) and all(group.get("fused") for group in optimizer.param_groups)


def can_be_guarded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all that a step of the class writes is known: parameters, its state of them, and plain numbers. A class
    that keeps other things of its own in the optimizer must not run in a step that is to be skipped."""
    own = vars(optimizer).keys() - _attributes_of_all()
    return all(isinstance(getattr(optimizer, name), PLAIN) or callable(getattr(optimizer, name)) for name in own)


def _alike(old: Any, new: Any) -> bool:
    """Whether a leaf of the state is what it was, but for its value."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        return (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
    return not isinstance(old, Tensor) and not isinstance(new, Tensor)


@cache
def _attributes_of_all() -> frozenset[str]:
    """The attributes that every torch optimizer has. Found at need: the first optimizer loads torch's compiler."""
    return frozenset(vars(torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=0.0)))
