"""Seconds of one case in a step: compute, the messages and transfers that compute does not hide, and updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from onefold.cost.case import Case
from onefold.cost.compute import shape_seconds, step_compute_s
from onefold.cost.messages import UNHIDDEN, WHOLE, Messages
from onefold.cost.seconds import StepSeconds, exposed_in_step, prefetch_for_equal_units, prefetch_need
from onefold.cost.sizes import UnitSize
from onefold.cost.summing import moved_per_gradient
from onefold.cost.tiles import LAUNCH_S, launch_s
from onefold.cost.transfers import exposed_update_s, host_update_s, overlapped_s, transfer_s, update_rate
from onefold.settings.placement import Scope, Tier
from onefold.settings.widths import Widths


@dataclass(frozen=True)
class StepTime:
    """How long a step of a case takes, and why."""

    case: Case
    messages: Messages

    @cached_property
    def step(self) -> StepSeconds:
        case, messages = self.case, self.messages.seconds
        compute = self.compute_s * case.micro_batches
        gathering, reducing = case.hardware.beside_compute
        exposed = exposed_in_step(
            self.compute_s,
            unit_numel=self.messages.unit_numel,
            gather_s=[gathering * one for one in self.messages.gather_s],
            reduce_s=reducing * (messages["reduce"] + messages.get("reduce-replica", 0.0)) / self.messages.reductions,
            updated_s=messages.get("gather-updated", 0.0) + messages.get("gather-gradient", 0.0),
            prefetch=case.prefetch,
            reshard_after_forward=case.reshard_after_forward,
            checkpointed=case.choice.activations != "keep",
            micro_batches=case.micro_batches,
            rounds=self.messages.reductions,
            at_once=case.hardware.both_at_once,
            slowed=case.hardware.slowed_by_messages,
        )
        moving = sum(seconds for purpose, seconds in messages.items() if purpose not in UNHIDDEN)
        if moving:  # what compute hides still takes the cores of CPU ranks
            exposed += self.messages.on_cpu_s * max(0.0, 1 - exposed / moving)
        bubble = compute * (case.grid.pp - 1) / case.micro_batches
        update, transfer = self._update_s(compute)
        update += sum(messages.get(purpose, 0.0) for purpose in WHOLE) + self._matrices_s
        unhidden = messages.get("tensor-parallel", 0.0) + messages.get("sequence", 0.0)
        return StepSeconds(compute, exposed, unhidden, update, transfer, bubble)

    # -- compute -----------------------------------------------------------------------------------------------------

    @cached_property
    def compute_s(self) -> float:
        """Seconds of forward and backward of one micro-batch."""
        return max(self._computed_s, self._tiles_launched_s)

    @property
    def _tiles_launched_s(self) -> float:
        """Seconds of a GPU's host to launch the kernels of all tiles; 0 without tiles."""
        case, work = self.case, self.case.work
        if work.tile is None or work.shape is None or case.hardware.device != "cuda":
            return 0.0
        rates = case.hardware.rates
        tokens = case.batch * work.shape.seq / case.grid.sequence
        mlps = work.layers_here(case.grid) * work.tiled_mlps
        return launch_s(tokens, work.tile, mlps, (rates and rates.launch_s) or LAUNCH_S)

    @property
    def _computed_s(self) -> float:
        """Seconds of forward and backward of one micro-batch, where the host launches no tiles."""
        case, hardware, work, grid = self.case, self.case.hardware, self.case.work, self.case.grid
        if hardware.rates is not None and work.shape is not None:
            found = shape_seconds(
                work.shape, hardware.rates, case.batch, case.choice.activations, width=work.widths.compute, tp=grid.tp,
                pp=grid.pp, sequence=grid.sequence, trained=not work.lora, compiled=case.compiled,
                tile=work.tile, tiled_mlps=work.tiled_mlps, recomputed=case.recomputed_share,
            )  # fmt: skip
            units = len(case.sizes.units) if grid.shard > 1 else 0
            launched = step_compute_s(found, hardware.rates, work.layers_here(grid), units)
            return launched + self._gradients_s + self.messages.copied_bytes / self._copy_rate
        rate = hardware.peak_flops(work.widths.compute) * hardware.efficiency
        return (work.flops(case.batch, case.choice.activations, grid) + work.tile_flops(case.batch, grid)) / rate

    @property
    def _forward_s(self) -> float:
        """Seconds of one forward."""
        return self.compute_s / self.case.passes_of_compute

    @property
    def _gradients_s(self) -> float:
        """Seconds in which the device moves the gradients of a micro-batch between autograd and the optimizer."""
        case, moved = self.case, 0.0
        flat = case.grid.everyone > 1 or any(placement.updated_on_host for placement in case.placements)
        for widths, numel in _by_widths(case.sizes.trained).items():
            moved += numel * moved_per_gradient(
                widths, case.strategy, replicas=case.grid.replica, accumulates=case.accumulates, flat=flat
            )
        return moved / self._copy_rate

    @property
    def _copy_rate(self) -> float:
        """Bytes per second that kernels which compute little read and write."""
        case = self.case
        return update_rate(case.hardware, Tier.DEVICE, case.work.widths, case.cost._replace(small=False))

    # -- updates and transfers ---------------------------------------------------------------------------------------

    @property
    def _update_rate(self) -> float:
        """Bytes per second that updates on the device read and write."""
        return update_rate(self.case.hardware, Tier.DEVICE, self.case.work.widths, self.case.cost)

    @property
    def _matrices_s(self) -> float:
        """Seconds of the products of an update of whole matrices, as Muon's: each rank's share, if the optimizer is
        sharded."""
        case, grid = self.case, self.case.grid
        if not case.cost.whole or not case.placements:
            return 0.0
        shares = 1 if case.placements[0].optimizer is Scope.REPLICATED else grid.shard
        flops = sum(case.work.matrices.values()) / (grid.tp * grid.pp * shares)
        return flops / (case.hardware.flops * case.hardware.efficiency)

    @cached_property
    def host_update_s(self) -> float:
        """Seconds of one step's host updates, hidden or not."""
        case, rate = self.case, self.case.hardware.host_rate
        if case.cost.small:  # bound by compute
            rate = min(rate, update_rate(case.hardware, Tier.HOST, case.work.widths, case.cost))
        return host_update_s(case.transfers, case.hardware, rate, case.ranks_per_node)

    def _update_s(self, compute: float) -> tuple[float, float]:
        """Seconds that a step waits for updates, and for other transfers between device, host and disk."""
        case, transfers = self.case, self.case.transfers
        update = transfers.device / self._update_rate
        if transfers.host:
            late = any(placement.hidden_between_passes for placement in case.placements)
            forward = self._forward_s
            overlapped = overlapped_s(forward, compute - forward, late=late, in_backward=case.in_backward)
            on_host = sum(placement.updated_on_host for placement in case.placements)
            waited_for = 0 if case.choice.device_units else on_host  # the last updates of backward run on the device
            update += exposed_update_s(self.host_update_s, overlapped, waited_for)
        offloaded = case.activations.host_per_block * case.work.layers_here(case.grid) * case.micro_batches
        transfer = transfer_s(
            transfers, case.hardware, case.ranks_per_node, passes=2 * case.micro_batches, offloaded=offloaded
        )
        return update, max(0.0, transfer - compute - update)

    # -- how many units to prefetch ----------------------------------------------------------------------------------

    @property
    def prefetch_needed(self) -> tuple[int, bool]:
        """The number of units to prefetch, and whether the link is the limit however many are prefetched."""
        gather_s = self.messages.gather_s
        if not gather_s or not self.compute_s:
            return 0, False
        found = prefetch_need(gather_s, [self._forward_s / len(gather_s)] * len(gather_s))
        return found.units, found.bandwidth_bound

    @property
    def k_star(self) -> int:
        """The number of units whose compute, in forward, takes as long as the longest all-gather, however many there
        are."""
        gather_s = self.messages.gather_s
        if not gather_s or not self.compute_s:
            return 0
        return prefetch_for_equal_units(max(gather_s), self._forward_s / len(gather_s))


def _by_widths(units: Iterable[UnitSize]) -> Counter[Widths]:
    """The elements of units, by their widths."""
    found: Counter[Widths] = Counter()
    for unit in units:
        found[unit.widths] += unit.numel
    return found
