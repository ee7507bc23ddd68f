"""The rows of a plan: what one choice costs one rank, from the formulas, or with what a rehearsal measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onefold.cost.estimate import Estimate
from onefold.cost.hardware import Hardware
from onefold.cost.recommend import Ranked
from onefold.cost.search import Question, days, fewest_ranks, fits, largest_batch, largest_model, longest_sequence
from onefold.cost.seconds import break_even_batch
from onefold.cost.traffic import Sent

if TYPE_CHECKING:
    from onefold.observe.rehearsal import Rehearsal


@dataclass(frozen=True)
class Message:
    """What one rank sends for one purpose in a step."""

    purpose: str
    collective: str
    axis: str
    elements: int
    bytes: int
    calls: int
    link_bytes_per_s: float


@dataclass(frozen=True)
class Row:
    """What one choice costs one rank. Bytes are on the device unless a name says otherwise."""

    label: str
    stage: int
    activations: str  # the setting of `shard`
    batch: int  # sequences or rows of one micro-batch of one rank
    params_bytes: int
    grads_bytes: int
    optimizer_bytes: int  # master and optimizer state
    states_bytes: int  # parameters, optimizer state and all gradients, as between backward and step
    peak_grads_bytes: int  # gradients at the fullest instant of a step
    buffers_bytes: int  # communication buffers at the fullest instant
    gathered_bytes: int  # unsharded parameters at the fullest instant
    activations_bytes: int  # activations at the fullest instant
    margin_bytes: int  # on CUDA, what is added for the allocator's fragments
    persistent_bytes: int  # between steps
    peak_bytes: int  # at the fullest instant, with the margin
    peak_at: str  # where in a step the fullest instant is
    padding_bytes: int  # of the states, what aligns parameters and shards
    host_bytes: int  # in host memory
    pinned_bytes: int  # of host_bytes, what a GPU copies from and to
    disk_bytes: int
    fits: bool  # with room for activations where nothing is known of them
    traffic_elements: int  # sent by a rank in a step
    traffic_bytes: int
    messages: tuple[Message, ...]  # traffic by purpose
    step_s: float
    compute_s: float
    exposed_s: float  # messages that no computing hides
    tensor_s: float  # messages of tensor parallelism, and of attention over cut sequences
    update_s: float
    host_update_s: float  # updates on the host, hidden or not
    transfer_s: float  # copies between the device and host or disk
    bubble_s: float  # stages of a pipeline that wait
    units: int  # flat buffers that a pass gathers; 0 where parameters are replicated
    k_star: int  # units whose computing takes as long as the longest all-gather; may be more than there are
    look_ahead: int  # units to prefetch, so that computing hides their all-gathers
    bandwidth_bound: bool  # all-gathers take longer than computing: no prefetch hides them
    largest_batch: int | None  # None: unknown, or not searched for
    longest_sequence: int | None  # tokens, one at a time; None: neither cut nor by tiles, or not searched for
    fewest_ranks: int | None  # None: no number of them, or not searched for
    largest_model: int  # parameters whose states would fill the devices: an upper bound
    break_even_batch: int | None  # stage 3: from this batch on messages take under 5% of the compute, hidden or not
    tokens_per_s: float  # of all ranks
    mfu: float  # the share of the peak flop rate, without flops that are computed again; 0 where flops are unknown
    days: float | None  # for the number of tokens that was asked about


@dataclass(frozen=True)
class Recommendation:
    """One choice, and the reason for its place among the recommendations."""

    label: str
    stage: int
    tp: int
    batch: int  # sequences or rows of one micro-batch of one rank
    activations: str  # the setting of `shard`
    optimizer: str  # the tier of the optimizer state: device, host or disk
    parameters: str  # the tier of the parameters
    fits: bool
    peak_bytes: int
    step_s: float
    tokens_per_s: float  # of all ranks
    reason: str


def exact_row(row: Row, seen: Rehearsal, machine: Hardware) -> Row:
    """The formula's row with what the rehearsal measured."""
    elements = {message.purpose: message.elements for message in row.messages}
    rates = {message.axis: message.link_bytes_per_s for message in row.messages}
    planned = {message.purpose: message.bytes for message in row.messages}
    messages = tuple(
        Message(purpose, collective, "shard",
                elements.get(purpose, 0) * flow.sent_bytes // max(planned.get(purpose, 0), 1),
                flow.sent_bytes, flow.calls, rates.get("shard", machine.node_link))
        for (purpose, collective), flow in seen.sent.items()
    )  # fmt: skip
    states = seen.states
    gathered = max(0, seen.peak["parameters"] - states.parameters)
    peak = seen.peak_bytes + row.margin_bytes
    persistent = states.parameters + states.optimizer
    if machine.device != "cuda":
        persistent += states.gradients + seen.communication
    return dataclasses.replace(
        row,
        params_bytes=states.parameters,
        grads_bytes=states.gradients,
        optimizer_bytes=states.optimizer,
        states_bytes=states.total,
        peak_grads_bytes=seen.peak["gradients"],
        buffers_bytes=seen.peak["communication"] + seen.peak["buffers"],
        gathered_bytes=gathered,
        activations_bytes=seen.peak["activations"] + seen.peak["checkpoints"],
        host_bytes=seen.host.total + seen.checkpoints_host,
        disk_bytes=seen.disk.total,
        persistent_bytes=persistent + seen.module_buffers,
        peak_bytes=peak,
        fits=peak <= machine.usable_bytes,
        traffic_elements=sum(message.elements for message in messages),
        traffic_bytes=sum(message.bytes for message in messages),
        messages=messages,
    )


