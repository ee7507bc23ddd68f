"""Where block inputs are between forward and backward: on the device, on the host, whole or 1/N of each (P_a).

Forward hands over one input at a time. This rank's part of it is copied into an arena, and the tensor itself is free to
go. Backward asks for inputs in reverse: a part comes back from the host if it was there, the parts of the others are
gathered, and while a block computes, the inputs of the block before it are on their way already.

All ranks of the tensor-parallel group must hold the same input, or the gathered one is no rank's. The first forward
compares them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.activations.arena import Arena
from onefold.activations.transfers import CudaMoves, Moves, moves_of
from onefold.comm.agreement import fingerprint
from onefold.comm.communicator import Comm, Pending
from onefold.comm.meter import Label
from onefold.comm.spans import NOTHING, span
from onefold.cost.layout import part_numel
from onefold.errors import ConfigError, StateError
from onefold.model.storage import dense_stride, storage_key

ACTIVATION = "activation"  # what its messages are for
FORWARDS = 1024  # numbers of forwards in the names of messages


class Form(NamedTuple):
    """What makes a tensor out of elements that lie one behind the other."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call:
    """One call of a block, and what it kept. Calls are numbered in the order of forward."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.kept: list[weakref.ref[Kept]] = []

    def start(self) -> None:
        """Let everything it kept come back."""
        for reference in self.kept:
            if (kept := reference()) is not None:
                kept.start()


class Kept:
    """Stands in autograd's memory for an input of a block."""

    def __init__(self, store: Store, call: Call, tensor: Tensor, label: Label) -> None:
        self.call, self._store, self._label = call, store, label
        self.form = Form(tensor.size(), dense_stride(tensor), tensor.dtype)
        self.numel = tensor.numel()
        self._arriving: tuple[Tensor, Pending | None, Any] | None = None
        self._slot = store.arena.take(part_numel(self.numel, store.ranks) * tensor.itemsize)
        self._part = self._slot.view(tensor.dtype)
        self._lay(tensor.detach())
        self._version = self._part._version

    def _lay(self, tensor: Tensor) -> None:
        """Copy my part away."""
        store, part = self._store, self._part.numel()
        if tensor.stride() != self.form.stride:
            tensor = tensor.contiguous()
        flat = tensor.as_strided((self.numel,), (1,))
        mine = flat[store.rank * part : (store.rank + 1) * part]
        target = self._part[: mine.numel()]
        if not store.on_host:
            target.copy_(mine)
            return
        with span("download", ACTIVATION, self.call.name):
            store.moves.out(mine, target)

    def start(self) -> None:
        """Let it come back: from the host, from the others."""
        if self._arriving is not None or not self._store.moving:
            return
        store, part = self._store, self._part.numel()
        whole = torch.empty(part * store.ranks, dtype=self.form.dtype, device=store.device)
        pending = None
        with store.aside():
            with span("upload", ACTIVATION, self.call.name) if store.on_host else NOTHING:
                store.bring(self._part, whole[store.rank * part : (store.rank + 1) * part])
            if store.ranks > 1:
                pending = store.comm.gather(whole, self._label)
            event = store.noted()
        self._arriving = (whole, pending, event)

    def bring(self) -> Tensor:
        """The input as it was."""
        if self._part._version != self._version:
            self._refuse_write()
        if not self._store.moving:
            return self._as_it_was(self._part)
        self.start()
        self._store.look_ahead(self.call)
        assert self._arriving is not None
        (whole, pending, event), self._arriving = self._arriving, None
        self._wait(pending, event)
        return self._as_it_was(whole)

    def _wait(self, pending: Pending | None, event: Any) -> None:
        if pending is not None:
            pending.wait()
        if event is not None:
            torch.cuda.current_stream(self._store.device).wait_event(event)

    def _as_it_was(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.form.size, self.form.stride, flat.storage_offset())

    def _refuse_write(self) -> None:
        raise StateError(
            f"{self.call.name} writes to its input in place, and its graph is used again; copy the input first "
            f'(x = x.clone()), or use activations="keep"'
        )

    def __del__(self) -> None:
        if self._arriving is not None:  # an error cut backward short: memory may not be reused under a copy
            _, _, event = self._arriving
            if event is not None:
                torch.cuda.current_stream(self._store.device).wait_event(event)


