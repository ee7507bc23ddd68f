"""Tensors that rest in a file: they read as NaN until they are opened, and come back as they were, cut or joined."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from onefold.errors import OffloadError
from onefold.model.storage import storage_key
from onefold.offload.disk import Scratch
from onefold.offload.host import HostPool
from onefold.offload.image import Image


def test_what_rests_has_no_memory_and_comes_back_as_it_was(tmp_path) -> None:
    scratch, pool = Scratch(tmp_path, 0), HostPool(pinned=False)
    values, halves = torch.arange(1000.0), torch.arange(2000, dtype=torch.int16)
    count, leaves = torch.tensor(3.0), [values, halves]
    image = Image(scratch.file(0, "test"), pool, lambda: [*leaves, count])
    image.store(changed=True)
    image.wait_stored()
    assert torch.isnan(values).all() and values.shape == (1000,) and values.untyped_storage().nbytes() == 4
    assert not halves.any() and halves.shape == (2000,)
    assert float(count) == 3.0, "what is short stays in memory"
    image.load()
    assert torch.equal(values, torch.arange(1000.0)) and torch.equal(halves, torch.arange(2000, dtype=torch.int16))
    values.mul_(2.0)
    first, second = values[:512], values[512:]  # cut: nothing moves
    leaves[:] = [first, second, halves]
    before = image.nbytes
    image.store(changed=True)
    assert image.nbytes == before and torch.isnan(first).all() and torch.isnan(second).all()
    leaves.append(torch.full((256,), 7.0))  # one more: all move together, once
    image.load()
    image.store(changed=True)
    image.load()
    assert torch.equal(torch.cat([first, second]), 2.0 * torch.arange(1000.0)) and bool((leaves[-1] == 7.0).all())
    assert len({storage_key(leaf) for leaf in leaves}) == 1
    image.store(changed=False)
    assert torch.isnan(leaves[-1]).all()
    scratch.close()


def test_a_matrix_comes_back_with_its_shape_and_strides(tmp_path) -> None:
    scratch, wanted = Scratch(tmp_path, 0), torch.arange(600.0).view(20, 30)
    matrix, sliced = wanted.clone().t(), torch.cat([wanted, wanted])[::2]  # not dense: it is stored row by row
    image = Image(scratch.file(0, "test"), HostPool(pinned=False), lambda: [matrix, sliced])
    for _ in range(2):
        image.store(changed=True)
        assert matrix.isnan().all() and matrix.shape == (30, 20) and matrix.untyped_storage().nbytes() == 4
        image.load()
        assert torch.equal(matrix.t(), wanted) and matrix.stride() == (1, 30)
        assert torch.equal(sliced, torch.cat([wanted, wanted])[::2]) and sliced.is_contiguous()
    scratch.close()


class Slow:
    """A write that ends when it is told to."""

    def __init__(self, write: Any, error: Exception | None = None) -> None:
        self._write, self._error = write, error
        self.waited, self.may_end = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.waited.set()
        assert self.may_end.wait(60)
        self._write.wait()
        if self._error is not None:
            raise self._error


def slowly_written(tmp_path: Any, error: Exception | None = None) -> tuple[Scratch, Image, Slow]:
    """An image that a thread of its own is seeing through to its file."""
    scratch, leaf = Scratch(tmp_path, 0), torch.arange(1000.0)
    file = scratch.file(0, "test")
    image = Image(file, HostPool(pinned=False), lambda: [leaf])
    write, slow = file.write, []
    file.write = lambda buffer: slow.append(Slow(write(buffer), error)) or slow[-1]
    image.store(changed=True)
    return scratch, image, slow[0]


def test_nobody_reads_past_a_write_that_another_thread_is_seeing_through(tmp_path) -> None:
    scratch, image, slow = slowly_written(tmp_path)
    seen = threading.Thread(target=image.wait_stored)
    seen.start()
    assert slow.waited.wait(60)
    opened = threading.Thread(target=image.load)
    opened.start()
    opened.join(0.2)  # it would have been over long ago
    assert opened.is_alive()
    slow.may_end.set()
    for thread in (seen, opened):
        thread.join(60)
    assert image.is_loaded
    scratch.close()


def test_a_write_that_failed_is_heard_by_all_who_come_after(tmp_path) -> None:
    scratch, image, slow = slowly_written(tmp_path, OffloadError("the disk is full"))
    slow.may_end.set()
    for use in (image.wait_stored, image.load, image.wait_stored):
        with pytest.raises(OffloadError, match="the disk is full"):
            use()
    scratch.close()
