"""Whether what is resumed is the same run: its settings, its model, its data, by content.

Another learning rate, batch, stage, precision, number of ranks or of evaluated windows is still the same run: the
model, the order of the samples and what is kept for validation stay as they were. (The baseline is computed again for
the windows that are evaluated, so both sides of that comparison change together.)
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from onefold.cost.shapes import Shape
from onefold.errors import ConfigError
from onefold.train.run.digest import Digests
from onefold.train.run.folder import RunFolder, is_comparison, is_run, is_stage
from onefold.train.run.groups import BYTES
from onefold.train.run.records import read_facts
from onefold.train.run.settings import Settings

NAMED = 3  # files, before the rest is counted
SHAPE = ("layers", "hidden", "heads", "seq", "vocab")


def check_resumable(settings: Settings) -> None:
    """Raises if --resume is given and there is no run at --out."""
    out = settings.output.out
    elsewhere = settings.checkpoints.store is not None  # the ranks look there
    if settings.checkpoints.resume and not elsewhere and not is_run(out) and not RunFolder(out).checkpoints.exists():
        beside = [path.name for path in out.absolute().parent.glob("*") if _may_be_run(path)]
        near = [str(out.with_name(name)) for name in difflib.get_close_matches(out.name, beside)]
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ConfigError(
            f"--resume: there is no run at --out {out}{hint}; --resume-or-start starts one where there is none"
        )


def _may_be_run(path: Path) -> bool:
    """A folder beside --out that this user can read and that is a run."""
    try:
        return is_run(path)
    except OSError:
        return False


def check_same(settings: Settings, digests: Digests, shape: Shape, *, vocab_known: bool = True) -> None:
    """Raises unless these settings, data and model are those of the run in --out."""
    check_settings(settings)
    check_data(settings, digests)
    check_shape(settings, shape, vocab_known=vocab_known)


def check_settings(settings: Settings) -> None:
    """Raises if the run in the folder had settings that make it another one."""
    folder = RunFolder(settings.output.out)
    facts = read_facts(folder.path) if folder.facts.exists() else {}  # not config.toml, which may have been edited
    _same("seed", facts, settings.steps.seed)
    _same("optimizer", facts, settings.adam.optimizer)
    _same("val_fraction", _table(facts, "data"), settings.data.val_fraction)
    tokenizer = _table(facts, "data").get("tokenizer")
    if tokenizer != "tokens" and BYTES in (tokenizer, settings.data.tokenizer):  # of two files contents are compared
        _same("tokenizer", _table(facts, "data"), settings.data.tokenizer)


def check_shape(settings: Settings, shape: Shape, *, vocab_known: bool) -> None:
    """Raises if the model of the run in the folder had another shape."""
    folder = RunFolder(settings.output.out)
    facts = read_facts(folder.path) if folder.facts.exists() else {}
    for name in SHAPE if vocab_known else SHAPE[:-1]:
        _same(name, _table(facts, "model"), getattr(shape, name))


def _table(facts: dict[str, Any], name: str) -> dict[str, Any]:
    found = facts.get(name)
    return found if isinstance(found, dict) else {}


def _same(name: str, facts: dict[str, Any], now: object) -> None:
    then, flag = facts.get(name, now), name.replace("_", "-")
    if then != now:
        raise ConfigError(
            f"--{flag} was {then} when the run began and is {now} now, which makes it another run; resume with "
            f"--{flag} {then}, or start a new run with another --out"
        )


def check_stages(settings: Settings, found: Digests) -> None:
    """Raises if a stage of a comparison would be trained on other data than the stages before it."""
    out = settings.output.out.absolute()
    if is_stage(out) and is_comparison(out.parent):
        for stage in RunFolder(out.parent).stages:
            check_data(settings, found, stage)


def check_data(settings: Settings, found: Digests, folder: RunFolder | None = None) -> None:
    """Raises if the data are not those that the run in the folder is trained on, unless that was accepted."""
    folder = folder or RunFolder(settings.output.out)
    then = digest_of(folder.path)
    if then is None or then == found.run_digest or settings.checkpoints.accept_changed_data:
        return
    known = Digests.read(folder.data)
    data = settings.data.data
    changed = _changes(known, found, "" if data is None else str(data)) if known and known.run_digest == then else []
    said = ", ".join(changed[:NAMED]) + (f" and {len(changed) - NAMED:,} more" if len(changed) > NAMED else "")
    raise ConfigError(
        f"{said or 'the data have changed since the run began'}; put the data back as they were, accept them with "
        f"--accept-changed-data, or start a new run with another --out"
    )


def digest_of(run: Path) -> str | None:
    """The data digest recorded in facts.json; None if there is none."""
    digest = _table(read_facts(run), "data").get("digest") if RunFolder(run).facts.exists() else None
    return digest if isinstance(digest, str) else None


def _changes(then: Digests, now: Digests, data: str) -> list[str]:
    """In words, one for each file."""
    before, after = ({file.name: file for file in one.files} for one in (then, now))
    said = []
    for name in sorted({*before, *after}):
        old, new, path = before.get(name), after.get(name), f"{data}{name}"
        if old is None:
            said.append(f"{path} is new since the run began")
        elif new is None:
            said.append(f"{path} is gone, or no longer text, since the run began")
        elif old.sha256 != new.sha256:
            sizes = f"{old.size:,} bytes then, {new.size:,} now"
            said.append(f"{path} has changed since the run began ({sizes})")
    if then.tokenizer != now.tokenizer:
        said.append("the file of --tokenizer has changed since the run began")
    return said or ["the tokenizers package makes other tokens of the same text than when the run began"]
