"""The meter: bytes that this rank sends, and calls, by purpose and collective.

Every message has a label with its purpose. `cut` ends a step; the counts of the last step can be read until the next
one ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Label(NamedTuple):
    """The purpose of a message, and the unit that it carries."""

    purpose: str
    unit: str

    def __str__(self) -> str:
        return f"{self.purpose} of {self.unit}"


class Flow(NamedTuple):
    """Bytes that this rank sent, and calls."""

    sent_bytes: int = 0  # by this rank
    calls: int = 0  # of the collective


@dataclass
class Meter:
    """Counts what this rank sends, by purpose and collective, step by step."""

    running: dict[tuple[str, str], Flow] = field(default_factory=dict)
    last_step: dict[tuple[str, str], Flow] = field(default_factory=dict)

    def count(self, purpose: str, collective: str, sent_bytes: int) -> None:
        flow = self.running.get((purpose, collective), Flow())
        self.running[purpose, collective] = Flow(flow.sent_bytes + sent_bytes, flow.calls + 1)

    def cut(self) -> None:
        """Ends a step: what was counted becomes `last_step`, and counting starts again."""
        self.last_step, self.running = self.running, {}
