"""The same training at several stages on one page: do the curves coincide, and what did each stage hold, send, take?

Beside every measured figure stands what the formulas of the ZeRO paper say for this model and this number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from onefold.train.report import charts, sections
from onefold.train.report.charts import NARROW, WIDE, Chart
from onefold.train.report.figures import (
    FULLEST,
    LASTING,
    NAMES,
    STATES,
    Agreement,
    Run,
    agreement,
    formula_memory,
    formula_moves,
    formula_text,
    once_bytes,
    states_of,
)
from onefold.train.report.page import Card, Section, dot, figure, figures, link, page, table, text, wide_figure
from onefold.train.report.words import NOTHING, count, digits, listed, nats, nbytes, seconds
from onefold.train.run.folder import RunFolder

Rows = list[tuple[str, list[str]]]  # the class of a row, and its cells


def compared(folder: Path, runs: Sequence[Run], *, at: Sequence[str] = ()) -> tuple[list[Chart], str]:
    """The charts and the page, of one training at several stages, or of any runs, whose own pages are in the folders
    `at`."""
    together = agreement(runs)
    clock = charts.clock(runs, NARROW)
    narrow, wide = charts.curves(runs), charts.curves(runs, WIDE)
    memory = charts.stacks(runs)
    traffic = charts.bars(runs, "traffic", "Sent by rank 0 in a step", lambda run: sum(run.sent().values()), "bytes")
    step = charts.bars(runs, "step", "Median step", lambda run: 1e3 * (run.steady("step_s") or 0), "milliseconds")
    first = runs[0]
    html = page(
        title=f"{first.name} at {together_name(runs)}" if not at else f"{len(runs)} runs: {together_name(runs)}",
        kicker=sections.kicker("Onefold comparison", first),
        lead=lead(runs, together) if not at or together.bitwise else best(runs),
        cards=[*lowest(runs), *cards(runs, together)[2:-2]] if at else cards(runs, together),
        sections=[
            Section("Loss", wide_figure(narrow, wide) + f"<p>{_drawn(together)}</p>"),
            *([Section("Loss against the clock", figures(figure("", clock)))] if at and clock else []),
            Section("Memory, traffic, time", _figures(memory, traffic, step)),
            Section("Measured and by formula", _table(runs) + NOTES),
            Section("Runs", _runs(runs, at or [run.folder.relative_to(folder).as_posix() for run in runs])),
            sections.environment(first),
            sections.settings(first),
        ],
        end=f"Made by Onefold {text(first.fact('environment', 'onefold', default=''))}.",
    )
    more = (traffic, step, clock if at else None)
    return [wide, memory, *(chart for chart in more if chart is not None)], html


def lowest(runs: Sequence[Run]) -> list[Card]:
    """The lowest losses of runs that are not one training."""
    found = []
    for name, key in (("lowest validation loss", "val_loss"), ("lowest training loss", "loss")):
        known = [(loss, run.label) for run in runs if (loss := run.last(key)) is not None]
        loss, label = min(known, default=(None, "not measured"))
        found.append(Card(name, nats(loss), label))
    return found


def best(runs: Sequence[Run]) -> str:
    """Which of runs that are not one training came lowest."""
    found = [(run, run.last("val_loss")) for run in runs]
    known = [(run, loss) for run, loss in found if loss is not None]
    if not known:
        return f"{len(runs)} runs, none of which has measured a validation loss yet."
    run, loss = min(known, key=lambda pair: pair[1])
    return f"The lowest validation loss is {nats(loss)} nats per token, of <strong>{text(run.label)}</strong>."


def together_name(runs: Sequence[Run]) -> str:
    stages = [run.label.removeprefix("stage ") for run in runs if run.label.startswith("stage ")]
    return f"stages {listed(stages)}" if len(stages) == len(runs) > 1 else listed([run.label for run in runs])


def lead(runs: Sequence[Run], together: Agreement) -> str:
    """Whether they are one training, and what the last stage saved."""
    if not together.steps:
        return "The runs have no logged step in common yet."
    if together.bitwise:
        said = f'<strong class="good">The same bits</strong>: all {together.steps:,} logged losses are equal at '
        said += f"{text(together_name(runs))}; the largest difference is 0. "
    else:
        said = f'<strong class="bad">The losses differ</strong>, by up to {together.largest:.3g} at step '
        said += f"{together.at:,}, over {together.steps:,} steps that all runs logged. "
    first, last = (states_of(run.held()) for run in (runs[0], runs[-1]))
    if first and last and last < first:
        said += f"{text(runs[-1].label.capitalize())} holds {1 - last / first:.0%} less training state on each rank "
        said += f"than {text(runs[0].label)}."
    return said


def cards(runs: Sequence[Run], together: Agreement) -> list[Card]:
    ends = [run.last("loss") for run in runs]
    least = min(runs, key=lambda run: states_of(run.held()) or float("inf"))
    made = [
        Card("largest difference", f"{together.largest:.3g}", f"of losses over {together.steps:,} steps"),
        Card("final loss", nats(ends[0]), "nats per token"),
        Card("least memory", nbytes(states_of(least.held()) or None), f"of states per rank, {least.label}"),
    ]
    timed = [run for run in runs if run.steady("step_s")]
    if timed:
        fastest = min(timed, key=lambda run: run.steady("step_s") or 0)
        made.append(Card("fastest step", seconds(fastest.steady("step_s")), fastest.label))
    ranks, psi = runs[0].number("ranks"), runs[0].number("model", "parameters")
    return [*made, Card("ranks", count(ranks), f"{runs[0].fact('precision')} on {runs[0].fact('device')}"),
            Card("parameters", count(psi), "Ψ in the formulas")]  # fmt: skip


def _drawn(together: Agreement) -> str:
    if together.bitwise:
        return "The lines lie on top of each other: dashes of one fill the gaps of the others, hence one striped line."
    return "Where lines coincide, dashes of one fill the gaps of the others."


def _figures(memory: Chart, traffic: Chart | None, step: Chart | None) -> str:
    return figures(figure("Held between steps", memory), figure("Sent in a step", traffic), figure("Median step", step))


NOTES = """<p class="note">States by formula: so many bytes for each of Ψ parameters, divided by N where the stage
shards them. Units are padded to full vectors, hence the small surplus. At stage 3 a few layers are also unsharded while
they compute. Traffic by formula: (N-1)/N of all parameters, twice, and at stage 3 at most three times: what is
unsharded when forward ends is not all-gathered again. Times are of this machine, where all ranks
may share its cores.</p>"""


def _table(runs: Sequence[Run]) -> str:
    rows: Rows = [*_memory(runs), *_traffic(runs), *_time(runs)]
    heads = ["", *(run.label for run in runs)]
    return table(heads, [cells for _, cells in rows], marks=[mark for mark, _ in rows])


def _memory(runs: Sequence[Run]) -> Rows:
    held = [run.held() for run in runs]
    formulas = [formula_memory(run) for run in runs]
    rows: Rows = [("group", ["held by rank 0 between steps"])]
    for key in [key for key in (*LASTING, *FULLEST) if any(key in sizes for sizes in held)]:
        if key in FULLEST and rows[-1][1][0] != dot(FULLEST[0]) + FULLEST[0]:
            rows.append(("group", ["at the fullest instant of a step"]))
        rows.append(("", [dot(key) + NAMES.get(key, key), *(nbytes(sizes.get(key)) for sizes in held)]))
        if key in STATES and any(formulas):
            rows.append(("formula", ["by formula", *(_formula(run, key) for run in runs)]))
        if key == STATES[-1]:
            rows.append(("total", ["states", *(nbytes(states_of(sizes) or None) for sizes in held)]))
            rows.append(("formula", ["by formula", *(nbytes(states_of(sizes) or None) for sizes in formulas)]))
            rows.append(("formula", ["bytes per parameter", *(_per_parameter(run) for run in runs)]))
    return rows


def _formula(run: Run, state: str) -> str:
    return f"<i>{formula_text(run, state)} =</i> {nbytes(formula_memory(run).get(state))}"


def _per_parameter(run: Run) -> str:
    psi, states = run.number("model", "parameters"), states_of(run.held())
    return digits(states / psi) if psi and states else NOTHING


def _traffic(runs: Sequence[Run]) -> Rows:
    purposes = list(dict.fromkeys(purpose for run in runs for purpose in run.sent()))
    rows: Rows = [("group", ["sent by rank 0 in a step"])]
    for purpose in purposes:
        rows.append(("", [text(purpose), *(nbytes(run.sent().get(purpose)) for run in runs)]))
    rows.append(("total", ["total", *(nbytes(sum(run.sent().values()) or None) for run in runs)]))
    if any(run.sizes("plan", "traffic") for run in runs):
        planned = [sum(run.sizes("plan", "traffic").values()) or None for run in runs]
        rows.append(("formula", ["planned", *map(nbytes, planned)]))
    rows.append(("formula", ["in Ψ(N-1)/N", *(_moves(run) for run in runs)]))
    if any(formula_moves(run) for run in runs):
        rows.append(("formula", ["by formula", *(formula_moves(run) or NOTHING for run in runs)]))
    return rows


def _moves(run: Run) -> str:
    once = once_bytes(run)
    return digits(sum(run.sent().values()) / once) if once and run.sent() else NOTHING


def _time(runs: Sequence[Run]) -> Rows:
    def row(name: str, shown: Callable[[Run], str]) -> list[str]:
        return [name, *(shown(run) for run in runs)]

    return [
        ("group", ["time and result"]),
        ("", row("median step", lambda run: seconds(run.steady("step_s")))),
        ("", row("tokens per second", lambda run: count(run.steady("tokens_per_s")))),
        ("", row("final loss", lambda run: nats(run.last("loss"), 8))),
        ("", row("validation loss", lambda run: nats(run.last("val_loss"), 8))),
    ]


def _runs(runs: Sequence[Run], at: Sequence[str]) -> str:
    items = ""
    for run, where in zip(runs, at, strict=True):
        more = f"{len(run.warnings)} warnings" if len(run.warnings) != 1 else "1 warning"
        steps = run.metrics[-1]["step"] if run.metrics else 0
        items += f"<li>{text(run.label)}: <code>{text(where)}/</code>, {steps:,} steps, {more}"
        items += f", {link(f'{where}/{RunFolder(run.folder).report.name}', 'its own report')}</li>"
    return f"<ul>{items}</ul>"
