"""What the optimizer updates of one unit: the values themselves, an fp32 master beside them, or their missing halves.

The optimizer borrows fp32 vectors with `open` and gives them back with `close`, which rounds them into the values.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from onefold.comm.buffers import Pool
from onefold.cost.layout import Span
from onefold.state.rounding import join, narrow, split


class Copies(Protocol):
    """The values that compute sees, of what this rank owns: themselves, or a copy of them on the host."""

    @property
    def dtype(self) -> torch.dtype: ...

    def part(self, span: Span) -> Tensor: ...


class Master:
    """fp32 (or fp64) values: they are their own master."""

    def __init__(self, values: Copies, owned: Span) -> None:
        self._flat_params, self.owned = values, owned

    def open(self, span: Span) -> Tensor:
        """The master's values of these elements of the unit, to be updated in place."""
        return self._flat_params.part(span)

    def close(self, span: Span, wide: Tensor) -> None:
        """They have been updated."""

    @property
    def dtype(self) -> torch.dtype:
        return self._flat_params.dtype

    def peek(self, span: Span, out: Tensor) -> None:
        """A copy of some master values."""
        out.copy_(self._flat_params.part(span))

    def look(self, span: Span, scratch: Tensor) -> Tensor:
        """Some master values to read: as they lie here, or put together in `scratch`."""
        return self._flat_params.part(span)

    def take(self, span: Span, wide: Tensor) -> None:
        """New master values; the compute copy follows."""
        narrow(wide, self._flat_params.part(span))

    def poke(self, span: Span, wide: Tensor) -> None:
        """New master values, which the compute copy has already, rounded."""

    def adopt(self, span: Span) -> None:
        """The values of a parameter were edited in place: they are the truth now."""

    def watch(self) -> None:
        """The values may be edited by hand from here to `absorb`."""

    def absorb(self) -> None:
        """Where values differ from what they were at `watch`, they are the truth now."""

    def unwatch(self) -> None:
        """They were not edited after all, or it shall not count."""

    def tensors(self) -> list[Tensor]:
        return []


class NarrowMaster(Master):
    """16 bits compute, and `beside` them is what makes them a master: fp32 values, or remainders."""

    _before: Tensor | None = None

    def __init__(self, values: Copies, owned: Span, beside: Tensor) -> None:
        super().__init__(values, owned)
        self._beside = beside

    dtype = torch.float32

    def parts(self, span: Span) -> tuple[Tensor, Tensor]:
        """The compute copy, and what is beside it."""
        return self._flat_params.part(span), self._at(span)

    def tensors(self) -> list[Tensor]:
        return [self._beside]

    def _at(self, span: Span) -> Tensor:
        return self._beside[span.start - self.owned.start : span.stop - self.owned.start]

    def watch(self) -> None:
        self._before = self._flat_params.part(self.owned).clone()

    def unwatch(self) -> None:
        self._before = None

    def _remember(self, span: Span, wide: Tensor) -> None:
        """New values that are no edit."""
        if self._before is not None:
            narrow(wide, self._before[span.start - self.owned.start : span.stop - self.owned.start])

    def _edited(self, values: Tensor) -> Tensor:
        assert self._before is not None
        before, self._before = self._before, None
        return before.view(torch.int16) != values.view(torch.int16)


class WideMaster(NarrowMaster):
    """16-bit values, and an fp32 master beside them."""

    def open(self, span: Span) -> Tensor:
        return self._at(span)

    def close(self, span: Span, wide: Tensor) -> None:
        narrow(wide, self._flat_params.part(span))

    def peek(self, span: Span, out: Tensor) -> None:
        out.copy_(self._at(span))

    def look(self, span: Span, scratch: Tensor) -> Tensor:
        return self._at(span)

    def take(self, span: Span, wide: Tensor) -> None:
        self._at(span).copy_(wide)
        narrow(self._at(span), self._flat_params.part(span))

    def poke(self, span: Span, wide: Tensor) -> None:
        self._at(span).copy_(wide)
        self._remember(span, wide)

    def adopt(self, span: Span) -> None:
        part = span.clip(self.owned)
        self._at(part).copy_(self._flat_params.part(part))

    def absorb(self) -> None:
        values = self._flat_params.part(self.owned)
        self._beside.copy_(torch.where(self._edited(values), values.float(), self._beside))


class SplitMaster(NarrowMaster):
    """bf16 values that are the upper halves of the master, and the remainders beside them."""

    def __init__(self, values: Copies, owned: Span, remainder: Tensor, pool: Pool) -> None:
        super().__init__(values, owned, remainder)
        self._pool = pool

    def open(self, span: Span) -> Tensor:
        wide = self._pool.take(span.numel, torch.float32)
        self.peek(span, wide)
        return wide

    def close(self, span: Span, wide: Tensor) -> None:
        self.poke(span, wide)
        self._pool.give(wide)

    def peek(self, span: Span, out: Tensor) -> None:
        copy = self._flat_params.part(span)
        join(copy, self._at(span), out)
        broken = torch.isnan(out) & ~torch.isnan(copy)  # zeroed through .data, where the remainder means nothing
        if out.is_cuda or broken.any():
            out.copy_(torch.where(broken, copy.float(), out))

    def look(self, span: Span, scratch: Tensor) -> Tensor:
        self.peek(span, scratch[: span.numel])
        return scratch[: span.numel]

    def take(self, span: Span, wide: Tensor) -> None:
        split(wide.float(), self._flat_params.part(span), self._at(span))

    def poke(self, span: Span, wide: Tensor) -> None:
        split(wide, self._flat_params.part(span), self._at(span))
        self._remember(span, wide)

    def adopt(self, span: Span) -> None:
        self._at(span.clip(self.owned)).zero_()

    def absorb(self) -> None:
        self._beside.masked_fill_(self._edited(self._flat_params.part(self.owned)), 0)


def beside(wide: Tensor, kind: str | None) -> Tensor | None:
    """What is kept of fp32 values beside the 16-bit copy that `narrow` makes of them."""
    if kind != "split":
        return wide if kind else None
    remainder = torch.empty(wide.numel(), dtype=torch.int16, device=wide.device)
    split(wide, torch.empty(wide.numel(), dtype=torch.bfloat16, device=wide.device), remainder)
    return remainder


def master_of(values: Copies, owned: Span, beside: Tensor | None, pool: Pool) -> Master:
    """The master of one unit, with what is beside its values."""
    if beside is None:
        return Master(values, owned)
    return (
        SplitMaster(values, owned, beside, pool) if beside.dtype is torch.int16 else WideMaster(values, owned, beside)
    )
