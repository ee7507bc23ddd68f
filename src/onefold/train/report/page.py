"""One HTML page that needs nothing else: no script, no other file, no address. Readable by day, by night, on paper.

Every piece of text that comes from a run passes through `text`, so that no name can become markup.
"""

from __future__ import annotations

import html
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from onefold.errors import visible
from onefold.train.report.charts import COLOURS, Chart

NIGHT = {
    "ink": "#e6eaef", "soft": "#9aa6b2", "line": "#323a44",
    "parameters": "#7aa7d9", "gradients": "#eda75c", "optimizer": "#86c596", "buffers": "#a9adb3",
    "communication": "#b79ad6", "activations": "#e58e93", "peak": "#9aa6b3",
    "train": "#7aa7da", "val": "#e58e94", "base": "#8b96a2", "bar": "#7aa7d8",
    "run0": "#6b7682", "run1": "#7aa7d7", "run2": "#86c597", "run3": "#e58e95", "run4": "#b79ad7", "run5": "#eda75d",
}  # fmt: skip
DAY_PAPER = {"paper": "#ffffff", "card": "#f6f8fa", "good": "#2f7d4f", "bad": "#b4343c"}
NIGHT_PAPER = {"paper": "#14181d", "card": "#1c2229", "good": "#7ccf9a", "bad": "#f08a90"}

# Should a name ever become markup: a browser runs no script in this page, loads nothing and sends nothing.
POLICY = (
    '<meta http-equiv="Content-Security-Policy" '
    "content=\"default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'\">"
)
STYLE = """
:root { color-scheme: light dark; %(day)s }
@media screen and (prefers-color-scheme: dark) { :root { %(night)s } }
* { box-sizing: border-box }
html { -webkit-text-size-adjust: 100%% }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif }
main { max-width: 66rem; margin: 0 auto; padding: 2.5rem 1.5rem 4rem }
h1, h2, h3 { line-height: 1.2; margin: 0; text-wrap: balance }
h1 { font-size: 2.1rem; letter-spacing: -.02em }
h2 { font-size: 1.3rem; letter-spacing: -.01em; margin: 3.2rem 0 .4rem; padding-top: 1.3rem;
  border-top: 1px solid var(--line) }
h3 { font-size: .95rem; font-weight: 600 }
p { margin: .3rem 0 .9rem; max-width: 44rem }
a { color: var(--parameters) }
.kicker { color: var(--soft); font-size: .85rem; letter-spacing: .02em; margin: 0 0 .4rem }
.lead { font-size: 1.1rem; margin: .7rem 0 1.5rem }
.soft, .note { color: var(--soft) } .note { font-size: .875rem }
.good { color: var(--good) } .bad { color: var(--bad) }
nav { display: flex; flex-wrap: wrap; gap: .15rem 1.1rem; font-size: .9rem; margin-top: 1.4rem }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: .75rem; margin: 0 }
.cards.three { grid-template-columns: repeat(3, 1fr) }
.cards > div { background: var(--card); border-radius: .6rem; padding: .8rem 1rem .75rem }
.cards dt { color: var(--soft); font-size: .85rem }
.cards dd { margin: 0 }
.cards .value { font-size: 1.6rem; font-weight: 650; letter-spacing: -.02em; line-height: 1.3;
  font-variant-numeric: tabular-nums }
.cards .more { color: var(--soft); font-size: .85rem; line-height: 1.35 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%%, 24rem), 1fr)); gap: 1.4rem 2rem;
  margin: 1rem 0 }
.charts.three { grid-template-columns: repeat(auto-fit, minmax(min(100%%, 18rem), 1fr)) }
figure { margin: 0; min-width: 0 } figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .3rem }
svg { display: block; width: 100%%; height: auto; max-width: 36rem; overflow: visible }
.wide > svg:first-of-type { display: none } .wide > svg:last-of-type { max-width: none }
.scroll { overflow-x: auto; margin: .8rem 0 1rem }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; width: 100%% }
th, td { padding: .38rem 1.1rem .38rem 0; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap }
th { color: var(--soft); font-weight: 500 } th:first-child, td:first-child { text-align: left }
td.text, th.text { text-align: left } tr.total td { font-weight: 650 }
tr.formula td { color: var(--soft) } td i { font-style: normal; font-size: .92em }
tr.formula td:first-child { padding-left: 1.1rem } tr.group td { font-weight: 650; padding-top: 1.1rem }
.dot { display: inline-block; width: .65em; height: .65em; border-radius: .2em; margin-right: .5em }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.4rem; margin: .8rem 0;
  font-size: .93rem }
dl.facts dt { color: var(--soft) } dl.facts dd { margin: 0; overflow-wrap: anywhere }
pre { background: var(--card); border-radius: .6rem; padding: 1rem 1.1rem; font-size: .82rem; line-height: 1.5;
  overflow-x: auto; margin: .8rem 0 }
pre.sample { white-space: pre-wrap; overflow-wrap: anywhere }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace }
code { font-size: .92em; overflow-wrap: anywhere }
details { margin: .8rem 0 } summary { cursor: pointer; font-weight: 600; font-size: .95rem }
ul.warnings { list-style: none; padding: 0; margin: .8rem 0 }
ul.warnings li { border-left: 3px solid var(--gradients); padding: .1rem 0 .1rem .9rem; margin: 0 0 .9rem;
  overflow-wrap: anywhere }
footer { margin-top: 3.2rem; padding-top: 1.2rem; border-top: 1px solid var(--line); font-size: .9rem;
  color: var(--soft) }
@media (max-width: 46rem) {
  body { font-size: 15.5px } main { padding: 1.6rem 1rem 3rem } h1 { font-size: 1.65rem }
  .cards, .cards.three { grid-template-columns: repeat(2, 1fr); gap: .55rem }
  .cards > div { padding: .6rem .8rem } .cards .value { font-size: 1.35rem }
  .wide > svg:first-of-type { display: block } .wide > svg:last-of-type { display: none }
  dl.facts { gap: .3rem .9rem } th, td { padding-right: .8rem }
  th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper) }
}
@media print {
  main { padding: 0; max-width: none } nav { display: none } h2 { break-after: avoid }
  figure, .cards > div, tr, li { break-inside: avoid } .scroll, pre { overflow: visible } pre { white-space: pre-wrap }
}
"""


