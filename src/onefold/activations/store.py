"""The store of block inputs between forward and backward: on the device or on the host, complete or 1/N each (P_a).

In forward, this rank's part of each input is copied into an arena, and the tensor itself can be freed. In backward,
inputs are restored in reverse order: the part is copied from the host if it is there, and the parts of all ranks of
"tp" are all-gathered; while a block computes, the inputs of the block before it are prefetched.

Partitioning is right only if all ranks of "tp" have the same input. The first forward compares them.
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
from onefold.activations.transfers import CudaTransfers, Transfers, transfers_of
from onefold.comm.agreement import fingerprint
from onefold.comm.communicator import Comm
from onefold.comm.endpoint import Pending
from onefold.comm.meter import Label
from onefold.comm.spans import NOTHING, span
from onefold.cost.layout import part_numel
from onefold.errors import ConfigError, StateError
from onefold.model.storage import dense_stride, storage_key

ACTIVATION = "activation"  # the purpose of its messages
FORWARDS = 1024  # numbers of forwards in the names of messages


class Form(NamedTuple):
    """The size, strides and dtype with which a flat vector becomes the input again."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Call:
    """One call of a block, and the inputs kept for it. Calls are numbered in the order of forward."""

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.kept: list[weakref.ref[KeptInput]] = []

    def start_restore(self) -> None:
        """Starts to restore all inputs of this call."""
        for reference in self.kept:
            if (kept := reference()) is not None:
                kept.start_restore()


class KeptInput:
    """An input of a block that is kept in the store; autograd saves this object instead of the tensor."""

    def __init__(self, store: Store, call: Call, tensor: Tensor, label: Label) -> None:
        self.call, self._store, self._label = call, store, label
        self.form = Form(tensor.size(), dense_stride(tensor), tensor.dtype)
        self.numel = tensor.numel()
        self._restoring: tuple[Tensor, Pending | None, Any] | None = None
        self._slot = store.arena.take(part_numel(self.numel, store.ranks) * tensor.itemsize)
        self._part = self._slot.view(tensor.dtype)
        self._copy_part(tensor.detach())
        self._version = self._part._version

    def _copy_part(self, tensor: Tensor) -> None:
        """Copies this rank's part of the input into the arena."""
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
            store.transfers.to_host(mine, target)

    def start_restore(self) -> None:
        """Starts to restore the input: the copy from the host, and the all-gather over "tp"."""
        if self._restoring is not None or not self._store.moving:
            return
        store, part = self._store, self._part.numel()
        whole = torch.empty(part * store.ranks, dtype=self.form.dtype, device=store.device)
        pending = None
        with store.on_side_stream():
            with span("upload", ACTIVATION, self.call.name) if store.on_host else NOTHING:
                store.copy_back(self._part, whole[store.rank * part : (store.rank + 1) * part])
            if store.ranks > 1:
                pending = store.comm.all_gather(whole, self._label)
            event = store.record_event()
        self._restoring = (whole, pending, event)

    def restore(self) -> Tensor:
        """Waits until the input is restored, and starts to restore those of the call before."""
        if self._part._version != self._version:
            self._refuse_write()
        if not self._store.moving:
            return self._as_it_was(self._part)
        self.start_restore()
        self._store.prefetch_before(self.call)
        assert self._restoring is not None
        (whole, pending, event), self._restoring = self._restoring, None
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
        if self._restoring is not None:  # after an error in backward: the memory must not be reused while a copy runs
            _, _, event = self._restoring
            if event is not None:
                torch.cuda.current_stream(self._store.device).wait_event(event)


