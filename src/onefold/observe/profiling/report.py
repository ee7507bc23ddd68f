"""Where the steps of a profile went: figures, as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from onefold.observe.profiling.breakdown import Breakdown, Part

ALWAYS = (Part.FORWARD, Part.BACKWARD, Part.UPDATE, Part.GATHER, Part.REDUCE, Part.HOST, Part.OTHER)
TOP = 5  # units that are named
LARGEST = 1 << 60  # nanoseconds or bytes of one step


class StepProfile(NamedTuple):
    """Where the time of one step of one rank went."""

    wall_ns: int
    parts_ns: dict[str, int]  # by part of a step: forward, backward, update, …; they add up to wall_ns
    exposed_ns: dict[str, dict[str, int]]  # unit -> what it was waited for -> time in which nothing was computed
    beside_ns: int  # updates that ran on the host, beside the step
    gathered_bytes: int  # sent by this rank in all-gathers
    reduced_bytes: int  # sent by this rank in reduce-scatters and all-reduces


def step_profile(found: Breakdown, sent_bytes: dict[str, int]) -> StepProfile:
    """A StepProfile from the breakdown of a step and the bytes that it sent by purpose."""
    exposed: dict[str, dict[str, int]] = {}
    for (what, of), time in found.exposed.items():
        exposed.setdefault(of, {})[what] = time
    moved = [sum(n for purpose, n in sent_bytes.items() if purpose.startswith(kind)) for kind in ("gather", "reduce")]
    parts = {part.name.lower(): time for part, time in found.parts.items()}
    return StepProfile(found.wall, parts, exposed, found.beside, *moved)


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """Where the time of the recorded steps of one rank went; print it for a table."""

    rank: int
    """The rank that recorded."""
    ranks: int
    """The number of ranks of the run."""
    device: str
    """The type of the device: "cpu" or "cuda"."""
    steps: tuple[StepProfile, ...]
    """The recorded steps."""

    @property
    def step_s(self) -> float:
        """Seconds of a step: the mean over the recorded steps."""
        return self._mean(lambda step: step.wall_ns)

    @property
    def parts_s(self) -> dict[str, float]:
        """Seconds of each part of a step (forward, backward, update, …): the mean over the recorded steps."""
        return {part.name.lower(): self.part_s(part) for part in Part}

    @property
    def exposed_s(self) -> float:
        """Seconds of a step in which nothing was computed because a message between ranks was waited for."""
        return sum(map(self.part_s, (Part.GATHER, Part.REDUCE, Part.SMALL, Part.TENSOR)))

    def part_s(self, part: Part) -> float:
        """Seconds of one part of a step: the mean over the recorded steps."""
        return self._mean(lambda step: step.parts_ns.get(part.name.lower(), 0))

    def units_s(self) -> dict[str, dict[str, float]]:
        """Seconds of a step in which nothing was computed, by unit and by what was waited for; the longest first."""
        found: dict[str, dict[str, float]] = {}
        for step in self.steps:
            for unit, times in step.exposed_ns.items():
                for what, time in times.items():
                    known = found.setdefault(unit, {})
                    known[what] = known.get(what, 0.0) + time * 1e-9 / len(self.steps)
        return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))

    def _mean(self, value: Callable[[StepProfile], int]) -> float:
        return sum(map(value, self.steps)) * 1e-9 / len(self.steps)

    def as_dict(self) -> dict[str, Any]:
        """The report as a dict for JSON; `from_dict` makes a report of it again."""
        steps = [step._asdict() for step in self.steps]
        return {"rank": self.rank, "ranks": self.ranks, "device": self.device, "steps": steps}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ProfileReport:
        """The report that `as_dict` made a dict of. Anything else raises ValueError, TypeError or KeyError."""
        found = cls(**{**values, "steps": tuple(StepProfile(**step) for step in values["steps"])})
        times = [found.rank, found.ranks]
        for step in found.steps:
            tables: list[Any] = [step.parts_ns, step.exposed_ns, *_table(step.exposed_ns).values()]
            times += [step.wall_ns, step.beside_ns, step.gathered_bytes, step.reduced_bytes]
            times += [time for table in tables if table is not step.exposed_ns for time in _table(table).values()]
        if not found.steps or not isinstance(found.device, str) or not all(step.wall_ns for step in found.steps):
            raise ValueError("it has no steps, or steps without a time")
        if odd := [time for time in times if type(time) is not int or not 0 <= time < LARGEST]:
            raise ValueError(f"{str(odd[0])[:40]!r} is no time or number of bytes")
        return found

    def __str__(self) -> str:
        return summary([self])


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"a {type(value).__name__} where a table belongs")
    return value


def summary(reports: Sequence[ProfileReport]) -> str:
    """The first rank's figures as text, with the least and the most of all ranks."""
    first = reports[0]
    walls = sorted(step.wall_ns * 1e-9 for step in first.steps)
    several = f" ({_ms(walls[0])} to {_ms(walls[-1])})" if len(walls) > 1 else ""
    steps = f"{len(walls)} step{'s' * (len(walls) > 1)}"
    lines = [f"{steps} of rank {first.rank} of {first.ranks} ({first.device}): {_ms(first.step_s)} ms{several}"]
    lines.append(f"  {'':<32}{'ms':>9}{'share':>9}" + (f"{'all ranks':>20}" if len(reports) > 1 else ""))
    for part in Part:
        times = [report.part_s(part) for report in reports]
        if part in ALWAYS or any(times):
            lines.append(_row(part.value, times, first.step_s))
    lines.append(_row("step", [report.step_s for report in reports], first.step_s))
    return "\n".join(lines + _more(first))


def _row(name: str, times: Sequence[float], whole: float) -> str:
    others = f"{_ms(min(times))} to {_ms(max(times))}" if len(times) > 1 else ""
    return f"  {name:<32}{_ms(times[0]):>9}{times[0] / whole:>9.1%}{others:>20}".rstrip()


def _more(report: ProfileReport) -> list[str]:
    last = report.steps[-1]
    lines = [f"exposed messages in a step: {_ms(report.exposed_s)} ms, {report.exposed_s / report.step_s:.1%}"]
    lines += [f"sent in a step: {_size(last.gathered_bytes)} to gather, {_size(last.reduced_bytes)} to reduce"]
    beside = sum(step.beside_ns for step in report.steps) * 1e-9 / len(report.steps)
    if beside:
        lines.append(f"beside the step, the host updated for {_ms(beside)} ms")
    units = [(unit, times) for unit, times in report.units_s().items() if sum(times.values()) >= 5e-6][:TOP]
    if units:
        lines.append("waited longest for, in ms")
    for unit, times in units:
        parts = ", ".join(f"{what} {_ms(time)}" for what, time in sorted(times.items(), key=lambda item: -item[1]))
        lines.append(f"  {unit:<32}{_ms(sum(times.values())):>9}  {parts}")
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:,.1f} kB"
