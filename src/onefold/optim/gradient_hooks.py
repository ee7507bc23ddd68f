"""Users' hooks on the complete gradients of a step, and what users wrote into gradients before step()."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Set

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from onefold.optim.reduced_gradients import complete, pieces, share_writes
from onefold.runtime.engine import Engine
from onefold.runtime.refusals import Call

Hook = Callable[[str, Tensor], object]


class GradientHooks:
    """The hooks of one Optimizer. They see all gradients but those of `others`: names that other Optimizers update."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._hooks: OrderedDict[int, Hook] = OrderedDict()
        self._ran = False  # the hooks have seen the gradients of this step
        self._written = False  # pieces of gradients were given out, and may have been changed

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def register(self, hook: Hook) -> RemovableHandle:
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def complete(self, call: Call, others: Set[str]) -> None:
        """Completes the gradients of the step, and runs the hooks on each, once per step. Collective."""
        complete(self._engine, call)
        self.run(others)

    def run(self, others: Set[str]) -> None:
        """Runs the hooks on each gradient, once per step; gradients are complete."""
        if self._hooks and not self._ran:
            self._ran = self._written = True
            for name, piece in pieces(self._engine, others):
                for hook in list(self._hooks.values()):
                    hook(name, piece)

    def forget(self) -> None:
        """The hooks are to run again: gradients change, or the step has ended."""
        self._ran = False

    def pieces_given_out(self) -> None:
        """Users have pieces of this step's gradients, and may change them until step()."""
        self._written = True

    def share_writes(self) -> None:
        """Before the update: ranks that hold the same elements take what their owner wrote. Collective."""
        if self._written:
            self._engine.schedule.drain()
            share_writes(self._engine)
            self._written = False
