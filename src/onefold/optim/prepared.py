"""Prepared updates: host updates that run in backward, before step() has said that their gradients are to be used.

Clipping needs all gradients first, so a host update that waits for step() has only the next forward to run beside. But
most steps are not clipped. While that holds, the update of a unit runs as soon as its gradient is on the host: it reads
the state as it is, and writes the new state to spare memory. step() keeps it if the gradient is used just as was
assumed: the same factor, settings and parameters, and not changed since. Then the spare memory is the state, and the
old state is the spare memory of the next step. Else step() updates from the old state, as if nothing had been prepared.
Either way the bits are those of an update at step(), so ranks need not agree on it.

Until step() everybody sees the old state. Whatever may change it before then has all prepared updates forgotten.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from onefold.comm.spans import span
from onefold.comm.streams import StreamEvent
from onefold.offload.host import Host
from onefold.offload.host_memory import available_bytes, host_bytes
from onefold.offload.transfer import GradientTransfer
from onefold.optim.kernels.cpu import Written, update
from onefold.optim.kernels.rule import moments_of, next_step
from onefold.optim.unit_optimizer import NOT_SETTINGS, OptimizerParam, UnitOptimizer
from onefold.optim.workers import Job, UpdateQueue
from onefold.runtime.engine import Engine
from onefold.settings.placement import Scope
from onefold.state.master import StoredMaster

SPARE_SHARE = 0.75  # of the host memory that is available after the first step

Settings = list[dict[str, Any]]  # of each param group


class Assumed(NamedTuple):
    """What a prepared update takes step() to say."""

    settings: Settings
    to_update: bytes
    factor: float
    transfer: GradientTransfer | None  # the gradient

    def holds(self, said: Assumed) -> bool:
        """Whether step() says the same, and the gradient is as it was."""
        unchanged = self.transfer is said.transfer is not None and not said.transfer.changed
        alike = self.to_update == said.to_update and self.factor == said.factor
        return unchanged and alike and _same(self.settings, said.settings)


class Spare:
    """Memory for the state of one unit after an update."""

    def __init__(
        self, optimizer: UnitOptimizer, pieces: Sequence[tuple[OptimizerParam, list[str]]], host: Host
    ) -> None:
        unit, state = optimizer.unit, _state(optimizer)
        [stored] = unit.master.tensors()
        nbytes = unit.master.owned.numel * unit.flat_params.dtype.itemsize
        self.spans = [piece.span for piece, _ in pieces]
        self.parameters = host_bytes(nbytes, pinned=host.cuda).view(unit.flat_params.dtype)
        self.stored = host_bytes(stored.nbytes, pinned=False).view(stored.dtype)
        self.moments = [{key: _like(state[piece.tensor][key]) for key in keys} for piece, keys in pieces]
        self.written: threading.Event | None = None  # the last update that was prepared in it is done
        self.uploaded = StreamEvent()  # the device has read the parameters

    def state_tensors(self) -> list[Tensor]:
        """What takes turns with the unit's master and optimizer state."""
        return [self.stored, *(moment for one in self.moments for moment in one.values())]