class Card(NamedTuple):
    """One headline figure."""

    name: str
    value: str
    more: str = ""


class Section(NamedTuple):
    title: str
    body: str

    @property
    def anchor(self) -> str:
        return self.title.lower().replace(" ", "-")


def page(*, title: str, kicker: str, lead: str, cards: Sequence[Card], sections: Sequence[Section], end: str) -> str:
    """`lead` and `end` are markup; the rest is text."""
    links = "".join(f'<a href="#{part.anchor}">{text(part.title)}</a>' for part in sections)
    parts = "".join(
        f'<section id="{part.anchor}"><h2>{text(part.title)}</h2>\n{part.body}</section>\n' for part in sections
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{POLICY}'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{text(title)}</title>\n<style>{_style()}</style></head>\n'
        f'<body><main>\n<header><p class="kicker">{text(kicker)}</p><h1>{text(title)}</h1>\n'
        f'<p class="lead">{lead}</p>\n'
        f"{cards_of(cards)}\n<nav>{links}</nav></header>\n{parts}<footer>{end}</footer>\n</main></body></html>\n"
    )


def _style() -> str:
    def values(table: dict[str, str]) -> str:
        return " ".join(f"--{name}: {colour};" for name, colour in table.items())

    return STYLE % {"day": values(COLOURS | DAY_PAPER), "night": values(NIGHT | NIGHT_PAPER)}


def text(value: Any) -> str:
    """As text of a page or of an attribute in quotes: no markup, nothing that turns text around, no broken bytes."""
    return html.escape(visible(value, also="\n\t\u00a0"))


def command(*words: object) -> str:
    """A command of ours to copy into a shell, in which no name can become a second command."""
    return f"<code>{text(shlex.join(['onefold', *(visible(word) for word in words)]))}</code>"


def link(to: str, name: str) -> str:
    """To a file below the page. Colons are quoted, too, so that no name can be an address or a script."""
    return f'<a href="{text(quote(to, errors="surrogateescape"))}">{text(name)}</a>'


def cards_of(cards: Sequence[Card]) -> str:
    body = "".join(
        f'<div><dt>{text(card.name)}</dt><dd class="value">{text(card.value)}</dd>'
        f'<dd class="more">{text(card.more)}</dd></div>'
        for card in cards
    )
    return f'<dl class="cards{" three" if len(cards) % 4 else ""}">{body}</dl>'


def figure(title: str, chart: Chart | None) -> str:
    return "" if chart is None else f"<figure><figcaption>{text(title)}</figcaption>{chart.svg}</figure>"


def wide_figure(narrow: Chart, wide: Chart) -> str:
    """One of the two is shown, by the width of the page."""
    return f'<figure class="wide">{narrow.svg}{wide.svg}</figure>'


def figures(*parts: str) -> str:
    shown = [part for part in parts if part]
    return f'<div class="charts{" three" if len(shown) >= 3 else ""}">{"".join(shown)}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, marks: Sequence[str] = (), words: int = 1) -> str:
    """Cells are markup. `marks` are classes of rows, where "group" has one cell, its title. The first `words` columns
    hold words, the rest numbers."""
    kinds = ['class="text"' if place < words else "" for place in range(len(heads))]
    top = "".join(f'<th scope="col" {kind}>{text(head)}</th>' for kind, head in zip(kinds, heads, strict=True))
    body = ""
    for place, row in enumerate(rows):
        mark = marks[place] if place < len(marks) else ""
        if mark == "group":
            cells = f'<td colspan="{len(heads)}">{row[0]}</td>'
        else:
            cells = "".join(f"<td {kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True))
        body += f'<tr class="{mark}">{cells}</tr>\n'
    label = text(f"table: {heads[0] or heads[1]}")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table><thead><tr>{top}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )


def facts(rows: dict[str, Any]) -> str:
    body = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in rows.items() if value is not None)
    return f'<dl class="facts">{body}</dl>'


def dot(colour: str) -> str:
    return f'<span class="dot" style="background: var(--{colour})"></span>' if colour in COLOURS else ""


def folded(summary: str, body: str, *, is_open: bool) -> str:
    return f"<details{' open' if is_open else ''}><summary>{text(summary)}</summary>{body}</details>"
