"""The master copy of one unit: the fp32 values that the optimizer updates.

Where parameters are fp32 (or fp64) they are their own master. Where 16 bits compute, the master is either an fp32 copy
beside the 16-bit parameters, or split: the bf16 parameters are its upper halves, and only the 16 remaining bits of each
element are stored. The optimizer asks for fp32 vectors with `begin_update` and returns them with `end_update`, which
rounds them into the parameters that compute reads (the compute copy).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onefold.comm.buffers import Pool
from onefold.cost.layout import Span
from onefold.state.rounding import join, narrow, not_rounded_from, split


class ComputeCopy(Protocol):
    """The parameters in their compute dtype, as far as this rank owns them: the flat parameters themselves, or their
    staging buffer on the host."""

    @property
    def dtype(self) -> torch.dtype: ...

    def part(self, span: Span) -> Tensor: ...


class Master:
    """The master of fp32 or fp64 parameters: the parameters themselves. All spans are elements of the unit."""

    dense = True  # its elements are stored as such, and `view` needs no scratch

    def __init__(self, params: ComputeCopy, owned: Span) -> None:
        self._params, self.owned = params, owned

    def begin_update(self, span: Span) -> Tensor:
        """The master's elements as a vector that the optimizer updates in place; `end_update` must follow."""
        return self._params.part(span)

    def end_update(self, span: Span, wide: Tensor) -> None:
        """Stores a vector from `begin_update` after its update, and rounds it into the compute copy."""

    def drop_update(self, wide: Tensor) -> None:
        """After an error: a vector from `begin_update` is not stored."""

    @property
    def dtype(self) -> torch.dtype:
        return self._params.dtype

    def read(self, span: Span, out: Tensor) -> None:
        """Copies elements of the master into `out`."""
        out.copy_(self._params.part(span))

    def view(self, span: Span, scratch: Tensor) -> Tensor:
        """Elements of the master for reading: a view where they are stored as such, else joined in `scratch`."""
        return self._params.part(span)

    def write_both(self, span: Span, wide: Tensor) -> None:
        """Sets elements of the master, and the compute copy to their rounded values."""
        narrow(wide, self._params.part(span))

    def write(self, span: Span, wide: Tensor) -> None:
        """Sets elements of the master; the compute copy is set too, or must hold their rounded values already."""

    def write_rounded(self, span: Span, rounded: Tensor) -> None:
        """Sets the elements of the master that do not round to these values of the compute dtype; the others keep the
        bits that rounding has lost. The compute copy is as after `write`."""

    def take_from_parameters(self, span: Span) -> None:
        """Sets elements of the master from the compute copy, which a user has edited in place."""

    def take_changed(self, span: Span) -> bool:
        """Sets the elements of the master that do not round to the compute copy from it: a user has edited these. True
        if there may be some. A split master has no such elements: its upper half is the copy."""
        return False

    def begin_user_writes(self) -> None:
        """Remembers the compute copy, so that `take_user_writes` can tell which elements a user has changed."""

    def take_user_writes(self) -> None:
        """Sets the master from the compute copy in every element that changed since `begin_user_writes`."""

    def drop_user_writes(self) -> None:
        """Ends what `begin_user_writes` began, and leaves the master as it is."""

    def tensors(self) -> list[Tensor]:
        """What the master stores beside the parameters."""
        return []


class StoredMaster(Master):
    """The master of 16-bit parameters, with what is `stored` beside them: fp32 values, or 16-bit remainders."""

    _before: Tensor | None = None  # the compute copy at begin_user_writes

    def __init__(self, params: ComputeCopy, owned: Span, stored: Tensor) -> None:
        super().__init__(params, owned)
        self._stored = stored

    dtype = torch.float32

    def copy_and_stored(self, span: Span) -> tuple[Tensor, Tensor]:
        """Elements of the compute copy, and what is stored beside them; update kernels write both."""
        return self._params.part(span), self._at(span)

    def tensors(self) -> list[Tensor]:
        return [self._stored]

    def exchange(self, stored: Tensor) -> Tensor:
        """Stores this tensor in place of the one that it has; that one."""
        self._stored, before = stored, self._stored
        return before

    def _at(self, span: Span) -> Tensor:
        return self._stored[span.start - self.owned.start : span.stop - self.owned.start]

    def write_rounded(self, span: Span, rounded: Tensor) -> None:
        wide = rounded.float()
        kept = torch.empty_like(wide)
        self.read(span, kept)
        self.write(span, torch.where(not_rounded_from(kept, rounded), wide, kept))

    def begin_user_writes(self) -> None:
        self._before = self._params.part(self.owned).clone()

    def drop_user_writes(self) -> None:
        self._before = None

    def _remember(self, span: Span, wide: Tensor) -> None:
        """Records a write that is not a user's, so that `take_user_writes` does not take it for one."""
        if self._before is not None:
            narrow(wide, self._before[span.start - self.owned.start : span.stop - self.owned.start])

    def _changed(self, copy: Tensor) -> Tensor:
        """Which elements of the compute copy differ from what they were at `begin_user_writes`."""
        assert self._before is not None
        before, self._before = self._before, None
        return before.view(torch.int16) != copy.view(torch.int16)