class Store:
    """`comm` is of the ranks along "tp", among which each input is partitioned; None keeps complete inputs."""

    def __init__(self, device: torch.device, comm: Comm | None, *, on_host: bool, blocks: int) -> None:
        self.device, self.on_host = device, on_host
        self._comm, self._blocks = comm, blocks
        self.rank, self.ranks = (comm.rank, comm.size) if comm is not None else (0, 1)
        self.transfers: Transfers = transfers_of(device)
        self.arena = Arena(self._host if on_host else self._device)
        self.host_storages: set[int] = set()
        self._calls: weakref.WeakValueDictionary[int, Call] = weakref.WeakValueDictionary()  # calls with kept inputs
        self._known: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[KeptInput]]] = {}
        self._forward, self._number = 0, 0  # the number of this forward, and of the next input in it
        self._compare = comm is not None and comm.size > 1 and not comm.simulated
        self.blind = False  # whether inputs are uninitialised, as when torch's pipeline learns shapes: not compared
        self._numbers = count()  # of calls
        self.calls = 0  # blocks called by this forward
        self.parts: list[int] = []  # bytes that each input of this forward takes in the arena

    @property
    def place(self) -> str:
        """The category of kept inputs in memory reports."""
        return "checkpoints_host" if self.on_host else "checkpoints"

    @property
    def moving(self) -> bool:
        """Whether restoring an input needs a transfer or an all-gather."""
        return self.on_host or self.ranks > 1

    @property
    def comm(self) -> Comm:
        assert self._comm is not None
        return self._comm

    def start_anew(self, blocks: int) -> None:
        """So many blocks are computed again from the next forward on: the arena gets their length."""
        self._blocks = blocks
        self.arena.start_anew()

    # -- forward ----------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        self._forward, self._number = self._forward + 1, 0
        self.calls, self.parts = 0, []

    def end_forward(self) -> int:
        """Ends a forward; the number of its last call with kept inputs."""
        self.transfers.wait_copied()
        self._known.clear()
        if self.parts and not self.blind:
            self._compare = False
        return max(self._calls, default=-1)

    def call(self, name: str) -> Call:
        """Counts a call of a block."""
        self.calls += 1
        self.transfers.wait_copied()
        return Call(name, next(self._numbers))

    def keep(self, call: Call, tensor: Tensor) -> KeptInput:
        """Keeps an input of a call; a tensor that is an input of several blocks is kept once."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version and (kept := known[2]()):
            return kept
        nbytes = part_numel(tensor.numel(), self.ranks) * tensor.itemsize
        self.arena.expect(nbytes * self._blocks)
        label = Label(ACTIVATION, f"{call.name} (input {self._number} of forward {self._forward % FORWARDS})")
        self._number += 1
        if self._compare and not self.blind:
            self._check_equal(call, tensor)
        kept = KeptInput(self, call, tensor, label)
        call.kept.append(weakref.ref(kept))
        self._calls[call.number] = call
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version, weakref.ref(kept))
        self.parts.append(nbytes)
        return kept

    def _check_equal(self, call: Call, tensor: Tensor) -> None:
        mine = f"{fingerprint(tensor)} {tensor.numel():20}".encode()
        rows = self.comm.all_gather_bytes(mine, Label("agree", f"the input of {call.name}"))
        if len(set(rows)) > 1:
            raise ConfigError(
                f"the input of {call.name} is not the same on all {self.ranks} ranks of the mesh axis 'tp', so it "
                f"cannot be partitioned: it is split over them already (sequence parallelism), they were given "
                f'different batches, or their random numbers differ; use activations="checkpoint" or "checkpoint+host"'
            )

    # -- backward ---------------------------------------------------------------------------------------------------

    def start_restore(self, number: int) -> None:
        """Starts to restore the inputs of a call."""
        if (call := self._calls.get(number)) is not None:
            call.start_restore()

    def prefetch_before(self, call: Call) -> None:
        """Starts to restore the inputs of the call before this one, which backward needs next."""
        earlier = max((number for number in self._calls if number < call.number), default=-1)
        self.start_restore(earlier)

    # -- memory and streams -----------------------------------------------------------------------------------------

    def on_side_stream(self) -> Any:
        """Inside, the current CUDA stream is the transfers' own, which has waited for the compute stream."""
        if not isinstance(self.transfers, CudaTransfers):
            return nullcontext()
        self.transfers.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.transfers.stream)

    def copy_back(self, part: Tensor, target: Tensor) -> None:
        self.transfers.to_device(part, target) if self.on_host else target.copy_(part)

    def record_event(self) -> Any:
        return self.transfers.stream.record_event() if isinstance(self.transfers, CudaTransfers) else None

    def _device(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _host(self, nbytes: int) -> Tensor:
        slab = self.transfers.host(nbytes)
        key = storage_key(slab)
        self.host_storages.add(key)
        weakref.finalize(slab.untyped_storage(), self.host_storages.discard, key)
        return slab

    def planned(self) -> dict[str, int]:
        """Bytes that the inputs of the last forward take, by category of the memory report."""
        return {self.place: sum(self.parts)}

    def planned_gathers(self) -> int:
        """Bytes that this rank sends in the all-gathers that restore the inputs of the last forward."""
        return sum(self.parts) * (self.ranks - 1)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The arena's memory, with its category in memory reports."""
        yield from ((self.place, tensor) for tensor in self.arena.tensors())