class Store:
    """`comm` are the ranks that hold the same inputs, if these are to be shared among them."""

    def __init__(self, device: torch.device, comm: Comm | None, *, on_host: bool, blocks: int) -> None:
        self.device, self.on_host = device, on_host
        self._comm, self._blocks = comm, blocks
        self.rank, self.ranks = (comm.rank, comm.size) if comm is not None else (0, 1)
        self.moves: Moves = moves_of(device)
        self.arena = Arena(self._host if on_host else self._device)
        self.host_storages: set[int] = set()
        self._calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()  # that kept something
        self._known: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Kept]]] = {}
        self._forward, self._number = 0, 0  # which forward, and which input of it
        self._compare = comm is not None and comm.size > 1 and not comm.simulated
        self.blind = False  # a forward whose inputs hold nothing: there is nothing to compare
        self._numbers = count()  # of calls
        self.calls = 0  # blocks called by this forward
        self.parts: list[int] = []  # bytes of each part this forward kept

    @property
    def place(self) -> str:
        """The category under which it is reported."""
        return "checkpoints_host" if self.on_host else "checkpoints"

    @property
    def moving(self) -> bool:
        """Whether inputs must be fetched from elsewhere."""
        return self.on_host or self.ranks > 1

    @property
    def comm(self) -> Comm:
        assert self._comm is not None
        return self._comm

    # -- forward ----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        self._forward, self._number = self._forward + 1, 0
        self.calls, self.parts = 0, []

    def end_forward(self) -> int:
        """The number of its last call that kept something."""
        self.moves.arrive()
        self._known.clear()
        if self.parts and not self.blind:
            self._compare = False
        return max(self._calls, default=-1)

    def call(self, name: str) -> Call:
        """A block is called."""
        self.calls += 1
        self.moves.arrive()
        return Call(name, next(self._numbers))

    def keep(self, call: Call, tensor: Tensor) -> Kept:
        """Each tensor once, however many blocks it goes into."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version and (kept := known[2]()):
            return kept
        nbytes = part_numel(tensor.numel(), self.ranks) * tensor.itemsize
        self.arena.expect(nbytes * self._blocks)
        label = Label(ACTIVATION, f"{call.name} (input {self._number} of forward {self._forward % FORWARDS})")
        self._number += 1
        if self._compare and not self.blind:
            self._same_everywhere(call, tensor)
        kept = Kept(self, call, tensor, label)
        call.kept.append(weakref.ref(kept))
        self._calls[call.number] = call
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version, weakref.ref(kept))
        self.parts.append(nbytes)
        return kept

    def _same_everywhere(self, call: Call, tensor: Tensor) -> None:
        mine = f"{fingerprint(tensor)} {tensor.numel():20}".encode()
        rows = self.comm.gather_bytes(mine, Label("agree", f"the input of {call.name}"))
        if len(set(rows)) > 1:
            raise ConfigError(
                f"the input of {call.name} is not the same on all {self.ranks} ranks of the mesh axis 'tp', so there "
                f"is nothing to share: it is split over them already (sequence parallelism), they were given different "
                f'batches, or their random numbers differ; use activations="checkpoint" or "checkpoint+host"'
            )

    # -- backward ---------------------------------------------------------------------------------------------------

    def start(self, number: int) -> None:
        """A call's inputs are needed soon."""
        if (call := self._calls.get(number)) is not None:
            call.start()

    def look_ahead(self, call: Call) -> None:
        """What an earlier call kept is needed next."""
        earlier = max((number for number in self._calls if number < call.number), default=-1)
        self.start(earlier)

    # -- places -----------------------------------------------------------------------------------------------------

    def aside(self) -> Any:
        """What runs inside runs beside compute, after what is computed now."""
        if not isinstance(self.moves, CudaMoves):
            return nullcontext()
        self.moves.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.moves.stream)

    def bring(self, part: Tensor, target: Tensor) -> None:
        self.moves.back(part, target) if self.on_host else target.copy_(part)

    def noted(self) -> Any:
        return self.moves.stream.record_event() if isinstance(self.moves, CudaMoves) else None

    def _device(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _host(self, nbytes: int) -> Tensor:
        slab = self.moves.host(nbytes)
        key = storage_key(slab)
        self.host_storages.add(key)
        weakref.finalize(slab.untyped_storage(), self.host_storages.discard, key)
        return slab

    def planned(self) -> dict[str, int]:
        """Bytes that the inputs of the last forward need, by place."""
        return {self.place: sum(self.parts)}

    def planned_gathers(self) -> int:
        """Bytes this rank sends so that the inputs of the last forward are whole once more."""
        return sum(self.parts) * (self.ranks - 1)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """By place."""
        yield from ((self.place, tensor) for tensor in self.arena.tensors())
