"""The parts of a run's page, each made of the run alone."""

from __future__ import annotations

from datetime import date
from typing import Any

from onefold.observe.profiling.breakdown import Part
from onefold.train.report.charts import Chart
from onefold.train.report.figures import (
    ELSEWHERE,
    FULLEST,
    LASTING,
    NAMES,
    STATES,
    Headline,
    Run,
    formula_memory,
    formula_moves,
    headline,
    number,
    once_bytes,
    states_of,
)
from onefold.train.report.page import (
    Card,
    Section,
    command,
    dot,
    facts,
    figure,
    figures,
    folded,
    table,
    text,
    wide_figure,
)
from onefold.train.report.words import NOTHING, count, digits, nats, nbytes, off, seconds

SAMPLES, SAMPLE_LENGTH = 3, 4000  # that a page shows, and characters of each
MANY = 12  # rows of a table that is folded


def kicker(what: str, run: Run) -> str:
    """With the day, where it is known."""
    try:
        day = date.fromisoformat(str(run.fact("environment", "date"))[:10])
    except ValueError:
        return what
    return f"{what} · {day.day} {day:%B %Y}"


def lead(run: Run) -> str:
    """What came of it, in two sentences."""
    top = headline(run)
    if not run.metrics:
        return "No step has been logged yet."
    where = f"{count(top.ranks)} rank{'s' if top.ranks != 1 else ''} at stage {text(top.stage)}"
    said = f"{top.steps:,} steps on {where} in {text(top.precision)}, {count(top.tokens)} tokens. "
    if top.val_loss is None or top.baseline_val_loss is None or top.better_than_baseline is None:
        return said
    gap = top.better_than_baseline
    verdict = f'<strong class="{"good" if gap > 0 else "bad"}">{"better" if gap > 0 else "worse"}</strong>'
    return (
        f"{said}On text it never saw, the model is {verdict} than a table of token pairs: {nats(top.val_loss)} nats "
        f"per token, where the table has {nats(top.baseline_val_loss)}."
    )


def cards(top: Headline) -> list[Card]:
    gap, base = top.better_than_baseline, top.baseline_val_loss
    than = "" if gap is None else f"{digits(abs(gap))} {'above' if gap > 0 else 'below'} the model"
    used = "" if top.mfu is None else f", {top.mfu:.1%} of the peak"
    return [
        Card("validation loss", nats(top.val_loss), "nats per token"),
        Card("perplexity", NOTHING if top.val_ppl is None else digits(top.val_ppl), "on validation text"),
        Card("bigram baseline", nats(base), than),
        Card("training loss", nats(top.loss), f"at step {top.steps:,}"),
        Card("tokens per second", count(top.tokens_per_s), f"{seconds(top.step_s)} a step{used}"),
        Card("states per rank", nbytes(top.states_bytes), "parameters, gradients, optimizer"),
        Card("sent per step", nbytes(top.traffic_bytes), "by each rank"),
        Card("ranks", count(top.ranks), f"stage {top.stage}, {top.precision}, {top.device}"),
    ]


def loss(run: Run, narrow: Chart, wide: Chart) -> Section:
    if not run.metrics:
        return Section("Loss", "<p>Nothing to draw before the first logged step.</p>")
    said = "<p>Mean over all ranks. The thin line is every step, the thick one its trend.</p>"
    return Section("Loss", wide_figure(narrow, wide) + (said if len(run.metrics) >= 100 else ""))


def progress(run: Run, charts: dict[str, tuple[str, Chart | None]]) -> Section:
    shown = [figure(title, chart) for title, chart in charts.values()]
    skipped = run.last("skipped")
    said = f"<p>{digits(skipped, 1)} steps were skipped: gradients overflowed, or spiked.</p>" if skipped else ""
    median, most, rank = (run.last(key) for key in ("compute_s", "slowest_s", "slowest_rank"))
    if median is not None and most is not None and rank is not None:
        said += (
            f"<p>Without waits for messages a rank computes {seconds(median)} of a step (the median); rank "
            f"{count(rank)}, the slowest, {seconds(most)}.</p>"
        )
    return Section("Speed and optimisation", (figures(*shown) if any(shown) else "<p>Nothing logged yet.</p>") + said)


