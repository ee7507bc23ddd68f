"""profile(): a few steps under torch's profiler, as a Chrome trace and as a summary of where each step went.

1 let the first steps pass  2 record  3 write the trace  4 read it again: the summary is made of the trace alone

Nothing is changed but what hooks see: forwards of the model and of its blocks get names while the profile runs. On a
GPU the device is waited for at both ends of a recorded step, so that what a step launched belongs to it.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler as running
from torch.profiler import ProfilerActivity
from torch.profiler import profile as TorchProfile

from onefold.comm.spans import span
from onefold.errors import ConfigError, OnefoldError, StateError
from onefold.observe.profiling.breakdown import STEP, breakdowns
from onefold.observe.profiling.report import ProfileReport, step_profile
from onefold.observe.profiling.trace import read_trace, tidied
from onefold.runtime.engine import Engine, engine_of

FILE = "rank{}.json.gz"


class Profile:
    """What `profile` gives: say when a step is, and ask for the summary afterwards."""

    def __init__(self, model: nn.Module, folder: str | Path | None, *, steps: int, warmup: int) -> None:
        for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
            if type(value) is not int or value < least:
                raise ConfigError(f"{name}={value!r} is not a whole number of at least {least}")
        self._engine = engine_of(model)
        self._folder = None if folder is None else Path(folder)
        self._steps, self._warmup = steps, warmup
        self._seen = 0
        self._sent: dict[str, dict[str, int]] = {}  # recorded step -> bytes by purpose
        self._recorder: TorchProfile | None = None
        self._names = Names(self._engine)
        self._report: ProfileReport | None = None

    @property
    def done(self) -> bool:
        """All steps are recorded, and the trace is written."""
        return self._report is not None

    @property
    def report(self) -> ProfileReport:
        """The figures of this rank."""
        if self._report is None:
            raise StateError(
                f"no step has been recorded: {self._seen} were run, and {self._warmup} are let pass; put each step in "
                f"`with profile.step():`, or lower warmup="
            )
        return self._report

    @property
    def path(self) -> Path | None:
        """The trace of this rank, for chrome://tracing or Perfetto."""
        return None if self._folder is None else self._folder / FILE.format(self._engine.comms.world.rank)

    def summary(self) -> str:
        """Where a step goes, as text."""
        return str(self.report)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step of training: forward, backward, update."""
        self._seen += 1
        if self._recorder is None:
            yield
        else:
            number = str(self._seen)
            self._synchronize()
            with span(STEP, "step", number):
                yield
                self._synchronize()
            flows = self._engine.comm.meter.last_step.items()
            self._sent[number] = {purpose: flow.sent_bytes for (purpose, _), flow in flows}
        if self._recorder is not None and len(self._sent) == self._steps:
            self._end()
        elif self._seen == self._warmup:
            self._start()

    def __enter__(self) -> Profile:
        if self._warmup == 0:
            self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        if self._recorder is not None:
            self._end() if kind is None and self._sent else self._stop()

    def _synchronize(self) -> None:
        if self._engine.device.type == "cuda":
            torch.cuda.synchronize(self._engine.device)

    def _start(self) -> None:
        if running._is_profiler_enabled:
            raise StateError("another profiler is running in this process, and torch has one at a time; end it first")
        activities = [ProfilerActivity.CPU]
        if self._engine.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)  # the one that updates, too
        recorder = TorchProfile(activities=activities, experimental_config=every)
        recorder.start()
        self._recorder = recorder
        self._names.attach()

    def _stop(self) -> TorchProfile:
        assert self._recorder is not None
        recorder, self._recorder = self._recorder, None
        recorder.stop()
        self._names.remove()
        return recorder

    def _end(self) -> None:
        recorder = self._stop()
        try:
            trace = self._write(recorder)
        except OSError as error:
            raise OnefoldError(
                f"the profile cannot be written to {self._folder or tempfile.gettempdir()}: {error.strerror or error}; "
                f"free space, or give another folder"
            ) from error
        found, world = breakdowns(read_trace(trace)), self._engine.comms.world
        self._report = ProfileReport(
            rank=world.rank,
            ranks=world.size,
            device=self._engine.device.type,
            steps=tuple(step_profile(step, self._sent[step.name]) for step in found if step.name in self._sent),
        )

    def _write(self, recorder: TorchProfile) -> dict[str, Any]:
        """To its place, whole or not at all; what it says."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".profile-", dir=self._folder) as folder:
            plain, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
            recorder.export_chrome_trace(str(plain))
            trace = _parsed(plain)
            if self.path is not None:
                with gzip.open(packed, "wt", compresslevel=5) as target:
                    json.dump(tidied(trace, f"rank {self._engine.comms.world.rank}"), target)
                packed.replace(self.path)
            return trace


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise StateError(
            f"torch's profiler wrote a trace that is no JSON ({error}): it escapes no quotation marks; leave them out "
            f"of the names of record_function"
        ) from error


class Names:
    """Names for forwards, while a profile runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open: list[tuple[nn.Module, AbstractContextManager[Any]]] = []
        self._handles: list[Any] = []

    def attach(self) -> None:
        modules = dict(self._engine.model.named_modules())
        self._attach(self._engine.model, "model", "the model")
        for name in self._engine.resolved.blocks:
            self._attach(modules[name], "block", name)

    def _attach(self, module: nn.Module, what: str, name: str) -> None:
        def enter(*_: Any) -> None:
            opened = span("forward", what, name)
            opened.__enter__()
            self._open.append((module, opened))

        def leave(*_: Any) -> None:
            while any(module is other for other, _ in self._open):  # also what an error left open inside
                last, opened = self._open.pop()
                opened.__exit__(None, None, None)
                if last is module:
                    return

        self._handles += [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._open.clear()


def profile(model: nn.Module, folder: str | Path | None = None, *, steps: int = 3, warmup: int = 2) -> Profile:
    """Record `steps` steps of a sharded model, after `warmup` steps that are not recorded: where does the time go?

    Use the result as a context, and put each step of training into its `step()` until `done` is true. Then `report` is
    the `ProfileReport` of this rank, and `summary()` the same as text. If a `folder` is given, each rank that profiles
    writes a trace there, rank0.json.gz for example, for chrome://tracing or Perfetto; `path` is its file. Not
    collective: one rank may profile alone. The result of training stays the same to the last bit.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=2)
    >>> optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    >>> with onefold.profile(model, steps=2, warmup=1) as found:
    ...     while not found.done:
    ...         with found.step():
    ...             model(torch.ones(1, 8)).sum().backward()
    ...             optimizer.step(); optimizer.zero_grad()
    >>> [sum(step.parts_ns.values()) == step.wall_ns for step in found.report.steps]
    [True, True]
    >>> text = found.summary()
    """
    return Profile(model, folder, steps=steps, warmup=warmup)