class PreparedUpdate:
    """An update of one unit from its state into spare memory: a job for a worker thread."""

    def __init__(
        self, optimizer: UnitOptimizer, assumed: Assumed, after: StreamEvent, spare: Spare, host: Host
    ) -> None:
        self.optimizer, self.assumed, self._after, self.spare, self._host = optimizer, assumed, after, spare, host
        self.started = True  # False: step() took it from the queue before a thread had started it
        self._counts: list[Tensor | None] = []  # of steps, of each optimizer parameter after this one
        self.done = threading.Event()
        self._before, spare.written = spare.written, self.done
        self.error: BaseException | None = None

    def ready(self) -> bool:
        """Whether the gradient is on the host."""
        return self.assumed.transfer is None or self.assumed.transfer.copied.query()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.done.set()

    def run(self) -> None:
        try:
            self._wait_for_spare()
            with self._parameters() as read, torch.no_grad(), span("update", "prepared", self.optimizer.unit.name):
                self._update(read)
        except BaseException as error:
            self.error = error

    def finish(self) -> None:
        pass

    def borrow_parameters(self) -> Tensor:
        """Lends the spare memory for parameters to the update that replaces this one. The unit's next forward waits for
        that update, so no later preparation comes before it has ended."""
        self._wait_for_spare()
        return self.spare.parameters

    def _wait_for_spare(self) -> None:
        if self._before is not None:
            self._before.wait()  # one that was forgotten while it ran writes to the same memory
        self.spare.uploaded.wait()

    def _update(self, read: Tensor) -> None:
        """Writes what the update of the parameters `read` makes of the unit's state to spare memory."""
        optimizer, unit, spare = self.optimizer, self.optimizer.unit, self.spare
        assert isinstance(unit.master, StoredMaster) and self.assumed.transfer is not None
        owned, threads = unit.master.owned, optimizer.threads or torch.get_num_threads()
        self._counts = []
        for (piece, group), moments in zip(_pieces(optimizer, self.assumed.settings), spare.moments, strict=True):
            state = dict(_state(optimizer)[piece.tensor])
            if "step" in state:
                state["step"] = state["step"].clone()
            rule = next_step(optimizer.cls, group, state, piece.span.numel, optimizer.device)
            self._counts.append(state.get("step"))
            at = slice(piece.span.start - owned.start, piece.span.stop - owned.start)
            first, second = [*moments.values(), None, None][:2]
            to = Written(spare.parameters[at], spare.stored[at], first, second)
            grad, stored = unit.gradients.from_transfer(self.assumed.transfer, piece.span), unit.master.tensors()[0][at]
            update(rule, grad, read[at], stored, self.assumed.factor, threads, to=to)

    @contextmanager
    def _parameters(self) -> Iterator[Tensor]:
        """This rank's parameters as they are, on the host; or any memory, where the update has an fp32 master to read
        instead."""
        unit = self.optimizer.unit
        mine = unit.flat_params.part(unit.master.owned)
        if unit.dtypes.master == "fp32" or unit.flat_params.on_host:
            yield mine if unit.flat_params.on_host else self.spare.parameters
            return
        loaded = self._host.staging.take(mine.numel(), mine.dtype)
        try:
            with span("download", "parameters", unit.name):
                self._host.load(mine, loaded, self._after).wait()
            yield loaded
        finally:
            self._host.staging.give(loaded)

    def keep(self, after: StreamEvent) -> StreamEvent:
        """What was written is the unit's state from now on; the event after which the device has the parameters. They
        are copied there once `after` has passed."""
        optimizer, unit, spare = self.optimizer, self.optimizer.unit, self.spare
        assert isinstance(unit.master, StoredMaster) and self.error is None and self.done.is_set()
        spare.stored = unit.master.exchange(spare.stored)
        pieces = list(optimizer.optimizer_params())
        for piece, moments, count in zip(pieces, spare.moments, self._counts, strict=True):
            state = _state(optimizer)[piece.tensor]
            for key in moments:
                moments[key], state[key] = state[key], moments[key]
            if count is not None:
                state["step"] = count
        mine = unit.flat_params.part(unit.master.owned)
        if unit.flat_params.on_host:
            after.wait()  # until then the device may be copying from there
            mine.copy_(spare.parameters)
            return StreamEvent()
        with span("upload", "parameters", unit.name):
            spare.uploaded = self._host.to_device(spare.parameters, mine, after)
        return spare.uploaded


@dataclass
class KeptUpdate(Job):
    """The update of a unit, kept as it was prepared; if its preparation failed, it is made now."""

    prepared: PreparedUpdate | None = None

    def ready(self) -> bool:
        return self.prepared is None or self.prepared.done.is_set()

    def run(self) -> None:
        prepared, self.prepared = self.prepared, None
        assert prepared is not None
        prepared.done.wait()
        if prepared.error is not None:
            super().run()
            return
        try:
            self.uploaded = prepared.keep(self.after)
        except BaseException as error:
            self.error = error
        self._release_gradient()


