"""What a run wrote down, read as if anyone had written it: of limited size, of the right types, or one line of error.

A run folder may come from someone else. Rows with an impossible step are dropped; a part that is of another
kind than it should be is refused, and the file is named.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from onefold.errors import OnefoldError
from onefold.observe.profiling.report import ProfileReport
from onefold.settings.limited import read_json, read_json_lines, read_text
from onefold.train.run.folder import SUMMARY, RunFolder, replace

TABLES = ("model", "data", "environment", "baseline", "plan")  # of facts.json: each an object, or not there
CONFIG_BYTES_LIMIT = 1 << 20
STEPS_LIMIT = 1 << 53
Rows = list[dict[str, Any]]


def read_facts(run: Path) -> dict[str, Any]:
    path = RunFolder(run).facts
    try:
        facts = read_json(path)
    except FileNotFoundError as error:
        raise OnefoldError(f"{run} is no run folder: it has no {path.name}; give the --out of onefold train") from error
    if not isinstance(facts, dict):
        raise OnefoldError(f"{path} holds a {type(facts).__name__}, not the facts of a run")
    for key in TABLES:
        if not isinstance(facts.get(key), dict | None):
            raise OnefoldError(f"{path} holds a {type(facts[key]).__name__} as {key!r}; wanted is an object")
    return facts


def read_metrics(run: Path) -> Rows:
    """All logged steps, oldest first; empty before the first."""
    rows = read_lines(RunFolder(run).metrics)
    return [row for row in rows if type(row.get("step")) is int and 0 <= row["step"] < STEPS_LIMIT]


def read_warnings(run: Path) -> Rows:
    return read_lines(RunFolder(run).warnings)


def read_samples(run: Path) -> Rows:
    return read_lines(RunFolder(run).samples)


def read_config(run: Path) -> str:
    """The settings as they were written; empty if they were not."""
    try:
        return read_text(RunFolder(run).config, CONFIG_BYTES_LIMIT)
    except FileNotFoundError:
        return ""


def read_profile(run: Path) -> list[ProfileReport]:
    """What each rank's profile found; empty without one."""
    path = RunFolder(run).profile / SUMMARY
    try:
        rows = read_json(path)
        if not isinstance(rows, list):
            raise ValueError(f"it holds a {type(rows).__name__}, not a list")
        return [ProfileReport.from_dict(values) for values in rows]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError) as error:
        raise OnefoldError(f"{path} cannot be read as the figures of a profile: {error!r}; remove it") from error


def has_facts(folder: Path) -> bool:
    """Whether the folder holds the facts of a run; one line of error if that cannot be told."""
    try:
        os.stat(RunFolder(folder).facts)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise OnefoldError(f"{RunFolder(folder).facts} cannot be read: {why}") from error
    return True


def run_folders(folder: Path) -> list[Path]:
    """The runs of a comparison: subfolders that are run folders, in the order of their names."""
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise OnefoldError(f"{folder} cannot be read: {error.strerror}") from error
    return [folder / name for name in names if RunFolder(folder / name).facts.is_file()]


def read_lines(path: Path) -> Rows:
    """The objects of a .jsonl file, without a last line that is torn; none if there is no file."""
    try:
        return [row for row in read_json_lines(path) if isinstance(row, dict)]
    except FileNotFoundError:
        return []


def cut_after(path: Path, step: int) -> None:
    """Forget what was written of later steps, all or nothing."""
    kept = [row for row in read_lines(path) if type(row.get("step")) is int and row["step"] <= step]
    replace(path, "".join(json.dumps(row) + "\n" for row in kept))
