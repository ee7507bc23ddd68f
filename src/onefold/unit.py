"""One flat unit: a few parameters that live, move and are updated together.

Parameters. Their values lie in one flat buffer, `whole`; each parameter is a view of it. A gather writes the buffer,
nothing is copied out.

Gradients. Each parameter's gradient is scaled by 1/N and written (or added) to a flat buffer of the same layout: the
local sum. A *round* reduces that buffer over ranks and adds the result to what earlier rounds left. Where gradients
are whole, the first round happens in the unit's own buffer; where they are sharded, and for every later round before
the optimizer steps, the buffer is borrowed from the pool and returned when the round ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onefold.comm import Comm, Label, Pending, Reduction
from onefold.errors import ModelError
from onefold.layout import Span, UnitLayout
from onefold.memory import Pool
from onefold.placement import Placement, Scope


class Round(NamedTuple):
    """A reduction on the way and the buffers it holds."""

    reduction: Reduction
    flat: Tensor
    scratch: Tensor


class Unit:
    def __init__(
        self, layout: UnitLayout, params: Sequence[nn.Parameter], placement: Placement, comm: Comm, pool: Pool
    ) -> None:
        self.layout, self.params, self.placement = layout, list(params), placement
        self.name = layout.name
        self.mine = layout.shard(comm.rank)
        self.reduced = False  # the gradient below is the sum of at least one round
        self._comm, self._pool = comm, pool
        self._dtype, self._device = params[0].dtype, params[0].device
        self._shapes = [(p.size(), dense_stride(p)) for p in params]
        self._scale = 1.0 / comm.size
        self._home: Tensor | None = None  # whole gradient, where gradients are whole
        self._shard: Tensor | None = None  # my shard of it, where they are sharded
        self._local: Tensor | None = None  # the local sum being built
        self._written: set[int] = set()
        self._rounds: deque[Round] = deque()
        self.whole = self._lay_parameters()
        self.pointers = [p.data_ptr() for p in params]

    # -- parameters ------------------------------------------------------------------------------------------------

    def _lay_parameters(self) -> Tensor:
        whole = torch.empty(self.layout.numel, dtype=self._dtype, device=self._device)
        self._zero_gaps(whole)
        for param, view in zip(self.params, self._views(whole), strict=True):
            view.copy_(param.detach())
            param.data = view
        return whole

    def gather_parameters(self) -> Pending:
        """Send my updated shard to all and receive theirs."""
        return self._comm.gather(self.whole, Label("gather-updated", self.name))

    # -- gradients -------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """There is a local sum that no round has taken yet."""
        return self._local is not None

    def add_gradient(self, index: int, grad: Tensor) -> None:
        """Take one parameter's gradient into the local sum."""
        if grad.layout is not torch.strided:
            raise ModelError(
                f"{self.layout.slots[index].name} has a {grad.layout} gradient; flat units need dense ones: "
                f"build the module with sparse=False"
            )
        view = self._view(self._open_local(), index)
        if index in self._written:
            view.add_(grad, alpha=self._scale)
        else:
            torch.mul(grad, self._scale, out=view)
            self._written.add(index)

    def launch(self) -> None:
        """Start a round: what this rank did not write counts as zeros."""
        flat = self._open_local()
        for index in range(len(self.params)):
            if index not in self._written:
                self._view(flat, index).zero_()
        out = self._my_gradient()
        plus = out if self.reduced or self._rounds else None
        scratch = self._pool.take(self._comm.scratch_numel(self.layout.shard_numel), self._dtype)
        reduction = self._comm.reduce(flat, scratch, out, plus, Label("reduce", self.name))
        self._rounds.append(Round(reduction, flat, scratch))
        self._local = None
        self._written.clear()

    def finish(self) -> None:
        """End the oldest round: its sum is in the gradient, its buffers are back in the pool."""
        reduction, flat, scratch = self._rounds.popleft()
        reduction.wait()
        self._pool.give(scratch)
        if flat is not self._home:
            self._pool.give(flat)
        self.reduced = True

    def gather_gradient(self) -> Pending:
        """Make the reduced gradient whole, where the optimizer wants it whole."""
        assert self._home is not None
        return self._comm.gather(self._home, Label("gather-gradient", self.name))

    def gradient(self, span: Span) -> Tensor:
        """The reduced gradient of these elements of the unit, which this rank holds."""
        if self.placement.gradients is Scope.WHOLE:
            assert self._home is not None
            return self._home[span.start : span.stop]
        mine = span.shift(-self.mine.start)
        return self._my_gradient()[mine.start : mine.stop]

    def my_gradient(self) -> Tensor:
        return self.gradient(self.mine)

    def whole_gradient_view(self, index: int) -> Tensor:
        """One parameter's gradient as a view, where gradients are whole."""
        assert self._home is not None
        return self._view(self._home, index)

    def drop_gradient(self) -> None:
        """Forget all gradients."""
        assert not self._rounds
        if self._local is not None and self._local is not self._home:
            self._pool.give(self._local)
        self._local = None
        self._written.clear()
        self.reduced = False

    def zero_gradient(self) -> None:
        """Keep the gradient, as zeros."""
        was_reduced = self.reduced
        self.drop_gradient()
        for held in (self._home, self._shard):
            if held is not None:
                held.zero_()
        self.reduced = was_reduced

    def _open_local(self) -> Tensor:
        if self._local is None:
            at_home = self.placement.gradients is Scope.WHOLE and not self.reduced and not self._rounds
            self._local = self._hold_whole() if at_home else self._pool.take(self.layout.numel, self._dtype)
            self._zero_gaps(self._local)
        return self._local

    def _my_gradient(self) -> Tensor:
        if self.placement.gradients is Scope.WHOLE:
            return self._hold_whole()[self.mine.start : self.mine.stop]
        if self._shard is None:
            self._shard = torch.empty(self.layout.shard_numel, dtype=self._dtype, device=self._device)
        return self._shard

    def _hold_whole(self) -> Tensor:
        if self._home is None:
            self._home = torch.empty(self.layout.numel, dtype=self._dtype, device=self._device)
        return self._home

    def gradient_tensors(self) -> list[Tensor]:
        """What holds gradients now: the unit's own, and a local sum that waits in a borrowed buffer."""
        return [tensor for tensor in (self._home, self._shard, self._local) if tensor is not None]

    # -- views -----------------------------------------------------------------------------------------------------

    def _view(self, flat: Tensor, index: int) -> Tensor:
        size, stride = self._shapes[index]
        return flat.as_strided(size, stride, flat.storage_offset() + self.layout.slots[index].start)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [self._view(flat, index) for index in range(len(self.params))]

    def _zero_gaps(self, flat: Tensor) -> None:
        for gap in self.layout.gaps:
            flat[gap.start : gap.stop].zero_()


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides where it fills its memory (channels_last stays so), else those of a contiguous one."""
    dims = sorted((stride, size) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size > 1)
    filled = 1
    for stride, size in dims:
        if stride != filled:
            return tuple(torch.empty(tensor.size(), device="meta").stride())
        filled *= size
    return tuple(tensor.stride())
