"""The profile of a run: every rank records the same steps, rank 0 writes down where they went."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

from torch import nn

from onefold.comm.communicator import Comm
from onefold.comm.meter import Label
from onefold.observe.profiling.profile import Profile, profile
from onefold.observe.profiling.report import ProfileReport, summary
from onefold.train.run.folder import SUMMARY, RunFolder, replace
from onefold.train.run.groups import PROFILE_WARMUP
from onefold.train.run.settings import Settings

LABEL = Label("train", "the profile")


class RunProfile:
    """Around a loop, and around each of its steps; without --profile, nothing."""

    def __init__(self, settings: Settings, model: nn.Module, comm: Comm) -> None:
        self._comm, self._folder = comm, RunFolder(settings.output.out).profile
        self._profile: Profile | None = None
        if settings.output.profile:
            self._profile = profile(model, self._folder, steps=settings.output.profiled, warmup=PROFILE_WARMUP)

    def step(self) -> AbstractContextManager[None]:
        return self._profile.step() if self._profile else nullcontext()

    def __enter__(self) -> RunProfile:
        if self._profile:
            self._profile.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._profile:
            self._profile.__exit__(kind, error, at)
            if kind is None:
                self.tell()

    def tell(self) -> None:
        """Once all steps are recorded, or the run has ended: what all ranks found. Collective."""
        if self._profile is None or not self._profile.done:
            return
        mine = json.dumps(self._profile.report.as_dict()).encode()
        self._profile = None
        everyone: list[dict[str, Any]] = [json.loads(row) for row in self._comm.exchange(mine, LABEL)]
        if self._comm.rank == 0:
            found = [ProfileReport.from_dict(values) for values in everyone]
            replace(self._folder / "summary.txt", summary(found) + "\n")
            replace(self._folder / SUMMARY, json.dumps(everyone) + "\n")
