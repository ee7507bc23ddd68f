"""One choice, priced: bytes by category on device, host and disk, messages, and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from onefold.placement import STAGES, Placement, Scope
from onefold.planner.activations import ActivationBytes
from onefold.planner.hardware import Hardware
from onefold.planner.peak import Instant, instants, pool_bytes, segments
from onefold.planner.seconds import StepSeconds, exposed_in_step, look_ahead
from onefold.planner.sizes import Sizes, UnitSize
from onefold.planner.states import StateBytes, StateCost, state_bytes
from onefold.planner.traffic import Sent, reduce_default, step_traffic, total
from onefold.planner.work import Grid, Work

FEW = 8  # units of a bare count that stand for all: more than are reduced and updated at once
USABLE = 0.95  # of a GPU: its context and the buffers of the communication library take the rest
FRAGMENTS = 0.03  # of what comes and goes on a GPU, lost between pieces in use; 0.016 and 0.002 were measured


def usable_bytes(machine: Hardware) -> int:
    return int(USABLE * machine.memory_bytes) if machine.device == "cuda" else machine.memory_bytes


class Choice(NamedTuple):
    """What a user decides."""

    stage: int
    keep_whole: int = 0  # stage 3: units of at most so many elements stay whole
    optimizer: str = "device"  # or host, disk
    parameters: str = "device"
    activations: str = "checkpoint"

    def __str__(self) -> str:
        parts = [f"stage {self.stage}"]
        if self.keep_whole:
            parts.append("small units whole")
        if self.parameters != "device":
            parts.append(f"all on {self.parameters}")
        elif self.optimizer != "device":
            parts.append(f"optimizer on {self.optimizer}")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a choice costs one rank."""

    work: Work
    choice: Choice
    grid: Grid
    hardware: Hardware
    cost: StateCost
    batch: int = 1
    micro_batches: int = 1
    prefetch: int = 1
    reduce: str | None = None

    # -- bytes -------------------------------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Sizes:
        return self.work.remember(("sizes", self.grid), lambda: self.work.sizes(self.grid))

    @cached_property
    def placements(self) -> list[Placement]:
        row = STAGES[self.choice.stage].over(self.grid.shard)
        return self.work.remember(
            ("placements", self._table), lambda: [self._place(unit, row) for unit in self.sizes.units]
        )

    @property
    def _typical(self) -> tuple[Sequence[UnitSize], Sequence[Placement]]:
        """Units to walk through a step with: all, or of a bare count's equal ones as many as can be alive at once."""
        few = len(self.sizes.units) if self.work.numel is None else self.prefetch + FEW
        return self.sizes.units[:few], self.placements[:few]

    @property
    def _table(self) -> tuple[Grid, int, int]:
        """What decides who holds what."""
        return self.grid, self.choice.stage, self.choice.keep_whole

    def _place(self, unit: UnitSize, row: Placement) -> Placement:
        small = unit.used <= self.choice.keep_whole
        return row._replace(parameters=Scope.WHOLE) if small else row

    @cached_property
    def all_states(self) -> StateBytes:
        """Wherever they are."""
        return self.work.remember(
            ("states", self._table, self.cost), lambda: state_bytes(self.sizes.units, self.placements, self.cost)
        )

    @cached_property
    def states(self) -> StateBytes:
        """On the device."""
        kept = self.all_states
        if self.choice.optimizer != "device":
            kept = kept._replace(optimizer=0)
        if self.choice.parameters != "device":  # gradients leave as they are reduced
            kept = kept._replace(parameters=0, gradients=0)
        return kept

    def _away(self, tier: str) -> int:
        """States of one rank on another tier; gradients wait on the host where parameters are not on the device."""
        away = self.all_states.optimizer if self.choice.optimizer == tier else 0
        away += self.all_states.parameters if self.choice.parameters == tier else 0
        away += self.all_states.gradients if self.choice.parameters != "device" and tier == "host" else 0
        return away

    @cached_property
    def activations(self) -> ActivationBytes:
        return self.work.activations(self.batch, self.choice.activations, self.grid)

    @property
    def flying(self) -> int:
        """Micro-batches between forward and backward at once."""
        return min(self.grid.pp, self.micro_batches)

    @cached_property
    def buffers(self) -> int:
        """Constant, whatever the model's depth."""
        cuda = self.hardware.device == "cuda"
        pool = self.work.remember(
            ("pool", self._table, cuda, self.cost.one_pass),
            lambda: pool_bytes(*self._typical, self.grid.shard, cuda=cuda, one_pass=self.cost.one_pass),
        )
        streaming = 0
        if self.choice.optimizer != "device" or self.choice.parameters != "device":
            streaming = 4 * max((unit.shard for unit in self.sizes.units), default=0) * 4  # two each way, in fp32
        return pool + streaming

    @cached_property
    def fullest(self) -> Instant:
        walk = self.work.remember(
            ("walk", self._table, self.prefetch),
            lambda: segments(*self._typical, self.prefetch, self.work.tied(self.sizes)),
        )
        found = instants(walk, self.activations, self.flying)
        return max(found, key=lambda instant: instant.gathered + instant.activations, default=Instant("", 0, 0))

    @property
    def margin(self) -> int:
        moving = self.fullest.gathered + self.fullest.activations
        return int(FRAGMENTS * moving) if self.hardware.device == "cuda" else 0

    @property
    def persistent_bytes(self) -> int:
        return self.states.total + self.buffers

    @property
    def peak_bytes(self) -> int:
        return self.persistent_bytes + self.fullest.gathered + self.fullest.activations + self.margin

    @property
    def checkpoint_bytes(self) -> int:
        """Activations kept from forward to backward, on the device."""
        return self.activations.kept_per_block * self.work.layers_here(self.grid) * self.flying

    @property
    def host_bytes(self) -> int:
        """Of one rank."""
        parked = self.activations.host_per_block * self.work.layers_here(self.grid) * self.flying
        return self._away("host") + parked

    @property
    def disk_bytes(self) -> int:
        return self._away("disk")

    @property
    def padding_bytes(self) -> int:
        """Of the states, what is no parameter's."""
        used = [u._replace(whole=u.used, shard=-(-u.used // self.sizes.ranks)) for u in self.sizes.units]
        trimmed = [u._replace(body=u.used, owned=min(u.owned, u.shard), params=0) for u in used]
        return max(0, self.all_states.total - state_bytes(trimmed, self.placements, self.cost).total)

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(self.hardware)

    @property
    def fits(self) -> bool:
        node = min(self.grid.ranks, self.hardware.node_ranks)
        return (
            self.peak_bytes <= self.usable_bytes
            and self.host_bytes * node <= self.hardware.host_bytes
            and self.disk_bytes * node <= self.hardware.disk_bytes
        )

    # -- messages ----------------------------------------------------------------------------------------------------

    @cached_property
    def rounds(self) -> int:
        return self.micro_batches if (self.reduce or reduce_default(self.placements[0])) == "each" else 1

    @cached_property
    def traffic(self) -> dict[str, Sent]:
        forward, backward = self.work.passes(self.sizes, self.placements)
        sent = step_traffic(
            self.sizes, self.placements, forward=forward, backward=backward, micro_batches=self.micro_batches,
            reduce=self.reduce, replicas=self.grid.replica,
        )  # fmt: skip
        if self.grid.tp > 1:
            elements = self.work.tensor_elements(self.batch, self.choice.activations, self.grid) * self.micro_batches
            width, calls = self.work.widths.compute, 6 * self.work.layers_here(self.grid) * self.micro_batches
            sent["tensor-parallel"] = Sent(elements, elements * width, calls, "all-reduce", "tp")
        return sent

    @property
    def traffic_elements(self) -> int:
        """Sent by one rank for ZeRO."""
        return total({k: v for k, v in self.traffic.items() if k != "tensor-parallel"})[0]

    def link(self, axis: str) -> float:
        """Bytes per second along an axis; tensor parallelism has the neighbours."""
        node = self.hardware.node_ranks
        inside = max(1, min(self.grid.tp, node))
        if axis == "tp":
            return self.hardware.link(self.grid.tp, node)
        shards = max(1, node // inside)
        if axis == "replica":
            return self.hardware.link(self.grid.replica, max(1, shards // self.grid.shard))
        return self.hardware.link(self.grid.data if axis == "all" else self.grid.shard, shards)

    # -- seconds -----------------------------------------------------------------------------------------------------

    @cached_property
    def compute_s(self) -> float:
        """One micro-batch."""
        rate = self.hardware.flops * self.hardware.efficiency
        return self.work.flops(self.batch, self.choice.activations, self.grid) / rate

    def _message_s(self, sent: Sent) -> float:
        if not sent.bytes or (self.grid.data == 1 and sent.axis != "tp"):
            return 0.0
        return sent.calls * self.hardware.latency_s + sent.bytes / self.link(sent.axis)

    @cached_property
    def gather_s(self) -> list[float]:
        """Of each unit that a pass gathers."""
        forward, _ = self.work.passes(self.sizes, self.placements)
        rate, others = self.link("shard"), self.grid.shard - 1
        widths = [self.sizes.units[i].shard * others * self.sizes.units[i].widths.compute for i in forward]
        return [self.hardware.latency_s + sent / rate for sent in widths] if others else []

    @cached_property
    def step(self) -> StepSeconds:
        messages = {purpose: self._message_s(sent) for purpose, sent in self.traffic.items()}
        checkpointed = self.choice.activations != "keep"
        compute = self.compute_s * self.micro_batches
        exposed = exposed_in_step(
            self.compute_s,
            gather_s=self.gather_s,
            reduce_s=(messages["reduce"] + messages.get("reduce-replica", 0.0)) / self.rounds,
            updated_s=messages.get("gather-updated", 0.0) + messages.get("gather-gradient", 0.0),
            prefetch=self.prefetch,
            checkpointed=checkpointed,
            micro_batches=self.micro_batches,
            rounds=self.rounds,
        )
        bubble = compute * (self.grid.pp - 1) / self.micro_batches
        update, transfer = self._update_s()
        return StepSeconds(compute, exposed, messages.get("tensor-parallel", 0.0), update, transfer, bubble)

    def _update_s(self) -> tuple[float, float]:
        """Read and write all optimizer state once, where it is; and what must come and go for that."""
        hardware, states = self.hardware, self.all_states
        moved = 2 * states.optimizer
        node = min(self.grid.ranks, hardware.node_ranks)
        transfer = 0.0
        if self.choice.optimizer == "device":
            update = moved / hardware.memory_rate
        else:
            update = moved * node / hardware.host_rate
            shard = sum(unit.shard * unit.widths.compute for unit in self.sizes.trained)
            transfer += 2 * shard / hardware.pcie_rate  # gradients down, parameters up
        if self.choice.optimizer == "disk":
            transfer += moved * node / hardware.disk_rate
        if self.choice.parameters == "host":
            transfer += 2 * self.micro_batches * states.parameters / hardware.pcie_rate
        if self.choice.parameters == "disk":
            transfer += 2 * self.micro_batches * states.parameters * node / hardware.disk_rate
        parked = self.activations.host_per_block * self.work.layers_here(self.grid) * self.micro_batches
        covered = self.compute_s * self.micro_batches
        return update, max(0.0, transfer + 2 * parked / hardware.pcie_rate - covered)

    @property
    def step_s(self) -> float:
        return self.step.total

    @property
    def look_ahead(self) -> tuple[int, bool]:
        """k*, and whether the link is the limit at any depth."""
        if not self.gather_s or not self.compute_s:
            return 0, False
        units = len(self.gather_s)
        found = look_ahead(
            self.gather_s, [self.compute_s / (4 if self.choice.activations != "keep" else 3) / units] * units
        )
        return found.units, found.bandwidth_bound

    @property
    def samples_per_step(self) -> int:
        return self.batch * self.micro_batches * self.grid.data

    @property
    def tokens_per_s(self) -> float:
        return self.samples_per_step * self.work.tokens_per_sample / self.step_s if self.step_s else 0.0
