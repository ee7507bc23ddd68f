"""What this rank sends, counted by what it is for.

Every message has a label. Counts are of bytes that leave this rank and of calls, by purpose and collective; a step ends
with `cut`, and the last one can be read until the next ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Label(NamedTuple):
    """What a message is for, and which unit it carries."""

    purpose: str
    unit: str

    def __str__(self) -> str:
        return f"{self.purpose} of {self.unit}"


class Flow(NamedTuple):
    """Bytes this rank sent and calls it made."""

    sent_bytes: int = 0  # by this rank
    calls: int = 0  # of the collective


@dataclass
class Meter:
    """Counts what this rank sends, by purpose and collective; `cut` closes a step."""

    running: dict[tuple[str, str], Flow] = field(default_factory=dict)
    last_step: dict[tuple[str, str], Flow] = field(default_factory=dict)

    def count(self, purpose: str, collective: str, sent_bytes: int) -> None:
        flow = self.running.get((purpose, collective), Flow())
        self.running[purpose, collective] = Flow(flow.sent_bytes + sent_bytes, flow.calls + 1)

    def cut(self) -> None:
        self.last_step, self.running = self.running, {}
