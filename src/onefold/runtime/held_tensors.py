"""Every tensor that a sharded model and its Optimizers hold on this rank, on the device and in host memory.

On a CPU, device and host share memory; what would be offloaded from a device counts as the host's there too.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from onefold.model.storage import storage_key
from onefold.offload.image import belongs_in_file
from onefold.runtime.engine import Engine
from onefold.state.unit import Unit

CHECKPOINTS_HOST = "checkpoints_host"
PINNED, PAGEABLE = "pinned", "pageable"


def device_tensors(engine: Engine) -> dict[str, list[Tensor]]:
    """The tensors on the device, by category; and activation checkpoints on the host."""
    kept = list(engine.checkpoints.tensors()) if engine.checkpoints else []
    places = ("checkpoints", CHECKPOINTS_HOST)
    return {
        **{place: [tensor for where, tensor in kept if where == place] for place in places},
        "buffers": list(engine.model.buffers()),
        "communication": [*engine.pool.buffers(), *engine.tiers.host.waiting.buffers()],
        "gradients": [
            tensor for unit in engine.units if not unit.updated_on_host for tensor in unit.gradients.tensors()
        ],
        "optimizer": [
            tensor
            for unit in engine.units
            if not unit.updated_on_host
            for tensor in unit.state_tensors()
            if not (unit.parked and tensor.dim())
        ],
        "parameters": [t for unit in engine.all_units for t in unit.flat_params.tensors() if not _on_host(unit, t)]
        + [p for _, p in engine.frozen],
    }


def host_tensors(engine: Engine) -> dict[tuple[str, str], list[Tensor]]:
    """The tensors in host memory, by state and place; tensors that are only in files are left out."""
    host = engine.tiers.host
    near = PINNED if host.cuda else PAGEABLE
    found: dict[tuple[str, str], list[Tensor]] = {("staging", near): host.staging.buffers()}
    found.setdefault(("staging", PAGEABLE), []).extend(host.scratch.buffers())
    found["optimizer", PAGEABLE] = [t for unit in engine.units if unit.updated_on_host for t in _in_memory(unit)]
    found["optimizer", PAGEABLE] += [t for unit in engine.units if unit.parked for t in unit.state_tensors() if t.dim()]
    for parameters, state in engine.updates.spare.values():
        found.setdefault(("spare", near), []).extend(parameters)
        found.setdefault(("spare", PAGEABLE), []).extend(state)
    shards = [
        t
        for u in engine.all_units
        if u.flat_params.on_host and u.flat_params.image is None
        for t in u.flat_params.shards()
    ]
    found["parameters", near] = shards
    return found


def _on_host(unit: Unit, tensor: Tensor) -> bool:
    return unit.flat_params.on_host and any(tensor is shard for shard in unit.flat_params.shards())


def _in_memory(unit: Unit) -> list[Tensor]:
    """The tensors of master and optimizer state that are in memory, not only in a file."""
    return [tensor for tensor in unit.state_tensors() if unit.image is None or not belongs_in_file(tensor)]


def storages(engine: Engine) -> dict[int, tuple[str, Tensor]]:
    """Storage -> its category and a tensor of it. A borrowed buffer that holds a local sum counts as gradients."""
    rows = [
        *device_tensors(engine).items(),
        *((f"{state}, {place}", t) for (state, place), t in host_tensors(engine).items()),
    ]
    return {storage_key(tensor): (category, tensor) for category, tensors in rows for tensor in tensors}


def on_device(engine: Engine) -> dict[int, tuple[str, Tensor]]:
    """Storage -> its category and a tensor of it, of the device only."""
    rows = [row for row in device_tensors(engine).items() if row[0] != CHECKPOINTS_HOST]
    return {storage_key(tensor): (category, tensor) for category, tensors in rows for tensor in tensors}


class NotOnDevice:
    """Storages that count as the host's; on a CPU their tensors have the same device type as the others."""

    def __init__(self, engine: Engine) -> None:
        self._engine, host = engine, engine.tiers.host
        self._pools = (host.staging, host.scratch)
        pooled = {storage_key(buffer) for pool in self._pools for buffer in pool.buffers()}
        kept = [t for tensors in host_tensors(engine).values() for t in tensors if storage_key(t) not in pooled]
        self._kept: dict[object, weakref.ref[Any]] = {storage_key(t): weakref.ref(t.untyped_storage()) for t in kept}

    def __contains__(self, key: object) -> bool:
        store = self._engine.checkpoints
        if self._keeps(key) or (store is not None and key in store.host_storages):
            return True
        return any(pool.holds(key) for pool in self._pools)

    def _keeps(self, key: object) -> bool:
        """Whether this is a storage that host memory held from the start, and not a later one with the same key."""
        storage = self._kept.get(key)
        return storage is not None and storage() is not None
