"""A snapshot of what a rank owns, in host memory, by few transfers: neighbours in device memory are copied as one.

1 Elements that are views of state on the device are put in the order in which they lie there. 2 Each run of neighbours
of one storage gets room of the same shape in host memory, small gaps included, and is one transfer. 3 What must be
loaded or joined first, or may be written at any time, is copied piece by piece on the current stream.
A model has hundreds of parameters with three states each; a transfer of each costs the calling thread some 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from onefold.checkpoint.protocol.background import Worker
from onefold.checkpoint.protocol.state import OwnedElements, vector
from onefold.comm.streams import SideStream

ALIGN = 64  # bytes: a multiple of every dtype's itemsize
GAP_BYTES = 4096  # the largest gap between two neighbours that are copied as one, with the gap


class Run(NamedTuple):
    """Neighbours in one storage, copied as one."""

    whole: Tensor
    places: list[tuple[int, int]]  # (which of the owned elements, bytes from the beginning)


def staged(
    owned: Sequence[OwnedElements], device: torch.device, worker: Worker, beside: SideStream | None = None
) -> list[OwnedElements]:
    """What this rank owns, copied to host memory that the worker keeps between saves. From a GPU the copies are queued
    on the current stream, those of settled elements `beside` it, and must be waited for before they are read."""
    side = [beside is not None and one.settled for one in owned]
    runs = {on: list(_runs(owned, [i for i, there in enumerate(side) if there is on])) for on in (False, True)}
    together = {index for found in runs.values() for run in found for index, _ in run.places}
    starts, size = dict[int, int](), 0
    for run in (*runs[False], *runs[True]):
        starts |= {index: size + at for index, at in run.places}
        size += _aligned(run.whole.nbytes)
    for index, one in enumerate(owned):
        if index not in together:
            starts[index] = size
            size += _aligned(one.bytes)
    memory = worker.memory(size, pinned=device.type == "cuda")
    flats = [memory[starts[i] : starts[i] + one.bytes].view(one.dtype) for i, one in enumerate(owned)]
    for on in (False, True):
        with beside.after_current() if on and beside is not None else nullcontext():
            for run in runs[on]:
                start = starts[run.places[0][0]]
                there = memory[start : start + run.whole.nbytes].view(run.whole.dtype)
                there.copy_(run.whole, non_blocking=device.type == "cuda")
            for index in (index for index, there in enumerate(side) if there is on and index not in together):
                _stage(owned[index], flats[index], device)
    return [vector(one.name, one.state, one.elements, flat) for one, flat in zip(owned, flats, strict=True)]


def _runs(owned: Sequence[OwnedElements], which: Sequence[int]) -> Iterator[Run]:
    """Those of `which` that are views of state on the device, as runs of neighbours."""
    found = [(owned[i].read(owned[i].elements, torch.empty(0)), i) for i in which if owned[i].direct]
    found.sort(key=lambda one: (one[0].untyped_storage().data_ptr(), str(one[0].dtype), one[0].storage_offset()))
    assert all(part.dim() == 1 and part.is_contiguous() for part, _ in found)
    run: list[tuple[Tensor, int]] = []
    for part, index in found:
        if run and not _follows(run[-1][0], part):
            yield _joined(run)
            run = []
        run.append((part, index))
    if run:
        yield _joined(run)


def _follows(before: Tensor, part: Tensor) -> bool:
    """Whether a part lies behind another in one storage, near enough to be copied with it."""
    gap = (part.storage_offset() - before.storage_offset() - before.numel()) * part.itemsize
    same = before.untyped_storage().data_ptr() == part.untyped_storage().data_ptr() and before.dtype == part.dtype
    return same and 0 <= gap <= GAP_BYTES


def _joined(run: Sequence[tuple[Tensor, int]]) -> Run:
    (first, _), (last, _) = run[0], run[-1]
    begin = first.storage_offset()
    whole = first.as_strided((last.storage_offset() + last.numel() - begin,), (1,), begin)
    return Run(whole, [(index, int(part.storage_offset() - begin) * part.itemsize) for part, index in run])


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _stage(one: OwnedElements, flat: Tensor, device: torch.device) -> None:
    """Copies elements to the host."""
    cuda = device.type == "cuda"
    for span in one.spans():
        there = flat[span.start - one.elements.start : span.stop - one.elements.start]
        elsewhere = cuda and not one.on_host
        part = one.read(span, torch.empty(span.numel, dtype=one.dtype, device=device) if elsewhere else there)
        if part.data_ptr() != there.data_ptr():
            there.copy_(part, non_blocking=cuda)
