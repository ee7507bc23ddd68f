"""Sums over ranks, always in rank order, so that every stage adds the same numbers in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_wide(parts: Sequence[Tensor], out: Tensor, plus: Tensor | None, scale: float, wide: Tensor) -> None:
    """out = (parts[0] + parts[1] + …) × scale [+ plus], computed in the fp32 buffer `wide` and rounded once."""
    if len(parts) == 1 and parts[0].dtype is wide.dtype:
        torch.mul(parts[0], scale, out=wide)
    else:
        wide.copy_(parts[0])
        for part in parts[1:]:
            wide.add_(part)
        wide.mul_(scale)
    if plus is not None:
        wide.add_(plus)
    if out.data_ptr() != wide.data_ptr():
        out.copy_(wide)


def sum_in_order(parts: Sequence[Tensor], out: Tensor, plus: Tensor | None) -> None:
    """out = ((parts[0] + parts[1]) + …) [+ plus]. The parts are overwritten; `out` may be one of them, or `plus`."""
    *head, last = parts
    total = head[0] if head else last
    for part in head[1:]:
        total.add_(part)
    if plus is not None:
        torch.add(plus, total.add_(last) if head else last, out=out)
    elif head:
        torch.add(total, last, out=out)
    elif out.data_ptr() != last.data_ptr():
        out.copy_(last)