class Fp32Master(StoredMaster):
    """An fp32 master stored beside the 16-bit parameters."""

    def begin_update(self, span: Span) -> Tensor:
        return self._at(span)

    def end_update(self, span: Span, wide: Tensor) -> None:
        narrow(wide, self._params.part(span))

    def read(self, span: Span, out: Tensor) -> None:
        out.copy_(self._at(span))

    def view(self, span: Span, scratch: Tensor) -> Tensor:
        return self._at(span)

    def write_both(self, span: Span, wide: Tensor) -> None:
        self._at(span).copy_(wide)
        narrow(self._at(span), self._params.part(span))

    def write(self, span: Span, wide: Tensor) -> None:
        self._at(span).copy_(wide)
        self._remember(span, wide)

    def take_from_parameters(self, span: Span) -> None:
        part = span.clip(self.owned)
        self._at(part).copy_(self._params.part(part))

    def take_changed(self, span: Span) -> bool:
        copy, wide = self._params.part(span), self._at(span)
        if isinstance(copy, FakeTensor):  # a rehearsal, on tensors without memory
            return False
        changed = not_rounded_from(wide, copy)
        if not wide.is_cuda and not changed.any():
            return False
        wide.copy_(torch.where(changed, copy.float(), wide))
        return True

    def take_user_writes(self) -> None:
        copy = self._params.part(self.owned)
        self._stored.copy_(torch.where(self._changed(copy), copy.float(), self._stored))


class SplitMaster(StoredMaster):
    """A master whose upper halves are the bf16 parameters; the 16-bit remainders are stored beside them."""

    dense = False

    def __init__(self, params: ComputeCopy, owned: Span, remainder: Tensor, pool: Pool) -> None:
        super().__init__(params, owned, remainder)
        self._pool = pool

    def begin_update(self, span: Span) -> Tensor:
        wide = self._pool.take(span.numel, torch.float32)
        self.read(span, wide)
        return wide

    def end_update(self, span: Span, wide: Tensor) -> None:
        self.write(span, wide)
        self._pool.give(wide)

    def drop_update(self, wide: Tensor) -> None:
        self._pool.drop(wide)

    def read(self, span: Span, out: Tensor) -> None:
        join(self._params.part(span), self._at(span), out)

    def view(self, span: Span, scratch: Tensor) -> Tensor:
        self.read(span, scratch[: span.numel])
        return scratch[: span.numel]

    def write_both(self, span: Span, wide: Tensor) -> None:
        split(wide.float(), self._params.part(span), self._at(span))

    def write(self, span: Span, wide: Tensor) -> None:
        split(wide, self._params.part(span), self._at(span))
        self._remember(span, wide)

    def take_from_parameters(self, span: Span) -> None:
        self._at(span.clip(self.owned)).zero_()

    def take_user_writes(self) -> None:
        self._stored.masked_fill_(self._changed(self._params.part(self.owned)), 0)


def stored_master(wide: Tensor, kind: str | None) -> Tensor | None:
    """What a master of this kind ("fp32", "split" or None) stores beside the 16-bit copy that `narrow` makes of `wide`:
    the fp32 values themselves, their remainders, or nothing."""
    if kind != "split":
        return wide if kind else None
    remainder = torch.empty(wide.numel(), dtype=torch.int16, device=wide.device)
    split(wide, torch.empty(wide.numel(), dtype=torch.bfloat16, device=wide.device), remainder)
    return remainder


def make_master(params: ComputeCopy, owned: Span, stored: Tensor | None, pool: Pool) -> Master:
    """The master of one unit, given what `stored_master` made for it; int16 tensors are remainders."""
    if stored is None:
        return Master(params, owned)
    return (
        SplitMaster(params, owned, stored, pool) if stored.dtype is torch.int16 else Fp32Master(params, owned, stored)
    )
