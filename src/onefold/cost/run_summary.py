"""What is about to run, in three sentences: its settings, what its states take, and what to expect."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.cost.case import Choice
from onefold.cost.estimate import Estimate
from onefold.cost.states import StateBytes
from onefold.cost.text import format_bytes


def run_summary(e: Estimate) -> tuple[str, str, str]:
    """The sentences of an estimate. Nothing is said of time on a CPU, whose rates are unknown."""
    known = e.hardware.device == "cuda" and e.tokens_per_s > 0
    return run_sentences(
        e.choice, e.batch, e.memory.device_states, e.peak_bytes, e.hardware.memory_bytes,
        tp=f", tp {e.grid.tp}" * (e.grid.tp > 1),
        rates=[f"{e.tokens_per_s:,.0f} tokens/s", f"MFU {e.mfu:.0%}"] if known else (),
    )  # fmt: skip


def run_sentences(
    choice: Choice, batch: int | None, states: StateBytes, peak_bytes: int | None, memory_bytes: int, *, tp: str = "",
    rates: Sequence[str] = (),
) -> tuple[str, str, str]:  # fmt: skip
    """The sentences, from the figures of a formula or of a rehearsal; without a batch, the last one is of states."""
    offload = ", no offload" * (choice.optimizer == "device" and choice.parameters == "device")
    rows = f", batch {batch}" if batch is not None else ""
    what = f"Planned: {choice}{tp}{rows}, activations {choice.activations}{offload}."
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in states._asdict().items())
    if peak_bytes is None:
        of = f"{format_bytes(states.total)} of {format_bytes(memory_bytes)}"
        return what, f"On each rank: {parts}.", f"Expect {of}, and what activations of the first batch take."
    peak = f"{format_bytes(peak_bytes)} of {format_bytes(memory_bytes)} at the peak"
    return what, f"On each rank: {parts}.", f"Expect {', '.join([peak, *rates])}."