def profile(run: Run) -> list[Section]:
    """Where a step went, if some were recorded."""
    if not run.profile:
        return []
    first, rows = run.profile[0], []
    for part in Part:
        times = [one.part_s(part) for one in run.profile]
        if any(times):
            share = f"{times[0] / first.step_s:.1%}"
            rows.append([part.value, seconds(times[0]), share, f"{seconds(min(times))} to {seconds(max(times))}"])
    rows.append(["step", seconds(first.step_s), "100%", ""])
    said = f"<p>The mean of {count(len(first.steps))} steps of rank {count(first.rank)}, and the least and most of all."
    waits = {unit: sum(times.values()) for unit, times in first.units_s().items()}
    if waits:
        unit, longest = next(iter(waits.items()))
        said += f" It waited longest for <code>{text(unit)}</code>: {seconds(longest)}."
    marks = [""] * (len(rows) - 1) + ["total"]
    body = table(("", "rank 0", "share", "all ranks"), rows, marks=marks)
    return [Section("Where a step goes", f"{said}</p>{body}")]


def samples(run: Run) -> list[Section]:
    """What the model wrote when it was last asked, the newest first; what it was given is in bold."""
    shown = [row for row in run.samples if isinstance(row.get("text"), str)][: -SAMPLES - 1 : -1]
    items = ""
    for row in shown:
        step = number(row.get("step"))
        at = "" if step is None else f'<p class="note">after step {step:,.0f}</p>'
        prompt, said = str(row.get("prompt", ""))[:SAMPLE_LENGTH], row["text"][:SAMPLE_LENGTH]
        items += f'{at}<pre class="sample"><strong>{text(prompt)}</strong>{text(said)}</pre>'
    return [Section("Samples", items)] if items else []


def memory(run: Run, chart: Chart | None) -> Section:
    """Bytes on rank 0 by category, against the plan; and what stage 0 would hold."""
    held, planned = run.held(), run.plan()
    if not held and not planned:
        return Section("Memory", "<p>Nothing measured yet.</p>")
    rows, marks = [["between steps"]], ["group"]
    for key in (*LASTING, *FULLEST):
        if key == FULLEST[0]:
            rows.append(["at the fullest instant of a step"])
            marks.append("group")
        if key in held or key in planned:
            rows.append(
                [
                    dot(key) + NAMES.get(key, key),
                    nbytes(held.get(key)),
                    nbytes(planned.get(key)),
                    _off(key, held, planned),
                ]
            )
            marks.append("")
        if key == STATES[-1]:
            whole, wanted = states_of(held), states_of(planned)
            rows.append(["states", nbytes(whole), nbytes(wanted), off(whole, wanted) if held and planned else ""])
            marks.append("total")
    if away := [key for key in ELSEWHERE if held.get(key)]:
        rows += [["not on the device"], *([key, nbytes(held[key]), "", ""] for key in away)]
        marks += ["group", *([""] * len(away))]
    body = f"<p>{_saving(run, held)}</p>" if held else ""
    body += figures(
        figure("Held by rank 0 between steps", chart), table(("", "measured", "planned", "off"), rows, marks=marks)
    )
    return Section("Memory", body)


def _off(key: str, held: dict[str, float], planned: dict[str, float]) -> str:
    if key not in held or key not in planned:
        return ""
    return off(held[key], planned[key])


def _saving(run: Run, held: dict[str, float]) -> str:
    alone, now = sum(formula_memory(run, stage=0).values()), states_of(held)
    if not alone or run.fact("stage") == 0 or run.number("ranks") == 1:
        return f"Each rank holds {nbytes(now)} of training state."
    return (
        f"Each rank holds {nbytes(now)} of training state, where without sharding it would hold {nbytes(alone)}: "
        f"{1 - now / alone:.0%} less."
    )


