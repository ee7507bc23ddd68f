"""One case to estimate: a choice of settings for some work on some ranks and devices, and what it says of each unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from onefold.comm.strategy import Strategy, over_nccl, pairwise
from onefold.cost.activations import ActivationBytes, partly_recomputed
from onefold.cost.hardware import Hardware
from onefold.cost.sizes import Sizes, UnitSize
from onefold.cost.states import StateCost
from onefold.cost.transfers import TransferBytes, transfers_of
from onefold.cost.work import Grid, Work
from onefold.settings.placement import STAGES, Placement, Scope, Tier

FEW = 8  # units that stand for all where only a number of parameters is known: more than are in flight at once


class Choice(NamedTuple):
    """The settings that the planner chooses between."""

    stage: int
    keep_whole: int = 0  # stage 3: units of at most so many elements stay replicated
    optimizer: str = "device"  # or host, disk
    parameters: str = "device"
    activations: str = "checkpoint"
    device_units: int = 0  # optimizer on the host: how many units, the first of forward, are updated on the device

    def __str__(self) -> str:
        parts = [f"stage {self.stage}"]
        if self.keep_whole:
            parts.append("small units replicated")
        if self.parameters == self.optimizer != "device":
            parts.append(f"all on {self.parameters}")
        elif self.optimizer != "device":
            mixed = f" but for {self.device_units} units" if self.device_units else ""
            parts.append(f"optimizer on {self.optimizer}{mixed}")
            parts += [f"parameters on {self.parameters}"] if self.parameters != "device" else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is to be estimated for one rank, and what all its figures start from: sizes and placements of the units."""

    work: Work
    choice: Choice
    grid: Grid
    hardware: Hardware
    cost: StateCost
    batch: int = 1
    micro_batches: int = 1
    prefetch: int = 1
    reshard_after_forward: bool = True
    reduce: str | None = None
    in_backward: bool = False  # updates run in backward; nothing is clipped or accumulated
    compiled: bool = False  # blocks are compiled: compile=True
    recomputed: int | None = None  # of a shape's blocks, if activations are not kept; None: all are recomputed
    known_strategy: Strategy | None = None  # how gradients are summed; None: as on the hardware

    @property
    def cuda(self) -> bool:
        return self.hardware.device == "cuda"

    @property
    def accumulates(self) -> bool:
        return self.micro_batches > 1

    @property
    def in_flight(self) -> int:
        """The number of micro-batches that are between forward and backward at once (pipeline parallelism)."""
        return min(self.grid.pp, self.micro_batches)

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks that share a host."""
        return min(self.grid.ranks, self.hardware.node_ranks)

    @property
    def recomputed_share(self) -> float:
        """The share of blocks whose forward is computed again in backward."""
        layers = self.work.shape.layers if self.work.shape else 0
        return (
            0.0 if self.choice.activations == "keep" else 1.0 if self.recomputed is None else self.recomputed / layers
        )

    @property
    def passes_of_compute(self) -> float:
        """The compute of forward and backward as multiples of one forward; backward may compute forward again."""
        return 3 + self.recomputed_share

    @property
    def samples_per_step(self) -> int:
        return self.batch * self.micro_batches * self.grid.data

    @cached_property
    def strategy(self) -> Strategy:
        """How the ranks that share the states sum gradients: over NCCL between GPUs, over gloo between CPUs."""
        known, shard = self.known_strategy, self.grid.shard
        if known is not None and known.ranks == shard:
            return known
        return over_nccl(shard, self.grid.shards_per_node(self.hardware.node_ranks)) if self.cuda else pairwise(shard)

    @property
    def sums(self) -> str:
        """How gradients are summed, over which backend and nodes, in one line; empty where each rank has its own."""
        if self.grid.everyone == 1 or not self.sizes.trained:
            return ""
        if self.grid.shard == 1:
            return "replicas alone: fp32 travels"
        found = self.strategy.text(min(unit.widths.wire for unit in self.sizes.trained))
        if not self.cuda:
            return f"{found} (gloo, {self.grid.shard} ranks)"
        return f"{found} (NCCL, {self.grid.shard} ranks, {self.strategy.per_node} on each node)"

    @cached_property
    def sizes(self) -> Sizes:
        own_sum = self.strategy.own_sum
        return self.work.remember(("sizes", self.grid, own_sum), lambda: self.work.sizes(self.grid, own_sum=own_sum))

    @cached_property
    def placements(self) -> list[Placement]:
        row = STAGES[self.choice.stage].on(Tier(self.choice.optimizer), Tier(self.choice.parameters))
        return self.work.remember(("placements", self.placement_key), lambda: self._place(row.over(self.grid.shard)))

    @property
    def placement_key(self) -> tuple[Grid, Choice]:
        """Key of caches: all that the placements of units depend on."""
        return self.grid, self.choice._replace(activations="")

    def _place(self, row: Placement) -> list[Placement]:
        """The placement of each unit: small units may be replicated, the first ones updated on the device."""
        found, trained = [], 0
        for unit in self.sizes.units:
            placed = row
            if unit.used_numel <= self.choice.keep_whole:
                placed = row._replace(
                    parameters=Scope.REPLICATED, parameters_tier=Tier.DEVICE, hidden_between_passes=False
                )
            if unit.trained and trained < self.choice.device_units:
                placed = placed.on(Tier.DEVICE, Tier.DEVICE)
            trained += unit.trained
            found.append(placed)
        return found

    @property
    def simulated_units(self) -> tuple[Sequence[UnitSize], Sequence[Placement]]:
        """The units to simulate a step with: all, or, where only a number of parameters is known and few are unsharded
        at once, FEW equal ones."""
        every = self.work.numel is None or not self.reshard_after_forward
        few = len(self.sizes.units) if every else self.prefetch + FEW
        return self.sizes.units[:few], self.placements[:few]

    @cached_property
    def activations(self) -> ActivationBytes:
        found = self.work.activations(self.batch, self.choice.activations, self.grid)
        if self.recomputed is None:
            return found
        kept = self.work.activations(self.batch, "keep", self.grid)
        return partly_recomputed(kept, found, self.recomputed_share)

    @cached_property
    def transfers(self) -> TransferBytes:
        return self.work.remember(
            ("transfers", self.placement_key, self.cost),
            lambda: transfers_of(self.sizes.units, self.placements, self.cost),
        )
