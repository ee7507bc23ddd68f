"""Live bytes of tensors on the device, from every tensor operation, and their peak.

Bytes of storages are counted, not what the process or its allocator has reserved.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onefold.model.dtensor_shards import holds_dtensors, local_tensor
from onefold.runtime.engine import Engine


class _Eager:
    """Has torch.compile run nothing while some mode counts. That is a setting of the process, and several models may be
    counted at once, which end in any order."""

    def __init__(self) -> None:
        self._modes, self._set, self._stance = 0, False, ExitStack()

    def enter(self) -> None:
        self._modes += 1
        if not self._set and "torch._dynamo" in sys.modules:  # else nothing is compiled, and its import takes seconds
            self._stance.enter_context(torch.compiler.set_stance("force_eager"))
            self._set = True

    def exit(self) -> None:
        self._modes -= 1
        if not self._modes:
            self._stance.close()
            self._set = False


EAGER = _Eager()


class LiveBytes(TorchDispatchMode):
    """Live bytes of every storage that tensor operations make while this mode is on, and the most there ever were.
    Storages in `elsewhere` are not on the device, and are not counted."""

    def __init__(self, elsewhere: Container[int] = frozenset()) -> None:
        super().__init__()
        self._elsewhere, self._serial = elsewhere, itertools.count()
        self._live: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # storage key -> reference, serial, bytes
        self.live_bytes = self.peak_bytes = 0

    def __enter__(self) -> LiveBytes:
        """Nothing that torch.compile has made runs inside: it sees no mode, and what it met beside one it would never
        compile afterwards."""
        EAGER.enter()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        EAGER.exit()

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
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self._grown()

    def _grown(self) -> None:
        """There were never so many bytes before."""

    def _drop(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry:
            self.live_bytes -= entry[2]


@contextmanager
def watching_sizes(engine: Engine, counts: LiveBytes) -> Iterator[None]:
    """Inside, also counts the flat buffers of units that are unsharded and resharded, which are resized."""
    watched = list(engine.unsharding.units)
    for unit in watched:
        unit.flat_params.on_resize.append(counts.note)
    try:
        yield
    finally:
        for unit in watched:
            unit.flat_params.on_resize.remove(counts.note)