def traffic(run: Run, chart: Chart | None) -> Section:
    """Bytes that rank 0 sent in a step by purpose, against theory."""
    sent, planned = run.sent(), run.sizes("plan", "traffic")
    if not sent and not planned:
        return Section("Traffic", "<p>Nothing measured yet.</p>")
    keys = list(dict.fromkeys([*planned, *sent]))
    rows = [[text(key), nbytes(sent.get(key)), nbytes(planned.get(key)), _off(key, sent, planned)] for key in keys]
    whole, wanted = sum(sent.values()), sum(planned.values())
    rows.append(["total", nbytes(whole), nbytes(wanted), off(whole, wanted) if sent and planned else ""])
    once, theory = once_bytes(run), formula_moves(run)
    marks = [""] * len(keys) + ["total"]
    if once and sent:
        rows.append(["in Ψ(N-1)/N", digits(whole / once), theory, ""])
        marks.append("formula")
    said = (
        "<p>Ψ(N-1)/N is what one rank sends when all parameters move once. A step of stages 0 to 2 moves them twice, "
        "of stage 3 three times, less what is still unsharded when forward ends.</p>"
    )
    shown = figure("Sent by rank 0 in a step", chart)
    return Section("Traffic", said + figures(shown, table(("", "measured", "theory", "off"), rows, marks=marks)))


def placement(run: Run) -> Section:
    rows: list[dict[str, Any]] = [row for row in run.placed() if isinstance(row, dict)]
    if not rows:
        return Section("Placement", "<p>Not recorded.</p>")
    heads = ("unit", "optimizer", "gradients", "parameters", "elements", "bytes here")
    cells = [
        [text(row.get("unit", ""))]
        + [text(row.get(state, "")) for state in ("optimizer", "gradients", "parameters")]
        + [
            f"{size:,.0f}" if (size := number(row.get(key))) is not None else ""
            for key in ("elements", "parameter_bytes")
        ]
        for row in rows
    ]
    why = f"<p>{text(run.fact('stage_why'))}</p>" if run.fact("stage_why") else ""
    said = "<p>Which states of each unit are replicated on every rank, and which are sharded: each rank holds 1/N.</p>"
    shown = folded(f"{len(rows)} units", table(heads, cells, words=4), is_open=len(rows) <= MANY)
    return Section("Placement", why + said + shown)


def warnings(run: Run) -> Section:
    if not run.warnings:
        return Section("Warnings", "<p>None.</p>")
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in run.warnings:
        seen.setdefault((str(row.get("kind", "warning")), str(row.get("message", ""))), []).append(row)
    items = ""
    for (kind, message), rows in seen.items():
        steps = sorted({row["step"] for row in rows if isinstance(row.get("step"), int)})
        ranks = sorted({row["rank"] for row in rows if isinstance(row.get("rank"), int)})
        when = f"step {steps[0]:,}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}" if steps else ""
        who = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks)) if ranks else ""
        where = text(" · ".join(filter(None, [kind, when, who])))
        items += f'<li>{text(message)}<br><span class="note">{where}</span></li>'
    return Section("Warnings", f'<ul class="warnings">{items}</ul>')


def environment(run: Run) -> Section:
    """Where it ran, on what data, and which model it was."""
    shape = run.fact("model", default={})
    sizes = [f"{shape[key]:,} {word}" for key, word in SHAPE.items() if isinstance(shape.get(key), int)]
    data = run.fact("data", default={})
    tokens = [count(number(data.get(key))) for key in ("train_tokens", "val_tokens")]
    batch = (run.number("global_batch"), run.number("micro_batch"), run.number("accumulation"), run.number("ranks"))
    rows: dict[str, Any] = {
        "model": f"{run.name}: {', '.join(sizes)}" if sizes else run.name,
        "data": data.get("source"),
        "left out": data.get("left_out") or None,
        "tokens": f"{tokens[0]} to train, {tokens[1]} to validate, tokenizer {data.get('tokenizer', NOTHING)}",
        "batch": "{} sequences: {} in a micro-batch × {} accumulated × {} ranks".format(*map(count, batch)),
        "device": run.fact("device"),
    }
    rows |= {str(key): value for key, value in run.fact("environment", default={}).items() if value is not None}
    return Section("Environment", facts(rows))


SHAPE = {
    "parameters": "parameters", "layers": "layers", "hidden": "wide", "heads": "heads", "seq": "tokens of context",
    "vocab": "tokens known",
}  # fmt: skip


def settings(run: Run) -> Section:
    if not run.config:
        return Section("Settings", "<p>config.toml is not there.</p>")
    again = f"<p>Run it again: {command('train', '--config', run.folder / 'config.toml', '--out', 'NEW')}</p>"
    return Section("Settings", again + f"<pre>{text(run.config.strip())}</pre>")