@dataclass
class InPlaceUpdate(Job):
    """Updates master and moments in place, for a unit whose prepared update no thread had started when step() was
    called. The new parameters are written to the unit's spare memory and uploaded from there, so no thread waits for
    the upload."""

    prepared: PreparedUpdate | None = None

    def run(self) -> None:
        prepared, self.prepared = self.prepared, None
        assert prepared is not None
        try:
            self.buffer = prepared.borrow_parameters()
            super().run()
            prepared.spare.uploaded = self.uploaded
        except BaseException as error:
            self.error = error
            self._release_gradient()
        self.buffer = None


class PreparedUpdates:
    """Decides which updates are prepared, and keeps or forgets them. `spare_bytes` bounds the memory it takes for that;
    None: most of what the host has left, if there is a GPU that would wait."""

    def __init__(
        self, engine: Engine, by_unit: Sequence[UnitOptimizer], queue: UpdateQueue, spare_bytes: int | None
    ) -> None:
        self._engine, self._by_unit, self._queue, self._host = engine, by_unit, queue, engine.tiers.host
        self._room, self._spares, self._jobs = spare_bytes, dict[int, Spare](), dict[int, PreparedUpdate]()
        self._flags: dict[int, bytes] = {}  # of parameters that the last step updated, by unit
        self._expected = False  # step() is to use gradients as they are, as the last one did
        self.kept = self.lost = 0  # prepared updates

    def expect(self, as_they_are: bool) -> None:
        """The last step used gradients as they were, so this one is expected to; or it clipped them."""
        self._expected = as_they_are

    def start(self, index: int, groups: Settings, position: int) -> None:
        """Prepares the update of a unit whose gradient is on its way to the host, if the last step used gradients as
        they were, and there is spare memory. `position` is the unit's in the next forward."""
        self._forget(index)
        optimizer, flags = self._by_unit[index], self._flags.get(index)
        if not self._expected or flags is None or not self._can_prepare(optimizer, flags, groups):
            return
        if (spare := self._spare(index, groups)) is not None:
            unit, settings = optimizer.unit, settings_of(groups)
            assumed = Assumed(settings, flags, 1.0 / self._engine.scale.value, unit.gradients.offloaded)
            job = PreparedUpdate(optimizer, assumed, self._host.record_event(), spare, self._host)
            self._jobs[index] = job
            self._queue.put(position, job)

    def take(self, index: int, said: Assumed) -> PreparedUpdate | None:
        """The prepared update of a unit if step() can use it: it has started and its assumptions hold, or (`started` is
        False) it will not run and only lends its spare memory to an update in place. None: update as if nothing had
        been prepared."""
        self._flags[index] = said.to_update
        job = self._jobs.pop(index, None)
        if job is None:
            return None
        job.started = not self._queue.remove(job)
        if job.started:
            holds = job.assumed.holds(said)
            self.kept, self.lost = self.kept + holds, self.lost + (not holds)
            return job if holds else None
        job.done.set()  # it will not run, and the next job with its spare memory waits for it
        return None if job.optimizer.unit.flat_params.on_host else job  # those are updated where they are

    def forget(self) -> None:
        """Parameters, optimizer state or settings may change before step(): nothing that was prepared holds."""
        for index in list(self._jobs):
            self._forget(index)

    def release(self, indices: Sequence[int]) -> None:
        """Frees the spare memory of units whose state has moved to another tier."""
        for index in indices:
            self._forget(index)
            if (spare := self._spares.pop(index, None)) is not None and self._room is not None:
                self._room += sum(tensor.nbytes for tensor in [spare.parameters, *spare.state_tensors()])

    def wait(self) -> None:
        """Waits until every update that is being prepared has run."""
        for job in list(self._jobs.values()):
            job.done.wait()

    def _forget(self, index: int) -> None:
        if (job := self._jobs.pop(index, None)) is not None:
            self._take_back(job)
            self.lost += 1

    def _take_back(self, job: PreparedUpdate) -> bool:
        """Whether a job was still queued, and will not run."""
        queued = self._queue.remove(job)
        if queued:
            job.done.set()  # the next job with its spare memory waits for it
        return queued

    def _can_prepare(self, optimizer: UnitOptimizer, flags: bytes, groups: Settings) -> bool:
        """Whether the kernel updates all elements that this rank owns of a unit, and users cannot write them."""
        unit = optimizer.unit
        hidden = unit.placement.parameters is Scope.SHARDED or unit.placement.hidden_between_passes
        if not (unit.dtypes.narrow and hidden and unit.image is None and unit.flat_params.image is None):
            return False
        if optimizer.inner is None or optimizer.form.small or not optimizer.writes_all(flags):
            return False
        pieces = _pieces(optimizer, groups)
        return all(optimizer.fused(group) and _state(optimizer).get(piece.tensor) for piece, group in pieces)

    def _spare(self, index: int, groups: Settings) -> Spare | None:
        """The spare memory of a unit, made once; None if there is no room for it."""
        optimizer, found = self._by_unit[index], self._spares.get(index)
        pieces = _pieces(optimizer, groups)
        if found is not None and found.spans == [piece.span for piece, _ in pieces]:
            return found
        unit = optimizer.unit
        keys = [(piece, list(moments_of(optimizer.cls, group))) for piece, group in pieces]
        moments = sum(4 * piece.span.numel * len(names) for piece, names in keys)
        needed = unit.master.owned.numel * (unit.flat_params.dtype.itemsize + unit.dtypes.widths.master) + moments
        if found is None and self._left() < needed:
            return None
        if found is None:
            self._room = self._left() - needed
        self._spares[index] = Spare(optimizer, keys, self._host)
        return self._spares[index]

    def _left(self) -> int:
        """Bytes of spare memory that may still be taken."""
        if self._room is None:
            real = self._host.cuda and not isinstance(torch.empty(0, device="cpu"), FakeTensor)
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            self._room = int(SPARE_SHARE * available_bytes()) // ranks if real else 0
        return self._room

    def tensors(self) -> dict[int, tuple[list[Tensor], list[Tensor]]]:
        """Spare memory by unit: of parameters, and of master and optimizer state."""
        return {index: ([spare.parameters], spare.state_tensors()) for index, spare in self._spares.items()}


