"""Parameters as views of one flat buffer: the offset, shape and strides of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onefold.cost.layout import Span, UnitLayout
from onefold.model.dtensor_shards import local_tensor
from onefold.model.storage import dense_stride


class FlatViews:
    """The shapes and strides of a unit's parameters; makes a parameter's view of any flat buffer of the unit's layout.
    For a DTensor they are those of its local tensor."""

    def __init__(self, layout: UnitLayout, params: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.layout, self.dtype, self.device = layout, dtype, params[0].device
        self._shapes = [(local_tensor(p).size(), dense_stride(p)) for p in params]
        self._starts = [slot.start for slot in layout.slots]

    def empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.dtype, device=self.device)

    def view(self, flat: Tensor, index: int) -> Tensor:
        size, stride = self._shapes[index]
        return flat.as_strided(size, stride, flat.storage_offset() + self._starts[index])

    def size(self, index: int) -> torch.Size:
        return self._shapes[index][0]

    def stride(self, index: int) -> tuple[int, ...]:
        return self._shapes[index][1]

    def all(self, flat: Tensor) -> list[Tensor]:
        first, strided = flat.storage_offset(), flat.as_strided
        places = zip(self._shapes, self._starts, strict=True)
        return [strided(size, stride, first + start) for (size, stride), start in places]

    def in_memory_order(self, tensor: Tensor, index: int) -> Tensor:
        """A parameter's tensor as a 1-D vector, its elements in the order of the flat buffer."""
        size, stride = self._shapes[index]
        if tensor.stride() != stride:
            tensor = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def flatten(self, params: Sequence[Tensor], span: Span, dtype: torch.dtype) -> Tensor:
        """These elements of the unit as a new vector, copied from the parameters; padding is zero."""
        flat = torch.zeros(span.numel, dtype=dtype, device=self.device)
        for index, slot in enumerate(self.layout.slots):
            part = slot.span.clip(span)
            if part.numel:
                source = self.in_memory_order(local_tensor(params[index]).detach(), index)
                at = part.shift(-slot.start)
                flat[part.start - span.start : part.stop - span.start].copy_(source[at.start : at.stop])
        return flat

    def zero_padding(self, flat: Tensor) -> None:
        for gap in self.layout.gaps:
            flat[gap.start : gap.stop].zero_()
