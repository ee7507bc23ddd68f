"""Bytes of one case on device, host and disk: states by category, the peak over a step, and whether they fit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from onefold.cost.arrivals import arrivals
from onefold.cost.case import Case
from onefold.cost.peak import Instant, Segment, Staging, instants, lent_bytes, segments, staging_bytes
from onefold.cost.sizes import UnitSize
from onefold.cost.states import StateBytes, StateCost, state_bytes
from onefold.settings.placement import Tier

FRAGMENTS = 0.03  # of memory allocated and freed in a step: lost to fragmentation; 0.016 and 0.002 were measured


@dataclass(frozen=True)
class Memory:
    """The bytes that a case takes on one rank."""

    case: Case

    def states_on(self, tier: Tier) -> StateBytes:
        """Bytes of states between backward and step."""
        case = self.case
        return case.work.remember(
            ("states", case.placement_key, case.cost, tier),
            lambda: state_bytes(case.sizes.units, case.placements, case.cost, tier),
        )

    @cached_property
    def states(self) -> StateBytes:
        """Bytes of states on the device as the paper counts: gradients stay there until the step unless parameters are
        offloaded."""
        kept = [p.on(Tier.DEVICE, p.parameters_tier) for p in self.case.placements]
        if self.case.choice.parameters != "device":
            return self.states_on(Tier.DEVICE)
        gradients = state_bytes(self.case.sizes.units, kept, StateCost(0)).gradients
        return self.states_on(Tier.DEVICE)._replace(gradients=gradients)

    @property
    def device_states(self) -> StateBytes:
        """Bytes of states on the device in a run: gradients of units that the host updates leave it at once, unless
        they accumulate over micro-batches first."""
        return self.states if self.case.accumulates else self.states_on(Tier.DEVICE)

    @cached_property
    def all_states(self) -> int:
        """Bytes of states on all tiers."""
        return sum(self.states_on(tier).total for tier in Tier)

    @cached_property
    def persistent_states(self) -> StateBytes:
        """Bytes that are on the device throughout a step. On CUDA gradients are not, unless they accumulate."""
        passing = self.case.cuda and not self.case.accumulates
        return self.device_states._replace(gradients=0) if passing else self.device_states

    @cached_property
    def staging(self) -> Staging:
        case = self.case
        units, placements = case.simulated_units
        return case.work.remember(
            ("staging", case.placement_key, len(units), case.cost, case.in_backward, case.prefetch),
            lambda: staging_bytes(units, placements, case.cost, in_backward=case.in_backward, prefetch=case.prefetch),
        )

    # -- the peak ----------------------------------------------------------------------------------------------------

    @cached_property
    def fullest(self) -> Instant:
        """The instant of a step at which most bytes are in memory."""
        found = instants(self.segments, self.case.activations, self.case.in_flight)
        return max(found, key=lambda instant: instant.total, default=Instant(""))

    @property
    def segments(self) -> list[Segment]:
        """Forward and backward, block by block."""
        case = self.case
        flags = (case.cuda, case.cost.one_pass, case.in_backward, case.accumulates)
        key = ("segments", case.placement_key, case.prefetch, case.reshard_after_forward, flags, case.strategy)
        return case.work.remember(key, self._segments)

    def _segments(self) -> list[Segment]:
        case = self.case
        units, placements = case.simulated_units
        others = self.device_states.gradients - state_bytes(units, placements, case.cost).gradients
        arriving = arrivals(
            units, placements, case.strategy, cuda=case.cuda, one_pass=case.cost.one_pass,
            in_backward=case.in_backward, accumulates=case.accumulates,
            others=0 if case.in_backward or case.accumulates else others,
            room=lent_bytes(case.sizes.units, case.placements) if case.in_backward else 0,
        )  # fmt: skip
        kept = () if case.reshard_after_forward else self._needed_in_backward
        tied = case.work.tied(case.sizes)
        return segments(units, placements, case.prefetch, arriving, cuda=case.cuda, tied=tied, kept=kept)

    @property
    def _needed_in_backward(self) -> set[int]:
        """The sharded units that backward computes with: those that it gathers again, and the last of forward."""
        forward, backward = self.case.work.passes(self.case.sizes, self.case.placements)
        return {*backward, *forward[-1:]}

    @property
    def margin(self) -> int:
        return int(FRAGMENTS * self.fullest.total) if self.case.cuda else 0

    @property
    def persistent_bytes(self) -> int:
        return self.persistent_states.total + (0 if self.case.cuda else self.fullest.buffers)

    @property
    def peak_bytes(self) -> int:
        return self.persistent_states.total + self.fullest.total + self.margin

    # -- parts of it, and other tiers --------------------------------------------------------------------------------

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of activations kept on the device from forward to backward."""
        return self._in_flight(self.case.activations.kept_per_block)

    def _in_flight(self, per_block: int) -> int:
        """Bytes of activations of all blocks and of all micro-batches that are between forward and backward."""
        return per_block * self.case.work.layers_here(self.case.grid) * self.case.in_flight

    @property
    def _waiting_gradients(self) -> int:
        """Bytes of gradients that wait in host memory for the update."""
        return 0 if self.case.in_backward else self.states_on(Tier.HOST).gradients

    @property
    def pinned_bytes(self) -> int:
        """Bytes of one rank's host memory that are pinned for transfers with a GPU."""
        if not self.case.cuda:
            return 0
        states, offloaded = self.states_on(Tier.HOST), self._in_flight(self.case.activations.host_per_block)
        return states.parameters + self._waiting_gradients + self.staging.copied + offloaded

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that one rank takes."""
        states, offloaded = self.states_on(Tier.HOST), self._in_flight(self.case.activations.host_per_block)
        return states.parameters + states.optimizer + self._waiting_gradients + sum(self.staging) + offloaded

    @property
    def disk_bytes(self) -> int:
        return self.states_on(Tier.DISK).total

    @property
    def padding_bytes(self) -> int:
        """Bytes of states that hold padding, not elements of parameters."""
        unpadded = [self._without_padding(unit) for unit in self.case.sizes.units]
        bare = sum(state_bytes(unpadded, self.case.placements, self.case.cost, tier).total for tier in Tier)
        return max(0, self.all_states - bare)

    def _without_padding(self, unit: UnitSize) -> UnitSize:
        numel, shard = unit.used_numel, -(-unit.used_numel // self.case.sizes.ranks)
        owned = min(unit.owned_numel, shard)
        return unit._replace(numel=numel, shard=shard, body_numel=numel, owned_numel=owned, param_count=0)

    @property
    def fits(self) -> bool:
        hardware, ranks = self.case.hardware, self.case.ranks_per_node
        return (
            self.persistent_states.total <= hardware.usable_bytes  # before the peak, which takes longer to find
            and self.peak_bytes <= hardware.usable_bytes
            and self.host_bytes * ranks <= hardware.host_bytes
            and self.disk_bytes * ranks <= hardware.disk_bytes
        )