def row_of(question: Question, e: Estimate, tokens: float | None, *, searched: bool = True) -> Row:
    """A row by formula. The largest batch, the longest sequence and the fewest ranks are searched for."""
    states, step, ahead = e.memory.device_states, e.time.step, e.time.prefetch_needed
    messages = tuple(_message(purpose, sent, e) for purpose, sent in e.messages.traffic.items())
    known = question.work.knows_activations
    long = question.work.shape is not None and (e.grid.sequence > 1 or question.work.tile is not None)
    return Row(
        label=str(e.choice),
        stage=e.choice.stage,
        activations=e.choice.activations if known else "unknown",
        batch=e.batch,
        params_bytes=states.parameters,
        grads_bytes=states.gradients,
        optimizer_bytes=states.optimizer,
        states_bytes=states.total,
        peak_grads_bytes=e.memory.persistent_states.gradients + e.memory.fullest.gradients,
        buffers_bytes=e.memory.fullest.buffers,
        gathered_bytes=e.memory.fullest.gathered,
        activations_bytes=e.memory.fullest.activations,
        margin_bytes=e.memory.margin,
        persistent_bytes=e.memory.persistent_bytes,
        peak_bytes=e.peak_bytes,
        peak_at=e.memory.fullest.where,
        padding_bytes=e.memory.padding_bytes,
        host_bytes=e.memory.host_bytes,
        pinned_bytes=e.memory.pinned_bytes,
        disk_bytes=e.memory.disk_bytes,
        fits=fits(e),
        traffic_elements=e.messages.traffic_elements,
        traffic_bytes=sum(message.bytes for message in messages),
        messages=messages,
        step_s=step.total,
        compute_s=step.compute,
        exposed_s=step.exposed,
        tensor_s=step.tensor,
        update_s=step.update,
        host_update_s=e.time.host_update_s,
        transfer_s=step.transfer,
        bubble_s=step.bubble,
        units=len(e.messages.gather_s),
        k_star=e.time.k_star,
        look_ahead=ahead[0],
        bandwidth_bound=ahead[1],
        largest_batch=largest_batch(question, e.choice, e.grid) if known and searched else None,
        longest_sequence=longest_sequence(question, e.choice, e.grid) if searched and long else None,
        fewest_ranks=fewest_ranks(question, e.choice) if searched else None,
        largest_model=largest_model(e),
        break_even_batch=_break_even(e),
        tokens_per_s=e.tokens_per_s,
        mfu=e.mfu,
        days=days(tokens, e.tokens_per_s) if tokens and e.tokens_per_s else None,
    )


def _break_even(e: Estimate) -> int | None:
    shape = e.work.shape
    if shape is None or e.choice.stage != 3 or e.grid.shard == 1:
        return None
    rate = e.hardware.peak_flops(e.work.widths.compute) * e.hardware.efficiency
    return break_even_batch(shape.numel, shape.layers, shape.seq, rate, e.hardware.latency_s, e.messages.link("shard"))


def _message(purpose: str, sent: Sent, e: Estimate) -> Message:
    return Message(
        purpose, sent.collective, sent.axis, sent.elements, sent.bytes, sent.calls, e.messages.link(sent.axis)
    )


def recommendation_of(ranked: Ranked) -> Recommendation:
    e = ranked.estimate
    return Recommendation(
        str(e.choice), e.choice.stage, e.grid.tp, e.batch, e.choice.activations, e.choice.optimizer,
        e.choice.parameters, ranked.fits, e.peak_bytes, e.step_s, e.tokens_per_s,
        ranked.reason,
    )  # fmt: skip
