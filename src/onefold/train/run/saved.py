"""Where a run has its checkpoints, and which: in its folder, or in the object store of --store."""

from __future__ import annotations

from pathlib import Path

from onefold.checkpoint.format.address import Address, place
from onefold.checkpoint.format.folder import committed, step_name
from onefold.checkpoint.format.opening import check_shared, storage_of
from onefold.errors import ConfigError
from onefold.train.run.folder import RunFolder
from onefold.train.run.settings import Settings


def checkpoints_of(settings: Settings) -> Path:
    """The folder of checkpoints, or its address."""
    store = settings.checkpoints.store
    return RunFolder(settings.output.out).checkpoints if store is None else place(store)


def saved_steps(settings: Settings) -> list[int]:
    """The steps of which there is a committed checkpoint, oldest first."""
    path = checkpoints_of(settings)
    return committed(storage_of(path), path) if isinstance(path, Address) or path.exists() else []


def check_store(settings: Settings, ranks: int) -> None:
    """Raises if --store cannot be reached, or not by all ranks; if it, and --out, have nothing that --resume could
    resume; and if a run that is not resumed would find the checkpoints of another one there."""
    path = checkpoints_of(settings)
    if not isinstance(path, Address):
        return
    check_shared(path, ranks)
    storage_of(path).check_access(path)
    saved = saved_steps(settings)
    if settings.checkpoints.resume and not RunFolder(settings.output.out).facts.exists() and not saved:
        raise ConfigError(f"--resume: there is no run at --out {settings.output.out}, and no checkpoint at {path}")
    if saved and not settings.checkpoints.may_resume:
        raise ConfigError(
            f"--store {path} has the checkpoints of a run, up to {step_name(saved[-1])}; go on with it by "
            f"--resume-or-start, or give another address"
        )
