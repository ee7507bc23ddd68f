"""The answer of a plan on one screen: what to choose, the stages beside each other, what fills a device, what would
change the answer."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.text import Text

from onefold.cli.tables import console, format_numel, print_table
from onefold.cost.text import format_bytes
from onefold.planner.answer import Plan
from onefold.planner.summary import changes, other_activations, summary

PARTS = (  # name, whose first letter is in the bar; field of a Row; colour
    ("Parameters", "params_bytes", "blue"), ("Optimizer state", "optimizer_bytes", "green"),
    ("Gradients", "peak_grads_bytes", "yellow"), ("Unsharded parameters", "gathered_bytes", "magenta"),
    ("Buffers", "buffers_bytes", "cyan"), ("Activations", "activations_bytes", "red"),
    ("Margin", "margin_bytes", "white"),
)  # fmt: skip
SEEN = 2000  # a category below 1 / 2000 of the peak is not named


def show_answer(plan: Plan) -> None:
    """Prints the answer, no wider than the terminal."""
    screen = console()
    size = format_numel(plan.parameters) or f"{plan.parameters:,}"
    seq = f"sequences of {plan.seq:,} tokens, " if plan.seq else ""
    _print(screen, f"[bold]{escape(plan.model)}[/]: {size} parameters, {seq}{plan.precision}, on {plan.ranks} × "
                   f"{escape(plan.hardware.name)} ({plan.grid})")  # fmt: skip
    screen.print()
    choice, *rest = map(escape, summary(plan))
    for sentence in (f"[bold]{choice}[/]", *rest):
        _print(screen, sentence)
    screen.print()
    print_table(screen, "", *_stages(plan))
    if others := other_activations(plan):
        _print(screen, others)
    _bar(screen, plan)
    if found := changes(plan):
        screen.print("\n[bold]What would change the answer[/]")
        for sentence in found:
            _print(screen, f"- {escape(sentence)}", hang=2)
    for note in plan.notes:
        _print(screen, f"note: {escape(note)}", hang=6)
    screen.print()
    _print(screen, "[dim]--all prints every choice with its traffic and time; --json gives it to programs.[/]")


def _print(screen: Console, markup: str, hang: int = 0) -> None:
    """A paragraph, folded at the width of the screen; lines after the first start further right."""
    lines = Text.from_markup(markup).wrap(screen, max(20, screen.width - hang))
    for number, line in enumerate(lines):
        line.rstrip()
        screen.print(Padding(line, (0, 0, 0, hang if number else 0), expand=False), soft_wrap=True)


def _stages(plan: Plan) -> tuple[list[str], list[list[Any]]]:
    """Stages 0 to 3 and what was chosen, each at the batch that is best for it."""
    known = plan.chosen.activations != "unknown"
    ranked = {one.label: one for one in reversed(plan.recommendations) if one.tp == plan.recommendation.tp}
    rows = [row for row in plan.stages if row.label != plan.chosen.label] + [plan.chosen]
    body: list[list[Any]] = []
    for row in sorted(rows, key=lambda row: (row.stage, row.label)):
        best = ranked.get(row.label)  # not considered: one rank has but one stage
        peak, fits, batch = (best.peak_bytes, best.fits, best.batch) if best else (row.peak_bytes, row.fits, row.batch)
        speed = best.tokens_per_s if best else row.tokens_per_s
        cells = [f"{'→ ' if row is plan.chosen else '  '}{row.label.removeprefix('stage ')}"]
        cells += [str(batch)] if known else []
        cells += [format_bytes(row.states_bytes), format_bytes(peak), "[green]yes[/]" if fits else "[red]no[/]"]
        cells += [f"{speed:,.0f}" if fits else ""] if known else []
        body.append(cells)
    heads = ["  stage", *["batch"] * known, "states", "peak", "fits", *["tokens/s"] * known]
    return heads, body


def _bar(screen: Console, plan: Plan) -> None:
    """What fills a device at the fullest instant, as a bar with a letter for each part."""
    row, memory = plan.chosen, plan.hardware.memory_bytes
    parts = [(name, nbytes, colour) for name, field, colour in PARTS
             if (nbytes := getattr(row, field)) * SEEN > row.peak_bytes]  # fmt: skip
    whole, width = max(memory, row.peak_bytes), screen.width - 2
    bar, filled, total = Text("["), 0, 0
    for name, nbytes, colour in parts:
        total += nbytes
        until = round(width * total / whole)
        bar.append(name[0] * (until - filled), style=colour)
        filled = max(filled, until)
    bar.append("." * (width - filled) + "]")
    over = "" if row.peak_bytes <= memory else f", {format_bytes(row.peak_bytes - memory)} too much"
    _print(screen, f"Each device at its fullest instant ({escape(row.peak_at)}): {format_bytes(row.peak_bytes)} of "
                   f"{format_bytes(memory)}{over}")  # fmt: skip
    screen.print(bar, soft_wrap=True)
    _print(screen, " · ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes, _ in parts))
