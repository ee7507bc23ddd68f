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
    """The hooks of one Optimizer. They see all gradients but those of parameters with the names `others`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._hooks: OrderedDict[int, Hook] = OrderedDict()
        self._shown = False  # the gradients of this step, to the hooks
        self._written = False  # pieces of gradients were given out, and may have been changed

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def register(self, hook: Hook) -> RemovableHandle:
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def complete(self, call: Call, others: Set[str]) -> None:
        """Completes the gradients of the step, and shows each once to the hooks. Collective."""
        complete(self._engine, call)
        self.run(others)

    def run(self, others: Set[str]) -> None:
        """Shows each gradient to the hooks, once per step. All are complete."""
        if self._hooks and not self._shown:
            self._shown = self._written = True
            for name, piece in pieces(self._engine, others):
                for hook in list(self._hooks.values()):
                    hook(name, piece)

    def forget(self) -> None:
        """Other gradients come, which the hooks have not seen."""
        self._shown = False

    def pieces_given_out(self) -> None:
        """Users have pieces of this step's gradients, and may change them until step()."""
        self._written = True

    def share_writes(self) -> None:
        """Before the update: ranks that hold the same elements take what their owner wrote. Collective."""
        if self._written:
            self._engine.schedule.drain()
            share_writes(self._engine)
            self._written = False
