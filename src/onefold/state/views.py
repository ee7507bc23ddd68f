"""Parameters as views of one flat buffer: where each lies, with its own shape and strides."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onefold.cost.layout import Span, UnitLayout
from onefold.model.dtensor_shards import held
from onefold.model.storage import dense_stride


class FlatViews:
    """The shapes behind a layout; gives a parameter's view of any flat buffer that has this layout."""

    def __init__(self, layout: UnitLayout, params: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.layout, self.dtype, self.device = layout, dtype, params[0].device
        self._shapes = [(held(p).size(), dense_stride(p)) for p in params]
        self._starts = [slot.start for slot in layout.slots]

    def empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def view(self, flat: Tensor, index: int) -> Tensor:
        size, stride = self._shapes[index]
        return flat.as_strided(size, stride, flat.storage_offset() + self._starts[index])

    def stride(self, index: int) -> tuple[int, ...]:
        """In which order a parameter's elements lie."""
        return self._shapes[index][1]

    def all(self, flat: Tensor) -> list[Tensor]:
        first, strided = flat.storage_offset(), flat.as_strided
        places = zip(self._shapes, self._starts, strict=True)
        return [strided(size, stride, first + start) for (size, stride), start in places]

    def in_memory_order(self, tensor: Tensor, index: int) -> Tensor:
        """A parameter's elements one behind the other, as they lie in a flat buffer."""
        size, stride = self._shapes[index]
        if tensor.stride() != stride:
            tensor = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def lay(self, params: Sequence[Tensor], span: Span, dtype: torch.dtype) -> Tensor:
        """These elements of the unit, from the parameters; zeros in the gaps."""
        flat = torch.zeros(span.numel, dtype=dtype, device=self.device)
        for index, slot in enumerate(self.layout.slots):
            part = slot.span.clip(span)
            if part.numel:
                source = self.in_memory_order(held(params[index]).detach(), index)
                at = part.shift(-slot.start)
                flat[part.start - span.start : part.stop - span.start].copy_(source[at.start : at.stop])
        return flat

    def zero_gaps(self, flat: Tensor) -> None:
        for gap in self.layout.gaps:
            flat[gap.start : gap.stop].zero_()
