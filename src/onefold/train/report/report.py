"""A run, or several of one model, as one page that explains itself, with its charts as PNG files beside it.

1 read the folder  2 draw  3 put the page together  4 write all of it, each file whole or not at all
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onefold.errors import OnefoldError, visible
from onefold.train.report import charts, sections
from onefold.train.report.charts import WIDE, Chart
from onefold.train.report.comparison import compared
from onefold.train.report.figures import LASTING, LONGEST, Run, headline, read_run
from onefold.train.report.page import command, page, text
from onefold.train.run.folder import RunFolder
from onefold.train.run.records import has_facts, run_folders


def write_report(run: Path, out: Path | None = None) -> Path:
    """The page of one run: report.html in its folder, or in `out`. Raises OnefoldError, in one line, if the folder
    cannot be read."""
    found = read_run(run)
    drawn, html = reported(found)
    return _write(out or run, drawn, html)


def write_comparison(run: Path, out: Path | None = None) -> Path:
    """The page of the runs in the folders of `run`, side by side, and one page for each of them: report.html in these
    folders, or in `out` and folders of the same names in it."""
    folders = run_folders(run)
    if not folders:
        raise OnefoldError(f"{run} holds no runs to compare; give the --out of onefold train --compare 0,1,2,3")
    for folder in folders:
        write_report(folder, out and out / folder.name)
    drawn, html = compared(run, [read_run(folder) for folder in folders])
    return _write(out or run, drawn, html)


def write_runs(folders: Sequence[Path], out: Path) -> Path:
    """The page of any runs side by side, in `out`, and one page for each of them in a folder of its own there."""
    runs = [read_run(folder) for folder in folders]
    names = distinct(folders)
    for folder, name in zip(folders, names, strict=True):
        write_report(folder, out / name)
    labels = [run.label for run in runs]
    if len(set(labels)) < len(runs):
        runs = [run._replace(named=visible(name)[:LONGEST]) for run, name in zip(runs, names, strict=True)]
    drawn, html = compared(out, runs, at=names)
    return _write(out, drawn, html)


def distinct(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: its own, with as many of the folders above it as tell all of them apart.

    >>> distinct([Path("a/run"), Path("b/run")])
    ['a-run', 'b-run']
    """
    whole = [folder.resolve().parts[1:] for folder in folders]
    if len(set(whole)) < len(whole):
        twice = next(folder for folder in folders if whole.count(folder.resolve().parts[1:]) > 1)
        raise OnefoldError(f"{twice} is given twice; give each run once")
    for depth in range(1, max(map(len, whole)) + 1):
        names = ["-".join(parts[-depth:]) or "run" for parts in whole]
        if len(set(names)) == len(names):
            return names
    return [f"run-{number}" for number in range(len(folders))]


def write_any(run: Path, out: Path | None = None) -> Path:
    """The page that fits the folder."""
    return write_comparison(run, out) if is_comparison(run) else write_report(run, out)


def is_comparison(run: Path) -> bool:
    return not has_facts(run) and bool(run_folders(run))


def reported(run: Run) -> tuple[list[Chart], str]:
    narrow, wide = charts.loss(run), charts.loss(run, WIDE)
    now, wanted = ({key: sizes[key] for key in LASTING if key in sizes} for sizes in (run.held(), run.plan()))
    memory = charts.against("memory", now, wanted, "Bytes held by rank 0 between steps", "planned")
    sent, theory = run.sent(), run.sizes("plan", "traffic")
    traffic = charts.against("traffic", sent, theory, "Bytes sent by rank 0 in a step", "theory")
    traces = {
        "tokens_per_s": ("Tokens per second", charts.trace(run, "tokens_per_s", "Tokens per second", "tokens/s")),
        "clock": ("Loss against the clock", charts.clock([run])),
        "grad_norm": ("Gradient norm", charts.trace(run, "grad_norm", "Gradient norm, before clipping", "norm")),
        "lr": ("Learning rate", charts.trace(run, "lr", "Learning rate", "rate", noisy=False)),
        "loss_scale": ("Loss scale", charts.trace(run, "loss_scale", "Loss scale", "factor", log=True, noisy=False)),
        "mfu": ("Model FLOP utilisation", charts.trace(run, "mfu", "Model FLOP utilisation", "of the peak")),
    }
    html = page(
        title=_title(run),
        kicker=sections.kicker("Onefold training report", run),
        lead=sections.lead(run),
        cards=sections.cards(headline(run)),
        sections=[
            sections.loss(run, narrow, wide),
            sections.progress(run, traces),
            *sections.samples(run),
            *sections.profile(run),
            sections.memory(run, memory),
            sections.traffic(run, traffic),
            sections.placement(run),
            sections.warnings(run),
            sections.environment(run),
            sections.settings(run),
        ],
        end=_end(run),
    )
    return [wide, memory, traffic, *(drawn for _, drawn in traces.values() if drawn is not None)], html


def _title(run: Run) -> str:
    size = run.number("model", "parameters")
    return run.name if size is None else f"{run.name}, {sections.count(size)} parameters"


def _end(run: Run) -> str:
    version = text(run.fact("environment", "onefold", default=""))
    return (
        f"Let it write: {command('sample', run.folder, '--prompt', 'def ')}. "
        f"Go on: {command('train', '--resume', '--out', run.folder)}. Made by Onefold {version}."
    )


def _write(folder: Path, drawn: Sequence[Chart], html: str) -> Path:
    target = RunFolder(folder).report
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for chart in drawn:
            _replace(folder / f"{chart.name.removesuffix('-wide')}.png", chart.png)
        _replace(target, html.encode())
    except OSError as error:
        why = error.strerror or error
        raise OnefoldError(f"{target} cannot be written: {why}; give another folder with --out") from error
    return target


def _replace(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.writing")
    draft.write_bytes(content)
    draft.replace(path)
