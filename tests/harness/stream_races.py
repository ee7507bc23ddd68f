"""Races between the streams of a device, found on a CPU: two uses of the same bytes that no event orders.

Operations run at once and in order, while streams and events are recorded (recorded_streams.py). Of every stream and
event it is known what has passed before it (vector clocks). A use of memory races with an earlier one on another stream
unless that has passed. Memory that is freed goes to the next tensors of the stream that allocated it, as torch's
allocator has it: their first use races with uses that have not passed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from onefold.comm.buffers import key_of
from tests.harness.recorded_streams import Op, Recorder, recorded

Clock = dict[str, int]  # of each stream, how many of its uses have passed


class Use(NamedTuple):
    """Bytes of a storage that an operation reads or writes."""

    start: int
    stop: int
    writes: bool
    stream: str
    time: int
    what: str

    def races(self, other: Use) -> bool:
        return (self.writes or other.writes) and self.start < other.stop and other.start < self.stop


class RaceRecorder(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.kernels: set[tuple[str, str]] = set()  # operations, and the streams they ran on
        self._clocks: dict[str, Clock] = {}
        self._events: dict[str, Clock] = {}
        self._uses: dict[int, list[Use]] = {}
        self._allocated_on: dict[int, str] = {}
        self._freed: dict[str, list[Use]] = {}  # uses of freed memory, by the stream that allocated it

    def note(self, stream: str, op: Op) -> None:
        super().note(stream, op)
        if op.kind == "record":
            self._events[op.what] = dict(self._clock(stream))
        elif op.kind == "wait":
            mine = self._clock(stream)
            for other, time in self._events[op.what].items():
                mine[other] = max(mine.get(other, 0), time)

    def group(self) -> Any:
        return NotedMessages(self)

    def use(self, tensors: Iterable[Tensor], what: str, *, writes: bool) -> None:
        """An operation on the current stream reads or writes tensors."""
        for tensor in tensors:
            self._use(tensor, what, writes=writes)

    def allocate(self, tensors: Iterable[Tensor]) -> None:
        """Tensors were made on the current stream, without values."""
        for tensor in tensors:
            if tensor.numel() and (key := key_of(tensor)) not in self._allocated_on:
                self._allocated_on[key] = self.current.name
                weakref.finalize(tensor.untyped_storage(), self._free, key).atexit = False

    def _clock(self, stream: str) -> Clock:
        return self._clocks.setdefault(stream, {})

    def _use(self, tensor: Tensor, what: str, *, writes: bool) -> None:
        if not tensor.numel():
            return
        stream, key = self.current.name, key_of(tensor)
        clock = self._clock(stream)
        self.allocate([tensor])
        if key not in self._uses:
            self._reuse(what, self._allocated_on[key], stream)
        clock[stream] = clock.get(stream, 0) + 1
        self.kernels.add((what, stream))
        start = tensor.storage_offset() * tensor.itemsize
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        stop = start + (1 + sum((size - 1) * stride for size, stride in pairs)) * tensor.itemsize
        use = Use(start, stop, writes, stream, clock[stream], what)
        earlier = self._uses.setdefault(key, [])
        for other in earlier:
            if use.races(other) and clock.get(other.stream, 0) < other.time:
                self.races.append(f"{what} on {stream} and {other.what} on {other.stream}")
        # a later use of the same stream that races with as much stands for an earlier one
        covered = [
            o for o in earlier if o.stream == stream and start <= o.start and o.stop <= stop and writes >= o.writes
        ]
        self._uses[key] = [one for one in earlier if one not in covered] + [use]

    def _reuse(self, what: str, allocated_on: str, stream: str) -> None:
        """The first use of a tensor, which may lie where freed ones lay."""
        clock = self._clock(stream)
        for use in self._freed.pop(allocated_on, []):
            if clock.get(use.stream, 0) < use.time:
                self.races.append(f"{what} on {stream} and, of a tensor that was freed, {use.what} on {use.stream}")

    def _free(self, key: int) -> None:
        self._freed.setdefault(self._allocated_on.pop(key), []).extend(self._uses.pop(key, []))


class NotedMessages:
    """Stands for a communicator of NCCL; of its messages it is noted what they read and write."""

    def __init__(self, recorder: RaceRecorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        def message(received: Any, sent: Any, *_: Any) -> None:
            self._recorder.use(_tensors(sent), name, writes=False)
            self._recorder.use(_tensors(received), name, writes=True)
            with _disable_current_modes():  # as if peers had sent zeros
                kept = [(tensor, tensor.clone()) for tensor in _tensors(sent)]
                for tensor in _tensors(received):
                    tensor.zero_()
                for tensor, copy in kept:
                    tensor.copy_(copy)

        return message


class _Watched(TorchDispatchMode):
    def __init__(self, recorder: RaceRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        out = func(*args, **given)
        schema = func._schema
        if "is_set_to" in str(func) or any(
            one.alias_info is not None and not one.alias_info.is_write for one in schema.returns
        ):
            return out  # reads no elements: a view
        named = {one.name: one for one in schema.arguments}
        values = [*zip(schema.arguments, args, strict=False), *((named[key], value) for key, value in given.items())]
        written = [tensor for one, value in values if _is_written(one) for tensor in _tensors(value)]
        read = [tensor for one, value in values if not _is_written(one) for tensor in _tensors(value)]
        self._recorder.use(read, str(func), writes=False)
        self._recorder.allocate(_tensors(out))
        made = _tensors(out) if "empty" not in str(func) else []
        self._recorder.use([*written, *made], str(func), writes=True)
        return out


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def watched() -> Iterator[RaceRecorder]:
    """On a rank: inside, a CPU has streams, messages go nowhere, and races are found."""
    recorder = RaceRecorder()
    with recorded(recorder), _Watched(recorder):
        yield recorder
