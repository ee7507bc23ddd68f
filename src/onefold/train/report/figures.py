"""The figures of a run that a reader asks for first, and those the formulas give. Numbers only; nothing is drawn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from onefold.errors import visible
from onefold.observe.profiling.report import ProfileReport
from onefold.train.run.records import read_config, read_facts, read_metrics, read_profile, read_samples, read_warnings

Number = TypeVar("Number", int, float)
STATES = ("parameters", "gradients", "optimizer")  # what ZeRO shards
LASTING = (*STATES, "buffers", "communication")  # held between steps
ELSEWHERE = ("host", "disk")  # where states are offloaded
NAMES = {"buffers": "module buffers", "communication": "working buffers"}  # of categories, where people read them
FULLEST = ("activations", "peak")  # at the fullest instant of a step
SHARDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}  # the first stage that does
WARM_UP = 2  # steps that still fill buffers and learn orders
LARGEST = 1e100  # a number beyond it was not measured
LONGEST = 120  # characters of a name in a title or a legend
MOST = 64  # categories of memory, purposes of messages


class Run(NamedTuple):
    """All that a run folder says."""

    folder: Path
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    config: str
    profile: Sequence[ProfileReport] = ()  # of each rank
    samples: Sequence[dict[str, Any]] = ()  # text that the model wrote
    named: str = ""  # its name beside other runs, if the stage does not tell them apart

    def fact(self, *path: str, default: Any = None) -> Any:
        """What facts.json says at a path of keys, which an older or unfinished run may lack."""
        found: Any = self.facts
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return default if found is None else found

    def number(self, *path: str) -> float | None:
        return number(self.fact(*path))

    def sizes(self, *path: str) -> dict[str, float]:
        return numbers(self.fact(*path))

    @property
    def name(self) -> str:
        return visible(self.fact("model", "name", default="unnamed model"))[:LONGEST]

    @property
    def label(self) -> str:
        return (
            self.named
            or visible(f"stage {self.facts['stage']}" if "stage" in self.facts else self.folder.name)[:LONGEST]
        )

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps at which a metric was logged, and what it was."""
        rows = [(row["step"], number(row.get(key))) for row in self.metrics]
        return [step for step, value in rows if value is not None], [value for _, value in rows if value is not None]

    def clock(self, key: str) -> tuple[list[float], list[float]]:
        """Minutes since the first logged step at which a metric was logged, and what it was."""
        rows = [(number(row.get("time")), number(row.get(key))) for row in self.metrics]
        known = [(time, value) for time, value in rows if time and math.isfinite(time) and value is not None]
        return [(time - known[0][0]) / 60 for time, _ in known], [value for _, value in known]

    def last(self, key: str) -> float | None:
        return next(reversed(self.series(key)[1]), None)

    def steady(self, key: str) -> float | None:
        """The median without the first steps."""
        values = self.series(key)[1]
        return statistics.median(values[WARM_UP:] or values) if values else None

    def held(self) -> dict[str, float]:
        """Bytes on rank 0 by category, when it was last measured."""
        return next((sizes for row in reversed(self.metrics) if (sizes := numbers(row.get("memory")))), {})

    def sent(self) -> dict[str, float]:
        """Bytes that rank 0 sent in a step by purpose, when it was last measured."""
        return next((sizes for row in reversed(self.metrics) if (sizes := numbers(row.get("traffic")))), {})

    def placed(self) -> list[Any]:
        """Rows of the placement table, as they were written down."""
        rows = self.fact("placement", default=[])
        return rows if isinstance(rows, list) else []

    def plan(self) -> dict[str, float]:
        """Bytes on rank 0 by category: between steps, and at the fullest instant what only then is there.

        The plan is of the fullest instant, when a few units are gathered; between steps, placement says what is held.
        """
        planned = {key: size for key, size in self.sizes("plan", "memory").items() if key in (*LASTING, *FULLEST)}
        placed = [numbers(row).get("parameter_bytes") for row in self.placed()]
        known = [size for size in placed if size is not None]
        if "parameters" in planned and known and len(known) == len(placed):
            planned["parameters"] = min(planned["parameters"], sum(known))
        peak = self.number("plan", "peak_bytes")
        return planned | ({} if peak is None else {"peak": peak})


class Headline(NamedTuple):
    """What `onefold report --json` prints. Losses in nats per token, bytes on rank 0, seconds per step."""

    model: str
    parameters: float | None
    ranks: float | None
    stage: Any
    precision: str | None
    device: str | None
    steps: int
    tokens: float | None
    loss: float | None
    val_loss: float | None
    val_ppl: float | None
    baseline_val_loss: float | None
    better_than_baseline: float | None
    tokens_per_s: float | None
    step_s: float | None
    mfu: float | None
    states_bytes: float | None
    peak_bytes: float | None
    traffic_bytes: float | None
    skipped: float | None
    warnings: int


def read_run(folder: Path) -> Run:
    """Raises one line that says what is wrong with the folder."""
    facts, config = read_facts(folder), read_config(folder)
    metrics, warnings, samples = read_metrics(folder), read_warnings(folder), read_samples(folder)
    return Run(folder, facts, metrics, warnings, config, read_profile(folder), samples)


def headline(run: Run) -> Headline:
    val, base, held = run.last("val_loss"), run.number("baseline", "bigram_val_loss"), run.held()
    step, per_step = run.metrics[-1]["step"] if run.metrics else 0, run.number("tokens_per_step")
    return Headline(
        model=run.name,
        parameters=run.number("model", "parameters"),
        ranks=run.number("ranks"),
        stage=run.fact("stage"),
        precision=run.fact("precision"),
        device=run.fact("device"),
        steps=step,
        tokens=None if per_step is None else per_step * step,
        loss=run.last("loss"),
        val_loss=val,
        val_ppl=run.last("val_ppl") if val is None else perplexity(val),
        baseline_val_loss=base,
        better_than_baseline=None if val is None or base is None else base - val,
        tokens_per_s=run.steady("tokens_per_s"),
        step_s=run.steady("step_s"),
        mfu=run.steady("mfu"),
        states_bytes=states_of(held) if held else None,
        peak_bytes=held.get("peak"),
        traffic_bytes=run.last("traffic_bytes"),
        skipped=run.last("skipped"),
        warnings=len(run.warnings),
    )


