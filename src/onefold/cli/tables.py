"""Plans and comparisons as tables in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from onefold.cost.text import format_bytes
from onefold.planner.answer import Plan
from onefold.planner.rows import Row

Cells: TypeAlias = "tuple[str, Sequence[str], list[list[Any]]]"  # title, heads, rows
WIDE = 210  # columns of --all where the output is no terminal


def console(*, wide: bool = False) -> Console:
    """A console as wide as the terminal; where the output is none, as COLUMNS says, 80 columns or WIDE."""
    found = Console(highlight=False)
    return Console(highlight=False, width=WIDE) if wide and not found.is_terminal else found


def print_table(screen: Console, title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table, as several with the same first column where the screen is narrower; no figure is cut."""
    widths = [max(Text.from_markup(str(cell)).cell_len for cell in column) for column in zip(heads, *rows, strict=True)]
    first, *others = range(len(heads))
    parts: list[list[int]] = [[first]]
    for column in others:
        if len(parts[-1]) > 1 and sum(widths[i] + 3 for i in (*parts[-1], column)) + 1 > screen.width:
            parts.append([first])
        parts[-1].append(column)
    for number, columns in enumerate(parts):
        cells = [[row[i] for i in columns] for row in rows]
        screen.print(table(title if number == 0 else "", [heads[i] for i in columns], cells))


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    made = Table(title=title or None, title_justify="left", title_style="bold", header_style="bold")
    for number, head in enumerate(heads):
        made.add_column(head, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*[str(cell) for cell in row])
    return made


def seconds(value: float) -> str:
    if not value:
        return ""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def format_numel(numel: int) -> str:
    """A number of parameters with three digits; nothing for none.

    >>> [format_numel(n) for n in (842_496, 124_439_808, 8_030_261_248, 1_007_000_000_000, 0)]
    ['842k', '124M', '8.03B', '1.01T', '']
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if numel >= size:
            return f"{numel / size:.3g}{letter}"
    return str(numel or "")


def bytes_or_blank(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else ""


def show_all(plan: Plan) -> None:
    """Prints every choice of a plan with its bytes, traffic and time."""
    screen = console(wide=True)
    screen.print(
        f"[bold]{escape(plan.model)}[/]: {plan.parameters:,} parameters, {plan.precision}, on {plan.ranks} × "
        f"{plan.hardware.name} ({plan.grid}), {format_bytes(plan.hardware.memory_bytes)} each"
    )
    if plan.sums:
        screen.print(f"gradients: {plan.sums}", soft_wrap=True)
    rows = [*plan.stages, *plan.variants]
    print_table(screen, *_memory(rows))
    print_table(screen, *_traffic(rows))
    if any(row.compute_s for row in rows):
        print_table(screen, *_time(rows))
    screen.print("[bold]what to choose[/]")
    for number, choice in enumerate(plan.recommendations[:6], 1):
        known = rows[0].activations != "unknown"
        what = f"{choice.label}, batch {choice.batch}, {choice.activations}" if known else choice.label
        mark = "[green]fits[/]" if choice.fits else "[red]does not fit[/]"
        tp = f", tp {choice.tp}" if choice.tp > 1 else ""
        screen.print(f"  {number}. [bold]{what}{tp}[/] ({mark}, {format_bytes(choice.peak_bytes)}): {choice.reason}")
    if plan.hybrid is not None:
        screen.print(f"[bold]over[/] {escape(plan.proposed_mesh)}", soft_wrap=True)
    for note in plan.notes:
        screen.print(f"note: {note}")


def _memory(rows: Sequence[Row]) -> Cells:
    heads = ("on each rank", "params", "grads", "optimizer", "states", "grads then", "buffers",
             "gathered", "activ.", "margin", "peak", "host", "pinned", "disk", "fits", "max batch", "max seq",
             "min ranks", "max model")  # fmt: skip
    body = []
    for row in rows:
        cells = (row.params_bytes, row.grads_bytes, row.optimizer_bytes, row.states_bytes, row.peak_grads_bytes,
                 row.buffers_bytes, row.gathered_bytes, row.activations_bytes, row.margin_bytes,
                 row.peak_bytes)  # fmt: skip
        offloaded = [bytes_or_blank(nbytes) for nbytes in (row.host_bytes, row.pinned_bytes, row.disk_bytes)]
        most, longest = _found(row.largest_batch), _found(row.longest_sequence)
        fits = "[green]yes[/]" if row.fits else "[red]no[/]"
        body.append(
            [
                row.label,
                *map(bytes_or_blank, cells),
                *offloaded,
                fits,
                most,
                longest,
                row.fewest_ranks or "none",
                format_numel(row.largest_model),
            ]
        )
    batch = f", batch {rows[0].batch}, activations: {rows[0].activations}" if rows[0].activations != "unknown" else ""
    return f"memory{batch}", heads, body


def _found(number: int | None) -> str:
    """What a search found: nothing if it was not made."""
    return "" if number is None else f"{number:,}" if number else "none"


def _traffic(rows: Sequence[Row]) -> Cells:
    purposes = list(dict.fromkeys(m.purpose for row in rows for m in row.messages if m.elements))
    body = []
    for row in rows:
        sent = {m.purpose: m for m in row.messages}
        cells = [format_bytes(sent[p].bytes) if p in sent and sent[p].bytes else "" for p in purposes]
        body.append([row.label, f"{row.traffic_elements:,}", format_bytes(row.traffic_bytes), *cells])
    return "sent by one rank in a step", ("", "elements", "bytes", *purposes), body


def _time(rows: Sequence[Row]) -> Cells:
    heads = ("a step", "seconds", "compute", "waits for links", "tp, sequence", "update", "on the host",
             "transfers", "bubble", "prefetch", "break-even", "tokens/s", "days")  # fmt: skip
    body = []
    for row in rows:
        ahead = f"{row.look_ahead}{' (link bound)' if row.bandwidth_bound else ''}" if row.look_ahead else ""
        parts = (
            row.compute_s,
            row.exposed_s,
            row.tensor_s,
            row.update_s,
            row.host_update_s,
            row.transfer_s,
            row.bubble_s,
        )
        rest = [
            ahead,
            row.break_even_batch or "",
            f"{row.tokens_per_s:,.0f}",
            "" if row.days is None else f"{row.days:,.1f}",
        ]
        body.append([row.label, seconds(row.step_s), *map(seconds, parts), *rest])
    return "time", heads, body
