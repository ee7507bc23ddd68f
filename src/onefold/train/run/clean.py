"""Removes what ranks that were killed left half written in a run's folder. No rank of the run may live."""

from __future__ import annotations

from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.protocol.commit import clean
from onefold.errors import CheckpointError
from onefold.train.run.folder import RunFolder

DRAFTS = (".*.writing", ".writing-*")  # of files that are replaced, and of the test whether the folder can be written


def clean_up(run: RunFolder) -> None:
    """Removes drafts (hidden names) of files and checkpoints; finished files are kept."""
    try:
        for pattern in DRAFTS:
            for path in run.path.glob(pattern):
                path.unlink(missing_ok=True)
        if run.checkpoints.is_dir():
            clean(Storage(), run.checkpoints)
    except (OSError, CheckpointError):
        pass  # the run has failed already, and of that the user hears; the next start cleans up again
