"""Tensors that rest in a file: they read as NaN until they are opened, and come back as they were, cut or joined."""

from __future__ import annotations

import torch

from onefold.memory import storage_key
from onefold.tiers.disk import Scratch
from onefold.tiers.host import HostPool
from onefold.tiers.image import Image


def test_what_rests_has_no_memory_and_comes_back_as_it_was(tmp_path) -> None:
    scratch, pool = Scratch(tmp_path, 0), HostPool(pinned=False)
    values, halves = torch.arange(1000.0), torch.arange(2000, dtype=torch.int16)
    count, leaves = torch.tensor(3.0), [values, halves]
    image = Image(scratch.file(0, "test"), pool, lambda: [*leaves, count])
    image.close(changed=True)
    image.reap()
    assert torch.isnan(values).all() and values.shape == (1000,) and values.untyped_storage().nbytes() == 4
    assert not halves.any() and halves.shape == (2000,)
    assert float(count) == 3.0, "what is short stays in memory"
    image.open()
    assert torch.equal(values, torch.arange(1000.0)) and torch.equal(halves, torch.arange(2000, dtype=torch.int16))
    values.mul_(2.0)
    first, second = values[:512], values[512:]  # cut: nothing moves
    leaves[:] = [first, second, halves]
    before = image.nbytes
    image.close(changed=True)
    assert image.nbytes == before and torch.isnan(first).all() and torch.isnan(second).all()
    leaves.append(torch.full((256,), 7.0))  # one more: all move together, once
    image.open()
    image.close(changed=True)
    image.open()
    assert torch.equal(torch.cat([first, second]), 2.0 * torch.arange(1000.0)) and bool((leaves[-1] == 7.0).all())
    assert len({storage_key(leaf) for leaf in leaves}) == 1
    image.close(changed=False)
    assert torch.isnan(leaves[-1]).all()
    scratch.close()
