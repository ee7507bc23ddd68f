"""The cost of one choice: bytes by category on device, host and disk, messages, and seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from onefold.comm.strategy import Strategy, over_nccl, pairwise
from onefold.cost.activations import ActivationBytes
from onefold.cost.arrivals import arrivals
from onefold.cost.compute import moved_per_gradient, shape_seconds, step_compute_s
from onefold.cost.cut_sequences import attention_calls
from onefold.cost.hardware import Hardware
from onefold.cost.peak import Instant, Segment, Staging, instants, lent_bytes, segments, staging_bytes
from onefold.cost.seconds import StepSeconds, exposed_in_step, prefetch_for_equal_units, prefetch_need
from onefold.cost.sizes import Sizes, UnitSize
from onefold.cost.states import StateBytes, StateCost, state_bytes
from onefold.cost.traffic import Sent, reduce_default, step_traffic, total
from onefold.cost.transfers import (
    TransferBytes,
    exposed_update_s,
    host_update_s,
    overlapped_s,
    transfer_s,
    transfers_of,
    update_bytes,
)
from onefold.cost.work import Grid, Work
from onefold.settings.placement import STAGES, Placement, Scope, Tier

WHOLE = ("whole-gradient", "whole-master", "whole-updated")  # purposes of messages for updates of whole tensors
FEW = 8  # units that stand for all where only a number of parameters is known: more than are in flight at once
USABLE = 0.95  # of a GPU: its context and the buffers of the communication library take the rest
FRAGMENTS = 0.03  # of memory allocated and freed in a step: lost to fragmentation; 0.016 and 0.002 were measured


def usable_bytes(machine: Hardware) -> int:
    return int(USABLE * machine.memory_bytes) if machine.device == "cuda" else machine.memory_bytes


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
class Estimate:
    """What a choice costs on one rank."""

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
    known_strategy: Strategy | None = None  # how gradients are summed; None: as on the hardware

    @cached_property
    def strategy(self) -> Strategy:
        """How the ranks that share the states sum gradients: over NCCL between GPUs, over gloo between CPUs."""
        known, shard = self.known_strategy, self.grid.shard
        if known is not None and known.ranks == shard:
            return known
        return over_nccl(shard, self.grid.shards_per_node(self.hardware.node_ranks)) if self._cuda else pairwise(shard)

    @property
    def sums(self) -> str:
        """How gradients are summed, over which backend and nodes, in one line; empty where each rank has its own."""
        if self.grid.everyone == 1 or not self.sizes.trained:
            return ""
        if self.grid.shard == 1:
            return "replicas alone: fp32 travels"
        found = self.strategy.text(min(unit.widths.wire for unit in self.sizes.trained))
        if not self._cuda:
            return f"{found} (gloo, {self.grid.shard} ranks)"
        return f"{found} (NCCL, {self.grid.shard} ranks, {self.strategy.per_node} on each node)"

    # -- bytes -------------------------------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Sizes:
        own_sum = self.strategy.own_sum
        return self.work.remember(("sizes", self.grid, own_sum), lambda: self.work.sizes(self.grid, own_sum=own_sum))

    @cached_property
    def placements(self) -> list[Placement]:
        row = STAGES[self.choice.stage].on(Tier(self.choice.optimizer), Tier(self.choice.parameters))
        return self.work.remember(("placements", self._placement_key), lambda: self._place(row.over(self.grid.shard)))

    @property
    def _simulated_units(self) -> tuple[Sequence[UnitSize], Sequence[Placement]]:
        """The units to simulate a step with: all, or, where only a number of parameters is known and few are unsharded
        at once, FEW equal ones."""
        every = self.work.numel is None or not self.reshard_after_forward
        few = len(self.sizes.units) if every else self.prefetch + FEW
        return self.sizes.units[:few], self.placements[:few]

    @property
    def _placement_key(self) -> tuple[Grid, Choice]:
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

    def states_on(self, tier: Tier) -> StateBytes:
        """Bytes of states between backward and step."""
        return self.work.remember(
            ("states", self._placement_key, self.cost, tier),
            lambda: state_bytes(self.sizes.units, self.placements, self.cost, tier),
        )

    @cached_property
    def states(self) -> StateBytes:
        """Bytes of states on the device as the paper counts: gradients stay there until the step unless parameters are
        offloaded."""
        kept = [p.on(Tier.DEVICE, p.parameters_tier) for p in self.placements]
        if self.choice.parameters != "device":
            return self.states_on(Tier.DEVICE)
        gradients = state_bytes(self.sizes.units, kept, StateCost(0)).gradients
        return self.states_on(Tier.DEVICE)._replace(gradients=gradients)

    @property
    def device_states(self) -> StateBytes:
        """Bytes of states on the device in a run: gradients of units that the host updates leave it at once, unless
        they accumulate over micro-batches first."""
        return self.states if self.micro_batches > 1 else self.states_on(Tier.DEVICE)

    @cached_property
    def all_states(self) -> int:
        """Bytes of states on all tiers."""
        return sum(self.states_on(tier).total for tier in Tier)

    @cached_property
    def staging(self) -> Staging:
        units, placements = self._simulated_units
        return self.work.remember(
            ("staging", self._placement_key, len(units), self.cost, self.in_backward),
            lambda: staging_bytes(units, placements, self.cost, in_backward=self.in_backward),
        )

    @cached_property
    def activations(self) -> ActivationBytes:
        return self.work.activations(self.batch, self.choice.activations, self.grid)

    @property
    def in_flight(self) -> int:
        """The number of micro-batches that are between forward and backward at once (pipeline parallelism)."""
        return min(self.grid.pp, self.micro_batches)

    @property
    def _cuda(self) -> bool:
        return self.hardware.device == "cuda"

    @property
    def _accumulates(self) -> bool:
        return self.micro_batches > 1

    @cached_property
    def persistent_states(self) -> StateBytes:
        """Bytes that are on the device throughout a step. On CUDA gradients are not, unless they accumulate."""
        return self.device_states._replace(gradients=0) if self._cuda and not self._accumulates else self.device_states

    @cached_property
    def fullest(self) -> Instant:
        """The instant of a step at which most bytes are in memory."""
        found = instants(self.segments, self.activations, self.in_flight)
        return max(found, key=lambda instant: instant.total, default=Instant(""))

    @property
    def segments(self) -> list[Segment]:
        """Forward and backward, block by block."""
        flags = (self._cuda, self.cost.one_pass, self.in_backward, self._accumulates)
        key = ("segments", self._placement_key, self.prefetch, self.reshard_after_forward, flags, self.strategy)
        return self.work.remember(key, self._segments)

    def _segments(self) -> list[Segment]:
        units, placements = self._simulated_units
        others = self.device_states.gradients - state_bytes(units, placements, self.cost).gradients
        arriving = arrivals(
            units, placements, self.strategy, cuda=self._cuda, one_pass=self.cost.one_pass,
            in_backward=self.in_backward, accumulates=self._accumulates,
            others=0 if self.in_backward or self._accumulates else others,
            room=lent_bytes(self.sizes.units, self.placements) if self.in_backward else 0,
        )  # fmt: skip
        kept = () if self.reshard_after_forward else self._needed_in_backward
        tied = self.work.tied(self.sizes)
        return segments(units, placements, self.prefetch, arriving, cuda=self._cuda, tied=tied, kept=kept)

    @property
    def _needed_in_backward(self) -> set[int]:
        """The sharded units that backward computes with: those that it gathers again, and the last of forward."""
        forward, backward = self.work.passes(self.sizes, self.placements)
        return {*backward, *forward[-1:]}

    @property
    def margin(self) -> int:
        return int(FRAGMENTS * self.fullest.total) if self._cuda else 0

    @property
    def persistent_bytes(self) -> int:
        return self.persistent_states.total + (0 if self._cuda else self.fullest.buffers)

    @property
    def peak_bytes(self) -> int:
        return self.persistent_states.total + self.fullest.total + self.margin

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of activations kept on the device from forward to backward."""
        return self.activations.kept_per_block * self.work.layers_here(self.grid) * self.in_flight

    @property
    def pinned_bytes(self) -> int:
        """Bytes of one rank's host memory that are pinned for transfers with a GPU."""
        if self.hardware.device != "cuda":
            return 0
        states = self.states_on(Tier.HOST)
        waiting = 0 if self.in_backward else states.gradients
        offloaded = self.activations.host_per_block * self.work.layers_here(self.grid) * self.in_flight
        return states.parameters + waiting + self.staging.copied + offloaded

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that one rank takes."""
        states = self.states_on(Tier.HOST)
        waiting = 0 if self.in_backward else states.gradients
        offloaded = self.activations.host_per_block * self.work.layers_here(self.grid) * self.in_flight
        return states.parameters + states.optimizer + waiting + sum(self.staging) + offloaded

    @property
    def disk_bytes(self) -> int:
        return self.states_on(Tier.DISK).total

    @property
    def padding_bytes(self) -> int:
        """Bytes of states that hold padding, not elements of parameters."""
        unpadded = [self._without_padding(unit) for unit in self.sizes.units]
        bare = sum(state_bytes(unpadded, self.placements, self.cost, tier).total for tier in Tier)
        return max(0, self.all_states - bare)

    def _without_padding(self, unit: UnitSize) -> UnitSize:
        numel, shard = unit.used_numel, -(-unit.used_numel // self.sizes.ranks)
        owned = min(unit.owned_numel, shard)
        return unit._replace(numel=numel, shard=shard, body_numel=numel, owned_numel=owned, param_count=0)

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(self.hardware)

    @property
    def fits(self) -> bool:
        return (
            self.persistent_states.total <= self.usable_bytes  # before the peak, which takes longer to find
            and self.peak_bytes <= self.usable_bytes
            and self.host_bytes * self._ranks_per_node <= self.hardware.host_bytes
            and self.disk_bytes * self._ranks_per_node <= self.hardware.disk_bytes
        )

    # -- messages ----------------------------------------------------------------------------------------------------

    @cached_property
    def reductions(self) -> int:
        return self.micro_batches if (self.reduce or reduce_default(self.placements[0])) == "each" else 1

    @cached_property
    def traffic(self) -> dict[str, Sent]:
        forward, backward = self.work.passes(self.sizes, self.placements)
        again = backward if self.reshard_after_forward else []
        sent = step_traffic(
            self.sizes, self.placements, strategy=self.strategy, forward=forward, backward=again,
            micro_batches=self.micro_batches, reduce=self.reduce, replicas=self.grid.replica, whole=self.cost.whole,
            tp=self.grid.tp,
        )  # fmt: skip
        if self.grid.tp > 1:
            elements = self.work.tensor_elements(self.batch, self.choice.activations, self.grid) * self.micro_batches
            width, calls = self.work.widths.compute, 6 * self.work.layers_here(self.grid) * self.micro_batches
            sent["tensor-parallel"] = Sent(elements, elements * width, calls, "all-reduce", "tp")
        if self.grid.sequence > 1 and self.work.shape is not None:
            policy, width = self.choice.activations, self.work.widths.compute
            traded = self.work.sequence_bytes(self.batch, policy, self.grid) * self.micro_batches
            calls = attention_calls(self.work.shape, policy, self.grid.tp, self.grid.sequence)
            calls *= self.work.layers_here(self.grid) * self.micro_batches
            sent["sequence"] = Sent(traded // width, traded, calls, "all-to-all", "sequence")
        return sent

    @property
    def traffic_elements(self) -> int:
        """Elements that one rank sends in a step, without tensor parallelism and attention over cut sequences."""
        return total({k: v for k, v in self.traffic.items() if k not in ("tensor-parallel", "sequence")})[0]

    def link(self, axis: str) -> float:
        """Bytes per second along an axis; tensor parallelism uses neighbouring ranks."""
        node = self.hardware.node_ranks
        tp_in_node = max(1, min(self.grid.tp, node))
        if axis == "tp":
            return self.hardware.link(self.grid.tp, node)
        shards = max(1, node // tp_in_node)
        if axis == "sequence":
            return self.hardware.link(self.grid.sequence, shards)
        if axis == "replica":
            return self.hardware.link(self.grid.replica, max(1, shards // self.grid.shard))
        return self.hardware.link(self.grid.everyone if axis == "all" else self.grid.shard, shards)

    # -- seconds -----------------------------------------------------------------------------------------------------

    @cached_property
    def compute_s(self) -> float:
        """Seconds of forward and backward of one micro-batch."""
        rates, shape, grid = self.hardware.rates, self.work.shape, self.grid
        if rates is not None and shape is not None:
            found = shape_seconds(
                shape, rates, self.batch, self.choice.activations, width=self.work.widths.compute, tp=grid.tp,
                pp=grid.pp, sequence=grid.sequence, trained=not self.work.lora, compiled=self.compiled,
            )  # fmt: skip
            units = len(self.sizes.units) if grid.shard > 1 else 0
            return step_compute_s(found, rates, self.work.layers_here(grid), units) + self._gradients_s
        rate = self.hardware.flops * self.hardware.efficiency
        return self.work.flops(self.batch, self.choice.activations, self.grid) / rate

    @property
    def _gradients_s(self) -> float:
        """Seconds in which the device moves the gradients of a micro-batch between autograd and the optimizer."""
        flat = self.grid.everyone > 1 or any(placement.updated_on_host for placement in self.placements)
        moved = moved_per_gradient(
            self.work.widths.compute, accumulates=self._accumulates, flat=flat, summed=self.grid.everyone > 1
        )
        return moved * sum(unit.numel for unit in self.sizes.trained) / self._update_rate

    def _message_s(self, sent: Sent) -> float:
        if not sent.bytes or (self.grid.everyone == 1 and sent.axis != "tp"):
            return 0.0
        return sent.calls * self.hardware.latency_s + self.moving_s(sent)

    def moving_s(self, sent: Sent) -> float:
        """Seconds that bytes take over links. Of an all-to-all some stay inside the node; for the others each rank has
        its share of the node's network."""
        if not sent.near_bytes or not self._cuda:
            return sent.bytes / self.link(sent.axis)
        far = self.hardware.link(self.grid.shard, 1)
        return sent.near_bytes / self.hardware.node_link + (sent.bytes - sent.near_bytes) / far

    @cached_property
    def gather_s(self) -> list[float]:
        """Seconds of the all-gather of each unit in a forward or backward."""
        forward, _ = self.work.passes(self.sizes, self.placements)
        rate, others = self.link("shard"), self.grid.shard - 1
        widths = [self.sizes.units[i].shard * others * self.sizes.units[i].widths.compute for i in forward]
        return [self.hardware.latency_s + sent / rate for sent in widths] if others else []

    @property
    def _unit_numel(self) -> list[int]:
        """Elements of the units that messages follow: those that a pass gathers, or else those that are reduced."""
        forward, _ = self.work.passes(self.sizes, self.placements)
        units = [self.sizes.units[i] for i in forward] if self.gather_s else self.sizes.trained
        return [unit.numel for unit in units]

    @cached_property
    def step(self) -> StepSeconds:
        messages = {purpose: self._message_s(sent) for purpose, sent in self.traffic.items()}
        checkpointed = self.choice.activations != "keep"
        compute = self.compute_s * self.micro_batches
        exposed = exposed_in_step(
            self.compute_s,
            unit_numel=self._unit_numel,
            gather_s=self.gather_s,
            reduce_s=(messages["reduce"] + messages.get("reduce-replica", 0.0)) / self.reductions,
            updated_s=messages.get("gather-updated", 0.0) + messages.get("gather-gradient", 0.0),
            prefetch=self.prefetch,
            reshard_after_forward=self.reshard_after_forward,
            checkpointed=checkpointed,
            micro_batches=self.micro_batches,
            rounds=self.reductions,
        )
        bubble = compute * (self.grid.pp - 1) / self.micro_batches
        update, transfer = self._update_s(compute)
        update += sum(messages.get(purpose, 0.0) for purpose in WHOLE) + self._matrices_s
        unhidden = messages.get("tensor-parallel", 0.0) + messages.get("sequence", 0.0)
        return StepSeconds(compute, exposed, unhidden, update, transfer, bubble)

    @property
    def _matrices_s(self) -> float:
        """Seconds of the products of an update of whole matrices, as Muon's: each rank's share, if the optimizer is
        sharded."""
        if not self.cost.whole or not self.placements:
            return 0.0
        shares = 1 if self.placements[0].optimizer is Scope.REPLICATED else self.grid.shard
        flops = sum(self.work.matrices.values()) / (self.grid.tp * self.grid.pp * shares)
        return flops / (self.hardware.flops * self.hardware.efficiency)

    @property
    def _ranks_per_node(self) -> int:
        """The number of ranks that share a host."""
        return min(self.grid.ranks, self.hardware.node_ranks)

    @cached_property
    def transfers(self) -> TransferBytes:
        return self.work.remember(
            ("transfers", self._placement_key, self.cost),
            lambda: transfers_of(self.sizes.units, self.placements, self.cost),
        )

    @cached_property
    def host_update_s(self) -> float:
        """Seconds of one step's host updates, hidden or not."""
        return host_update_s(self.transfers, self.hardware, self._ranks_per_node)

    @property
    def _update_rate(self) -> float:
        """Bytes per second that updates on the device read and write."""
        rates = self.hardware.rates
        found = rates and rates.update_rate("device", update_bytes(self.work.widths, self.cost))
        return found or self.hardware.memory_rate

    def _update_s(self, compute: float) -> tuple[float, float]:
        """Seconds that a step waits for updates, and for other transfers between device, host and disk."""
        hardware, transfers = self.hardware, self.transfers
        update = transfers.device / self._update_rate
        if transfers.host:
            late = any(placement.hidden_between_passes for placement in self.placements)
            forward = self.compute_s / (4 if self.choice.activations != "keep" else 3)
            overlapped = overlapped_s(forward, compute - forward, late=late, in_backward=self.in_backward)
            on_host = sum(placement.updated_on_host for placement in self.placements)
            waited_for = 0 if self.choice.device_units else on_host  # the last updates of backward run on the device
            update += exposed_update_s(self.host_update_s, overlapped, waited_for)
        offloaded = self.activations.host_per_block * self.work.layers_here(self.grid) * self.micro_batches
        transfer = transfer_s(
            transfers, hardware, self._ranks_per_node, passes=2 * self.micro_batches, offloaded=offloaded
        )
        return update, max(0.0, transfer - compute - update)

    @property
    def step_s(self) -> float:
        return self.step.total

    @property
    def mfu(self) -> float:
        """The share of the device's peak flop rate that the model's own flops reach, without those computed again."""
        flops = self.work.flops(self.batch, "keep", self.grid) * self.micro_batches
        return flops / self.step_s / self.hardware.flops if self.step_s else 0.0

    @property
    def prefetch_needed(self) -> tuple[int, bool]:
        """The number of units to prefetch, and whether the link is the limit however many are prefetched."""
        if not self.gather_s or not self.compute_s:
            return 0, False
        units = len(self.gather_s)
        found = prefetch_need(
            self.gather_s, [self.compute_s / (4 if self.choice.activations != "keep" else 3) / units] * units
        )
        return found.units, found.bandwidth_bound

    @property
    def k_star(self) -> int:
        """The number of units whose compute, in forward, takes as long as the longest all-gather, however many there
        are."""
        if not self.gather_s or not self.compute_s:
            return 0
        share = 4 if self.choice.activations != "keep" else 3
        return prefetch_for_equal_units(max(self.gather_s), self.compute_s / share / len(self.gather_s))

    @property
    def samples_per_step(self) -> int:
        return self.batch * self.micro_batches * self.grid.data

    @property
    def tokens_per_s(self) -> float:
        return self.samples_per_step * self.work.tokens_per_sample / self.step_s if self.step_s else 0.0
