"""Live bytes by category, from every tensor operation, and their breakdown at the peak.

Bytes of storages are counted, not what the process or its allocator has reserved.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onefold.model.dtensor_shards import local_tensor
from onefold.observe.tensor_messages import holds_dtensors

CLOSE = 0.002  # the breakdown is of an instant with at most so much less than the peak
CATEGORIES = ("parameters", "gradients", "optimizer", "buffers", "communication", "checkpoints", "activations")


class Tracker(TorchDispatchMode):
    """Live bytes of every storage that tensor operations make while this mode is on, and their breakdown at the peak.

    `known` gives the category of a storage; all others are activations (and temporaries). Storages in `elsewhere` are
    not on the device, and are not counted.
    """

    def __init__(
        self, known: Callable[[], dict[int, tuple[str, Tensor]]], elsewhere: Container[int] = frozenset()
    ) -> None:
        super().__init__()
        self._known, self._elsewhere = known, elsewhere
        self._serial = itertools.count()
        self._live: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # storage key -> reference, serial, bytes
        self._live_bytes = 0
        self._fullest: dict[int, int] = {}  # serial -> bytes, at the peak or shortly before
        self._fullest_bytes = 0
        self._category: dict[int, str] = {}  # serial -> category
        self.peak_bytes = 0

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Adds tensors that were made before the mode was on."""
        for tensor in tensors:
            self.note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if holds_dtensors(types):
            return NotImplemented  # DTensor computes with local tensors, which come here again
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        return result

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._classify()

    def note(self, tensor: Tensor) -> None:
        """Counts a tensor that was made, or whose storage was resized without a torch operation."""
        tensor = local_tensor(tensor)
        if type(tensor) not in (Tensor, torch.nn.Parameter, FakeTensor):
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._elsewhere:
            self._drop(key)
            return
        entry = self._live.get(key)
        if entry and entry[2] == nbytes:
            return
        if entry:
            self._drop(key)
        reference = weakref.ref(storage, lambda _: self._drop(key))
        self._live[key] = (reference, next(self._serial), nbytes)
        self._live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        if self._live_bytes > self._fullest_bytes * (1 + CLOSE):  # a breakdown is slow: not for every byte
            self._fullest_bytes = self._live_bytes
            self._classify()
            self._fullest = {serial: size for _, serial, size in self._live.values()}

    def _drop(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry:
            self._live_bytes -= entry[2]

    def _classify(self) -> None:
        for key, (category, _) in self._known().items():
            if key in self._live:
                self._category[self._live[key][1]] = category

    def peak(self) -> dict[str, int]:
        """Bytes by category at the peak; bytes after the last breakdown count as activations."""
        sums = dict.fromkeys(CATEGORIES, 0)
        for serial, nbytes in self._fullest.items():
            sums[self._category.get(serial, "activations")] += nbytes
        sums["activations"] += self.peak_bytes - sum(sums.values())
        return sums
