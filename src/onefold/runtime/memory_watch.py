"""Watches how much memory of the device a step takes, for Offload(optimizer="auto"), which decides by it.

On CUDA torch's allocator counts; its peak is set back while the first step is watched, and when state leaves the
device. On a CPU, for a `device_bytes` that stands for a device, a dispatch mode counts live tensors, for the first two
steps only, because it is slow. It lies below users' modes, so that these can be left in order.

A step that is watched is cut into parts where a unit begins its forward, and where a gradient of the last backward is
complete. Each part has a peak of its own: gradients wait for host updates early in forward and late in backward, when
few activations are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode,
    _len_torch_dispatch_stack,
    _pop_mode,
    _push_mode,
)

from onefold.cost.filling import Taken
from onefold.cost.machine import device_budget
from onefold.model.storage import storage_bytes
from onefold.runtime.engine import Engine
from onefold.runtime.forward_time import ForwardTime
from onefold.runtime.held_tensors import NotOnDevice, on_device
from onefold.runtime.live_bytes import LiveBytes
from onefold.runtime.no_watch import NoWatch
from onefold.runtime.seen_inputs import Graph, Growth, SeenInputs
from onefold.settings.offload import Offload
from onefold.state.flat_parameters import FlatParameters

WATCHED_STEPS = 2  # on a CPU: the one that decides, and the one that shows whether it was right


class Counter(Protocol):
    """Counts bytes on one device."""

    def restart(self) -> None:
        """The peak is what is there now."""
        ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def reserved_bytes(self) -> int:
        """The most that the allocator had taken from the device: bytes of tensors, and what it keeps beside them."""
        ...

    def stop(self) -> None: ...


class CudaCounter:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    @property
    def reserved_bytes(self) -> int:
        return torch.cuda.max_memory_reserved(self._device)

    def stop(self) -> None:
        pass


class CpuCounter:
    def __init__(self, engine: Engine) -> None:
        self._elsewhere = NotOnDevice(engine)
        self._mode = LiveBytes(_Weak(self._elsewhere))
        self._mode.add(tensor for _, tensor in on_device(engine).values())
        watched = [weakref.ref(unit.flat_params) for unit in engine.unsharding.units]
        for unit in engine.unsharding.units:
            unit.flat_params.on_resize.append(self._mode.note)
        above = []
        while _len_torch_dispatch_stack():
            above.append(_pop_mode())
        self._mode.__enter__()
        for mode in reversed(above):
            _push_mode(mode)
        self.stop = weakref.finalize(self, _end, self._mode, watched)  # also if the model is gone before step()

    def restart(self) -> None:
        self._mode.peak_bytes = self._mode.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self._mode.peak_bytes

    reserved_bytes = peak_bytes


class _Weak:
    """Storages that are not on the device, as long as the model lives: torch holds the mode that asks."""

    def __init__(self, elsewhere: NotOnDevice) -> None:
        self._elsewhere = weakref.ref(elsewhere)

    def __contains__(self, key: object) -> bool:
        known = self._elsewhere()
        return known is not None and key in known


def _end(mode: LiveBytes, watched: Sequence[weakref.ref[FlatParameters]]) -> None:
    above: list[Any] = []
    while (top := _get_current_dispatch_mode()) is not None and top is not mode:
        above.append(_pop_mode())
    if top is mode:
        mode.__exit__(None, None, None)
    for other in reversed(above):
        _push_mode(other)
    for reference in watched:
        if (flat_params := reference()) is not None:
            flat_params.on_resize.remove(mode.note)


class MemoryWatch(NoWatch):
    """Watches one model. `candidates` of its trained units, by number, may be updated by the device."""

    def __init__(self, engine: Engine, candidates: frozenset[int]) -> None:
        self._engine, self._candidates = weakref.ref(engine), candidates
        self._cuda, self._device = engine.device.type == "cuda", engine.device
        self._parts: list[Taken] = []
        self._reserved = 0  # bytes that the allocator had taken, at most, in the step that is watched
        self._slack = 0
        self._counter: Counter | None = None
        self._reduced: set[int] = set()
        # trained units whose forward has not begun: their numbers in engine.units, by those in engine.unsharding.units
        self._coming: dict[int, int] = {}
        self._state_before: dict[str, int] = {}  # bytes, by unit
        self.steps = 0
        self._forward_time = ForwardTime(engine.device)  # of the first step
        self._retries = self._failures = 0  # of torch's allocator, when they were looked at last
        self.decided = False
        self._inputs, self._beside_sums = SeenInputs(), SeenInputs()  # of all training forwards, and of those
        self._graphs: list[weakref.ref[Graph]] = []  # of forwards before this one that no backward has used
        self._missed = False  # activations of these: a CpuCounter that begins beside them does not know them

    active = True

    def may_move_units(self, indices: frozenset[int]) -> None:
        self._candidates = indices

    def may_move(self, index: int) -> bool:
        return not self.decided and index in self._candidates

    def growth(self, inputs: Iterable[Tensor], *, sums: bool) -> Growth:
        if self.steps and not (self.decided or self.watching):  # another first step, after one that was refused
            self.forget_inputs()
        given = list(inputs)
        self._graphs = [graph for graph in self._graphs if (live := graph()) is not None and not live.used]
        graphs = 1 + len(self._graphs)
        times = self._inputs.growth(given, graphs)
        found = Growth(times, sums=sums and self._beside_sums.growth(given, graphs) > 1)
        if self.decided:
            return found
        engine = self._engine()
        if times > 1 and engine is not None and engine.block_choice is not None:  # what a forward before has measured
            engine.block_choice.grow(times)
        return Growth()

    def learn_inputs(self) -> None:
        if self._missed:
            self.forget_inputs()
            self._missed = False
        self._inputs.learn()
        self._beside_sums.learn()

    def forget_inputs(self) -> None:
        self._inputs.forget()
        self._beside_sums.forget()

    def graph(self) -> Graph | None:
        found = Graph()
        self._graphs.append(weakref.ref(found))
        return found

    def comes_back(self, nbytes: int) -> None:
        if self._counter is not None:
            self._end_part()
            self._parts = [part._replace(nbytes=part.nbytes + nbytes) for part in self._parts]
        self._inputs.set_apart()
        self._beside_sums.set_apart()

    def watch_after(self, make_way: Callable[[], None]) -> None:
        if self._counter is None:
            self._missed = bool(self._graphs) and not self._cuda
            self._watch()
        make_way()
        assert self._counter is not None
        self._counter.restart()

    def forward_begins(self) -> None:
        if self._counter is None and (self.steps < (1 if self._cuda else WATCHED_STEPS) or not self.decided):
            self._watch()
        elif self._counter is not None and self._reduced and self._gradients_dropped():
            self._end_part()
            self._forward_of_all()
        if self._timed:
            self._forward_time.begin()

    def forward_ended(self) -> None:
        self._forward_time.end()

    @property
    def _timed(self) -> bool:
        """This is the first step, or one that takes its place."""
        return not (self.steps and self.decided)

    def _gradients_dropped(self) -> bool:
        engine = self._engine()
        return engine is not None and not any(unit.gradients.reduced for unit in engine.units)

    def _watch(self) -> None:
        engine = self._engine()
        assert engine is not None
        if self._cuda:
            torch.cuda.empty_cache()  # what was needed to load and shard the model would count as slack
        else:
            engine.updates.wait()  # host updates of the first step make optimizer state, which it looks at
        self._counter = CudaCounter(self._device) if self._cuda else CpuCounter(engine)
        if self._timed:
            self._forward_time = ForwardTime(self._device)
            self._state_before = {unit.name: storage_bytes(unit.state_tensors()) for unit in engine.units}
        self._forward_of_all()
        self._reserved = 0
        self._counter.restart()

    def _forward_of_all(self) -> None:
        """The forward of no unit has begun, and no gradient is complete."""
        engine = self._engine()
        assert engine is not None
        numbers = {id(unit): number for number, unit in enumerate(engine.units)}
        units = enumerate(engine.unsharding.units)
        self._coming = {at: numbers[id(unit)] for at, unit in units if id(unit) in numbers}
        self._reduced = set()

    @property
    def watching(self) -> bool:
        return self._counter is not None

    def state_bytes_before(self, unit: str) -> int:
        return self._state_before.get(unit, 0)

    def units_change(self) -> None:
        if self._counter is not None:  # the numbers in the parts until now are those of the units before
            self._parts = []
            self._forward_of_all()

    def units_begin(self, indices: Collection[int]) -> None:
        engine = self._engine()
        if self._timed and engine is not None:
            units = engine.unsharding.units
            self._forward_time.begin_units({index: units[index].layout.used_numel for index in indices})
        if self._counter is not None and not self._coming.keys().isdisjoint(indices):
            self._end_part()
            for index in indices:
                self._coming.pop(index, None)

    def reduced(self, index: int, *, final: bool) -> None:
        if final and self._counter is not None:
            self._reduced.add(index)
            self._coming = {at: number for at, number in self._coming.items() if number != index}
            self._end_part()

    def _end_part(self) -> None:
        assert self._counter is not None
        coming = frozenset(self._coming.values())
        self._parts.append(Taken(self._counter.peak_bytes, frozenset(self._reduced), coming, self._waited()))
        self._reserved = max(self._reserved, self._counter.reserved_bytes)
        self._counter.restart()

    def _waited(self) -> int:
        """Bytes of gradients that have waited since the part began that ends, in the first step: those that wait now,
        because a part ends before a gradient begins to wait. Of a pool that keeps its buffers every step has as many
        bytes."""
        engine = self._engine()
        return 0 if engine is None or self.decided or engine.pool.keeps else engine.updates.lent_bytes

    def step_begins(self) -> list[Taken]:
        """The parts of the step whose gradients are complete now, if it was watched, the last of them what is there
        now; else, on CUDA, the most bytes since the peak was set back last."""
        if self._timed:
            if self._cuda:
                torch.cuda.synchronize(self._device)
            self.forwards, self.forward_s = self._forward_time.forwards, self._forward_time.seconds()
        self.steps = self.steps + 1 if self.decided else 1  # a refused first step is the first again
        if self._counter is not None:
            self._end_part()
            self._end_part()
            self._counter.stop()
            self._counter = None
            parts, self._parts, self._reduced = self._parts, [], set()
            self._slack = max(0, self._reserved - max(part.nbytes for part in parts))
            return parts
        return [Taken(torch.cuda.max_memory_allocated(self._device))] if self._cuda else []

    @property
    def keeps_looking(self) -> bool:
        return self._cuda or self.steps <= WATCHED_STEPS

    def decide(self) -> None:
        self.decided = True
        self.was_short()

    def made_room(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)  # the peak before says nothing of what is there now
        self.was_short()

    def budget(self) -> int:
        """Bytes of the device that training may take, with what the allocator keeps beside tensors."""
        engine = self._engine()
        assert engine is not None
        resolved = engine.resolved
        return device_budget(self._device, Offload.of(resolved.settings.offload).device_bytes, resolved.device_ranks)

    @property
    def slack_bytes(self) -> int:
        return self._slack

    def was_short(self) -> bool:
        """Whether torch's allocator had to free cached memory, or failed, since it was asked last."""
        before, (self._retries, self._failures) = (self._retries, self._failures), self._troubles()
        return before != (self._retries, self._failures)

    def failed(self) -> bool:
        """Whether an allocation on the device failed since `was_short` was asked last."""
        return self.decided and self._troubles()[1] > self._failures

    def _troubles(self) -> tuple[int, int]:
        """How often torch's allocator had to free what it kept, and how often it failed."""
        found = torch.cuda.memory_stats_as_nested_dict(self._device) if self._cuda else {}
        return found.get("num_alloc_retries", 0), found.get("num_ooms", 0)
