"""The results part of the page, as markup: the answer, each chart with its table, the cost, and what to copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onefold.cost.text import format_bytes, format_seconds
from onefold.errors import visible
from onefold.planner.page.charts import OVER_TIME, against_ranks, bars, colour, over_time
from onefold.planner.page.svg import HALF, both, short
from onefold.planner.page.svg import text as escaped
from onefold.planner.page.timeline import Moment, Timeline
from onefold.planner.page.view import PARTS, TOKENS_PER_PARAMETER, Bar, View
from onefold.planner.summary import other_activations

STATED = "Seconds are a model of the hardware table, not a measurement."


def text(value: object) -> str:
    """As text of the page: no markup, nothing that turns text around."""
    return escaped(visible(value, also="\n"))


def results(view: View, *, live: bool) -> str:
    """All sections. A page that is served (`live`) has buttons to copy with."""
    parts = [_answer(view), _memory(view), _over_time(view), _ranks(view), _cost(view), _copy(view, live=live)]
    return "\n".join(part for part in parts if part)


def _section(title: str, lead: str, body: str) -> str:
    anchor = title.lower().replace(" ", "-")
    head = f'<h2 id="{anchor}">{text(title)}</h2>\n<p>{text(lead)}</p>'
    return f'<section aria-labelledby="{anchor}">{head}\n{body}</section>'


def _answer(view: View) -> str:
    plan, row = view.plan, view.plan.chosen
    choice, why, expect = view.sentences
    cards = [("peak memory", format_bytes(row.peak_bytes), f"of {format_bytes(plan.hardware.memory_bytes)}")]
    if row.tokens_per_s and plan.recommendation.fits:
        cards.append(("throughput", short(row.tokens_per_s), "tokens/s"))
        micro = f" × {view.micro_batches}" if view.micro_batches > 1 else ""
        cards.append(("a step", format_seconds(row.step_s), f"batch {row.batch}{micro}"))
        cards.append(("MFU", f"{row.mfu:.0%}", "of the peak flop rate"))
    body = "".join(
        f'<div><dt>{text(name)}</dt><dd class="value">{text(value)}</dd><dd class="more">{text(more)}</dd></div>'
        for name, value, more in cards
    )
    seq = f"sequences of {plan.seq:,} tokens, " if plan.seq else ""
    size = f"{plan.parameters:,} parameters, {seq}{plan.precision}, {plan.grid}"
    kind = "answer" if plan.recommendation.fits else "answer unfit"
    found = "".join(f"<li>{text(sentence)}</li>" for sentence in view.changes)
    elsewhere = [("host memory", row.host_bytes), ("disk", row.disk_bytes)]
    also = [f"each rank also takes {format_bytes(nbytes)} of {where}" for where, nbytes in elsewhere if nbytes]
    notes = "".join(f'<p class="note">{text(note[:1].upper() + note[1:])}.</p>' for note in [*plan.notes, *also])
    return (
        f'<section aria-labelledby="answer"><p class="kicker">{text(size)}</p><h1 id="answer">{text(view.title)}</h1>\n'
        f'<div class="{kind}"><p class="choice">{text(choice)}</p><p>{text(why)}</p><p>{text(expect)}</p></div>\n'
        f'<dl class="cards n{len(cards)}">{body}</dl>\n{notes}'
        + (f"<details><summary>What would change the answer</summary><ul>{found}</ul></details>" if found else "")
        + "</section>"
    )


def _figure(drawn: str, legend: str, summary: str, table: str) -> str:
    return f"<figure>{drawn}{legend}</figure>\n<details><summary>{text(summary)}</summary>{table}</details>"


def _legend(kinds: Iterable[tuple[str, str]]) -> str:
    items = "".join(f'<li><span class="key {kind}"></span>{text(name)}</li>' for name, kind in kinds)
    return f'<ul class="legend">{items}</ul>'


def _table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{text(head)}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{text(first)}</th>' + "".join(f"<td>{text(cell)}</td>" for cell in rest) + "</tr>\n"
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table><caption>{text(caption)}'
        f"</caption><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _memory(view: View) -> str:
    memory, rows = view.plan.hardware.memory_bytes, sorted(view.bars, key=lambda bar: bar.label)
    used = [(name, kind) for name, _, kind in PARTS if any(bar.parts[name] for bar in rows)]
    known = view.plan.chosen.activations != "unknown"
    heads = ["choice", "batch", *(name for name, _ in used), "peak", "fits", *["tokens/s"] * known]
    table = _table("What fills a device, by stage", heads, (_bar_cells(bar, used, known=known) for bar in rows))
    lead = "Each stage at the largest batch that fits it, or at the batch that is given, when most is in memory."
    if others := other_activations(view.plan):
        lead = f"{lead} {others}"
    drawn = both(lambda width: bars(rows, memory, width))
    return _section("Memory by stage", lead, _figure(drawn, _legend(used), "The figures as a table", table))


def _bar_cells(bar: Bar, used: Sequence[tuple[str, str]], *, known: bool) -> list[str]:
    speed = [f"{bar.tokens_per_s:,.0f}" if bar.fits else "–"] if known else []
    sizes = [format_bytes(bar.parts[name]) if bar.parts[name] else "–" for name, _ in used]
    label = f"→ {bar.label}" if bar.chosen else bar.label
    return [label, str(bar.batch), *sizes, format_bytes(bar.peak_bytes), "yes" if bar.fits else "no", *speed]


def _over_time(view: View) -> str:
    found = view.timeline
    if found is None:
        return ""
    what = "a step" if view.micro_batches == 1 else "the last micro-batch of a step"
    choice = f"{view.plan.recommendation.label}, batch {view.plan.chosen.batch}"
    lead = f"What fills a device during {what} at {choice}. Blocks of a pass take equal times. {STATED}"
    drawn = both(lambda width: over_time(found, view.plan.hardware.memory_bytes, width))
    used = [(name, field) for field, name in OVER_TIME if any(getattr(m, field) for m in found.moments)]
    heads = ["instant", "time", *(name for name, _ in used), "in all"]
    rows = ([where, format_seconds(m.start_s) if m.start_s else "0", *_cells(m, used)] for where, m in _instants(found))
    table = _table("Memory over a step", heads, rows)
    legend = _legend([*used, (f"{format_bytes(view.plan.hardware.memory_bytes)} of a device", "dashed")])
    return _section("Memory over a step", lead, _figure(drawn, legend, "The figures as a table", table))


def _cells(moment: Moment, used: Sequence[tuple[str, str]]) -> list[str]:
    sizes = [getattr(moment, field) for _, field in used]
    return [format_bytes(size) if size else "–" for size in (*sizes, moment.total)]


def _instants(found: Timeline) -> Iterable[tuple[str, Moment]]:
    backward = [m for m in found.moments if m.where.startswith("backward")]
    forward = [m for m in found.moments if m.where.startswith("forward")]
    yield from (("start of forward", forward[0]), ("end of forward", forward[-1]))
    yield f"fullest: {found.fullest.where}", found.fullest
    yield from (("end of backward", backward[-1]), ("update", found.moments[-1]))


def _ranks(view: View) -> str:
    curves = [curve for curve in view.curves if curve.points]
    if not curves:
        return ""
    ranks = view.plan.ranks
    all_of_them = both(lambda width: against_ranks(curves, ranks, width), HALF)
    each_of_them = both(lambda width: against_ranks(curves, ranks, width, each=True), HALF)
    drawn = f"<div><h3>Of all GPUs</h3>{all_of_them}</div><div><h3>Of each GPU</h3>{each_of_them}</div>"
    kinds = [*((curve.label, colour(curve)) for curve in curves), (f"{ranks:,} GPUs", "dashed")]
    rows = [
        [f"{curve.label}, {p.ranks:,} GPUs", str(p.batch), f"{p.tokens_per_s:,.0f}", f"{p.tokens_per_s / p.ranks:,.0f}",
         f"{p.gpu_hours:,.0f}", f"{p.days:,.1f}"]
        for curve in curves
        for p in curve.points
    ]  # fmt: skip
    heads = ["", "batch", "tokens/s", "tokens/s per GPU", f"GPU-hours for {short(view.tokens)} tokens", "days"]
    table = _table("Throughput against the number of GPUs", heads, rows)
    policy = view.plan.chosen.activations
    lead = "At the largest batch that fits, or the one given" + f", with activations {policy}" * (policy != "unknown")
    lead += f"; where a curve has no dot, nothing fits. {STATED}"
    figure = _figure(
        f'<div class="pair">{drawn}</div>', _legend(kinds), "The figures as a table, with GPU-hours", table
    )
    return _section("Tokens per second against GPUs", lead, figure)


def _cost(view: View) -> str:
    if view.gpu_hours is None:
        return ""
    days = view.gpu_hours / view.plan.ranks / 24
    count = f"{short(view.tokens)} tokens"
    count += "" if view.tokens_given else f", {TOKENS_PER_PARAMETER} for each parameter"
    cards = [("GPU-hours", f"{view.gpu_hours:,.0f}" if view.gpu_hours >= 10 else f"{view.gpu_hours:.2g}"),
             ("on the clock", format_seconds(days * 86400)), ("GPUs", f"{view.plan.ranks:,}")]  # fmt: skip
    body = "".join(f'<div><dt>{text(n)}</dt><dd class="value">{text(v)}</dd></div>' for n, v in cards)
    lead = f"For {count}, without evaluation, saving and restarts."
    return _section("Cost", lead, f'<dl class="cards n3">{body}</dl>')


def _copy(view: View, *, live: bool) -> str:
    button = '<button type="button" class="copy">Copy</button>' if live else ""
    parts = [("The command that asks this", view.command), ("In your training script", view.python)]
    body = "".join(
        f'<div class="code"><h3>{text(title)}</h3>{button}<pre tabindex="0"><code>{text(code)}</code></pre></div>\n'
        for title, code in parts
        if code
    )
    return _section("To copy", "The same settings for a terminal and for a script.", body)
