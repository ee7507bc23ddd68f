"""Offload(optimizer="auto", path=…): whether the disk has room for what is to be on it. All ranks get one answer."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from onefold.cost.states import file_bytes, updated_numel
from onefold.offload.files import disk_share, no_room
from onefold.optim.fullest_rank import FullestRank
from onefold.optim.step_needs import StepNeeds
from onefold.runtime.engine import Engine
from onefold.settings.offload import Offload
from onefold.settings.placement import Tier


class DiskRoom:
    def __init__(self, engine: Engine, needs: StepNeeds, agreed: FullestRank) -> None:
        self._engine, self._needs, self._agreed = engine, needs, agreed

    @property
    def used(self) -> bool:
        """Whether state may be on disk."""
        return self._path is not None and not self._needs.cost.small

    def fits(self, tiers: Sequence[Tier], waiting: Collection[int] = ()) -> bool:
        """Whether the disks of all ranks have room for the state on these tiers, of which units that are `waiting` have
        masters only. Collective."""
        return bool(self._agreed.smallest(self._growth(tiers, waiting) <= self._left()))

    def check(self, tiers: Sequence[Tier], waiting: Collection[int] = ()) -> None:
        """Raises on every rank, before any optimizer state moves, if some disk has no room for it. Collective."""
        if not self.used or self.fits(tiers, waiting):
            return
        assert self._path is not None
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed, left = self._agreed.largest(self._growth(tiers, waiting)), self._agreed.smallest(self._left())
        raise no_room(self._path, int(needed) * ranks, left * ranks)

    def may_fit(self, host_bytes: int) -> bool:
        """Whether devices, hosts and disks together could hold all state, if nothing else were there. Collective."""
        engine = self._engine
        files = sum(image.nbytes for unit in engine.units for image in (unit.image, unit.flat_params.image) if image)
        total = self.state_bytes(range(len(engine.units)))
        return bool(self._agreed.smallest(total <= engine.watch.budget() + host_bytes + files + self._left()))

    def state_bytes(self, numbers: Iterable[int]) -> int:
        """Bytes of master, optimizer state and averages of these units, as in files."""
        whole = self.file_bytes()
        return sum(whole[number] for number in numbers)

    def file_bytes(self, waiting: Collection[int] = ()) -> list[int]:
        """Bytes that the file of each unit would have; units that are `waiting` have masters only."""
        trained = [pair for pair in zip(*self._needs.rows(), strict=True) if pair[0].trained]
        vectors = [0 if at in waiting else nbytes for at, nbytes in enumerate(self._needs.vectors())]
        return [
            file_bytes(updated_numel(size, placement) * size.widths.master, nbytes) + unit.average_bytes
            for unit, (size, placement), nbytes in zip(self._engine.units, trained, vectors, strict=True)
        ]

    @property
    def room_bytes(self) -> int:
        """Bytes that this rank's files may have in all."""
        return self._there() + self._left()

    def _growth(self, tiers: Sequence[Tier], waiting: Collection[int]) -> int:
        """Bytes by which this rank's files will grow."""
        files = zip(self.file_bytes(waiting), tiers, strict=True)
        return sum(nbytes for nbytes, tier in files if tier is Tier.DISK) - self._there()

    def _there(self) -> int:
        return sum(unit.image.nbytes for unit in self._engine.units if unit.image is not None)

    def _left(self) -> int:
        return disk_share(self._path) if self._path is not None else 0

    @property
    def _path(self) -> str | Path | None:
        return Offload.of(self._engine.resolved.settings.offload).path
