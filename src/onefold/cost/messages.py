"""Messages of one case in a step: what one rank sends, over which links, and how long each message takes alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from onefold.cost.case import Case
from onefold.cost.cut_sequences import attention_calls
from onefold.cost.traffic import Sent, reduce_default, step_traffic, total

# purposes of messages for updates of whole tensors
WHOLE = ("whole-gradient", "whole-master", "whole-updated", "whole-direction")
UNHIDDEN = ("tensor-parallel", "sequence", *WHOLE)  # of messages that no compute hides


@dataclass(frozen=True)
class Messages:
    """What one rank of a case sends in a step."""

    case: Case

    @cached_property
    def reductions(self) -> int:
        """How often gradients are reduced in a step: once, or for each micro-batch."""
        case = self.case
        return case.micro_batches if (case.reduce or reduce_default(case.placements[0])) == "each" else 1

    @cached_property
    def traffic(self) -> dict[str, Sent]:
        case, work, grid = self.case, self.case.work, self.case.grid
        forward, backward = work.passes(case.sizes, case.placements)
        again = backward if case.reshard_after_forward else []
        sent = step_traffic(
            case.sizes, case.placements, strategy=case.strategy, forward=forward, backward=again,
            micro_batches=case.micro_batches, reduce=case.reduce, replicas=grid.replica, whole=case.cost.whole,
            tp=grid.tp,
        )  # fmt: skip
        if grid.tp > 1:
            elements = work.tensor_elements(case.batch, case.choice.activations, grid) * case.micro_batches
            width, calls = work.widths.compute, 6 * work.layers_here(grid) * case.micro_batches
            sent["tensor-parallel"] = Sent(elements, elements * width, calls, "all-reduce", "tp")
        if grid.sequence > 1 and work.shape is not None:
            policy, width = case.choice.activations, work.widths.compute
            traded = work.sequence_bytes(case.batch, policy, grid) * case.micro_batches
            calls = attention_calls(work.shape, policy, grid.tp, grid.sequence)
            calls *= work.layers_here(grid) * case.micro_batches
            sent["sequence"] = Sent(traded // width, traded, calls, "all-to-all", "sequence")
        return sent

    @property
    def traffic_elements(self) -> int:
        """Elements that one rank sends in a step, without tensor parallelism and attention over cut sequences."""
        return total({k: v for k, v in self.traffic.items() if k not in ("tensor-parallel", "sequence")})[0]

    def link(self, axis: str) -> float:
        """Bytes per second along an axis; tensor parallelism uses neighbouring ranks."""
        hardware, grid = self.case.hardware, self.case.grid
        node = hardware.node_ranks
        tp_in_node = max(1, min(grid.tp, node))
        if axis == "tp":
            return hardware.link(grid.tp, node)
        shards = max(1, node // tp_in_node)
        if axis == "sequence":
            return hardware.link(grid.sequence, shards)
        if axis == "replica":
            return hardware.link(grid.replica, max(1, shards // grid.shard))
        return hardware.link(grid.everyone if axis == "all" else grid.shard, shards)

    @cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds of the messages of each purpose, hidden or not."""
        return {purpose: self._message_s(sent) for purpose, sent in self.traffic.items()}

    def _message_s(self, sent: Sent) -> float:
        if not sent.bytes or (self.case.grid.everyone == 1 and sent.axis != "tp"):
            return 0.0
        return sent.calls * self.case.hardware.latency_s + self.moving_s(sent)

    def moving_s(self, sent: Sent) -> float:
        """Seconds that bytes take over links. Of an all-to-all some stay inside the node; for the others each rank has
        its share of the node's network."""
        if not sent.near_bytes or not self.case.cuda:
            return sent.bytes / self.link(sent.axis)
        far = self.case.hardware.link(self.case.grid.shard, 1)
        return sent.near_bytes / self.case.hardware.node_link + (sent.bytes - sent.near_bytes) / far

    @property
    def on_cpu_s(self) -> float:
        """CPU seconds in which a CPU rank moves messages that compute may hide, and so does not compute; 0 for GPUs."""
        hardware = self.case.hardware
        if self.case.cuda or self.case.grid.everyone == 1:
            return 0.0
        sent = [one for purpose, one in self.traffic.items() if one.bytes and purpose not in UNHIDDEN]
        rate = hardware.core_rate or hardware.node_link
        return sum(one.calls * hardware.core_latency_s + one.bytes / rate for one in sent)

    @property
    def copied_bytes(self) -> float:
        """Bytes that a rank reads and writes in one micro-batch to copy its own shards into the buffers of all-gathers:
        for a shard that it sends to each peer, one copy."""
        forward = [name for name in ("gather-forward", "gather-backward") if name in self.traffic]
        others = max(1, self.case.grid.shard - 1)
        return 2 * sum(self.traffic[name].bytes for name in forward) / others / self.case.micro_batches

    @property
    def unit_numel(self) -> list[int]:
        """Elements of the units that messages follow: those that a pass gathers, or else those that are reduced."""
        case = self.case
        forward, _ = case.work.passes(case.sizes, case.placements)
        units = [case.sizes.units[i] for i in forward] if self.gather_s else case.sizes.trained
        return [unit.numel for unit in units]

    @cached_property
    def gather_s(self) -> list[float]:
        """Seconds of the all-gather of each unit in a forward or backward."""
        units = self.case.sizes.units
        forward, _ = self.case.work.passes(self.case.sizes, self.case.placements)
        rate, others = self.link("shard"), self.case.grid.shard - 1
        sent_bytes = [units[i].shard * others * units[i].widths.compute for i in forward]
        return [self.case.hardware.latency_s + nbytes / rate for nbytes in sent_bytes] if others else []