# -- what the formulas say ---------------------------------------------------------------------------------------------


def widths(run: Run) -> dict[str, int] | None:
    """Bytes per parameter of each state with Adam; None for a precision that has no formula here."""
    accumulates = (run.number("accumulation") or 1) > 1
    split = run.fact("device") not in (None, "cpu") and run.fact("precision") == "bf16"  # no second copy on CUDA
    narrow = {"parameters": 2, "gradients": 4 if accumulates else 2, "optimizer": 10 if split else 12}
    by_precision = {"fp32": {"parameters": 4, "gradients": 4, "optimizer": 8}, "bf16": narrow, "fp16": narrow}
    return by_precision.get(str(run.fact("precision")))


def formula_memory(run: Run, stage: int | None = None) -> dict[str, float]:
    """Bytes of states on each rank: so many per parameter, over N where the stage shards them."""
    stage = run.fact("stage") if stage is None else stage
    psi, ranks, each = run.number("model", "parameters"), run.number("ranks"), widths(run)
    if psi is None or ranks is None or each is None or type(stage) is not int:
        return {}
    return {state: each[state] * psi / (ranks if stage >= SHARDED_FROM[state] else 1) for state in STATES}


def formula_text(run: Run, state: str) -> str:
    """As the paper writes it."""
    each = widths(run)
    if each is None or type(run.fact("stage")) is not int:
        return ""
    return f"{each[state]}Ψ{'/N' if run.facts['stage'] >= SHARDED_FROM[state] else ''}"


def once_bytes(run: Run) -> float | None:
    """Ψ(N-1)/N in bytes: what a rank sends when all parameters move once."""
    psi, ranks, each = run.number("model", "parameters"), run.number("ranks"), widths(run)
    if not psi or not ranks or each is None or ranks < 2:
        return None
    return each["parameters"] * psi * (ranks - 1) / ranks


def formula_moves(run: Run) -> str:
    """How often all parameters move in a step, as the ZeRO paper counts; empty where it does not."""
    if (run.number("accumulation") or 1) > 1 or type(run.fact("stage")) is not int:
        return ""  # stage 3 gathers again for every micro-batch
    return "at most 3" if run.facts["stage"] >= 3 else "2"


# -- numbers -----------------------------------------------------------------------------------------------------------


def number(value: Any) -> float | None:
    """A figure that some run can have; None for any other value."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if not -math.inf < value < math.inf or abs(value) <= LARGEST else None


def numbers(table: Any) -> dict[str, float]:
    """The numbers of a table; what is null was not measured. Keys become labels of charts, and no run has many."""
    if not isinstance(table, dict):
        return {}
    found = {visible(key)[:LONGEST]: number(value) for key, value in islice(table.items(), MOST)}
    return {key: value for key, value in found.items() if value is not None}


def perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def states_of(sizes: dict[str, float]) -> float:
    return sum(sizes.get(state, 0) for state in STATES)


class Agreement(NamedTuple):
    """How far runs of one training are apart."""

    steps: int  # that all of them logged
    largest: float  # difference of two losses at one step
    at: int | None  # that step

    @property
    def bitwise(self) -> bool:
        return self.steps > 0 and self.largest == 0


def agreement(runs: Sequence[Run]) -> Agreement:
    """Over the losses and validation losses of all steps that all runs logged."""
    tables = [{row["step"]: (number(row.get("loss")), number(row.get("val_loss"))) for row in r.metrics} for r in runs]
    common = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    largest, at = 0.0, None
    for step in common:
        gap = max(_gap([table[step][kind] for table in tables]) for kind in (0, 1))
        if gap > largest:
            largest, at = gap, step
    return Agreement(len(common), largest, at)


def _gap(values: Sequence[float | None]) -> float:
    """The largest difference; not a number everywhere is agreement, somewhere only it is not."""
    alike = {("none" if v is None else "nan" if math.isnan(v) else "number") for v in values}
    if len(alike) > 1:
        return math.inf
    ordered = sorted(v for v in values if v is not None and not math.isnan(v))
    return ordered[-1] - ordered[0] if any(a != b for a, b in pairwise(ordered)) else 0.0


def thin(steps: Sequence[Number], values: Sequence[float], most: int = 1200) -> tuple[list[Number], list[float]]:
    """At most about `most` points that draw the same curve: of each stretch the lowest and the highest.

    >>> thin([1, 2, 3, 4, 5, 6], [0, 9, 5, 5, 1, 7], most=4)
    ([1, 2, 5, 6], [0, 9, 1, 7])
    """
    if len(steps) <= most:
        return list(steps), list(values)
    stretch = -(-2 * len(steps) // most)
    kept = {0, len(steps) - 1}
    for start in range(0, len(steps), stretch):
        inside = range(start, min(start + stretch, len(steps)))
        finite = [i for i in inside if not math.isnan(values[i])] or list(inside)
        kept |= {min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)}
    return [steps[i] for i in sorted(kept)], [values[i] for i in sorted(kept)]


def smooth(values: Sequence[float]) -> list[float]:
    """The mean over a fiftieth of the run around each point, in which a trend shows."""
    half = len(values) // 100
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    edges = [(max(i - half, 0), min(i + half + 1, len(values))) for i in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in edges]