def _like(moment: Tensor) -> Tensor:
    return host_bytes(moment.nbytes, pinned=False).view(moment.dtype)


def settings_of(groups: Settings) -> Settings:
    """A copy of the param groups' settings: an LR scheduler may change them before a job runs."""
    kept = [{key: value for key, value in group.items() if key not in NOT_SETTINGS} for group in groups]
    return [{k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()} for group in kept]


def _same(one: Settings, other: Settings) -> bool:
    if [list(group) for group in one] != [list(group) for group in other]:
        return False
    pairs = [(a[key], b[key]) for a, b in zip(one, other, strict=True) for key in a]
    return all(torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b for a, b in pairs)


def _state(optimizer: UnitOptimizer) -> dict[Tensor, dict[str, Any]]:
    assert optimizer.inner is not None
    return optimizer.inner.state


def _pieces(optimizer: UnitOptimizer, groups: Settings) -> list[tuple[OptimizerParam, dict[str, Any]]]:
    """The optimizer parameters of a unit, each with the settings of its param group."""
    assert optimizer.inner is not None
    inner = zip(optimizer.inner.param_groups, optimizer.group_numbers, strict=True)
    return [
        (piece, {key: value for key, value in {**own, **groups[number]}.items() if key not in NOT_SETTINGS})
        for own, number in inner
        for piece in optimizer.by_group[number]
    ]
