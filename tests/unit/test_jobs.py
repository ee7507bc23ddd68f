"""Threads that update on the host: who waits for one that cannot work hears why, and who wants room waits for it."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest
import torch

from onefold.comm.streams import StreamEvent
from onefold.offload.host import Host
from onefold.offload.transfer import GradientTransfer
from onefold.optim.workers import ByteBudget, Job, UpdateQueue, work

NOWHERE = torch.device("cuda", 99)  # no thread can start there, with a GPU or without


class Ahead(StreamEvent):
    """A point that the device has not come to."""

    def query(self) -> bool:
        return False


def job(after: StreamEvent | None = None) -> Job:
    nothing: Any = None
    return Job(nothing, [], b"\1", 1.0, None, after or StreamEvent(), True, after or StreamEvent())


def test_of_the_jobs_that_are_ready_the_first_of_the_next_forward_is_taken_and_one_that_is_not_waits() -> None:
    line, jobs = UpdateQueue(), [job(), job(), job(Ahead()), job(Ahead())]  # as backward puts them, the last unit first
    for place, one in zip((3, 2, 1, 0), jobs, strict=True):
        line.put(place, one)
    taken = [line.get() for _ in jobs]
    assert [jobs.index(one) for one in taken if one] == [1, 0, 2, 3]
    line.close()
    assert line.get() is None


def test_a_thread_that_cannot_start_fails_the_jobs_that_wait_those_to_come_and_lets_backward_go_on() -> None:
    line, room, before, after = UpdateQueue(), ByteBudget(10), job(), job()
    line.put(0, before)
    room.take(10)
    waiting = threading.Thread(target=room.take, args=(10,), daemon=True)  # backward, with a gradient too many
    waiting.start()
    work(line, room, NOWHERE)
    line.put(0, after)
    waiting.join(timeout=30)
    assert not waiting.is_alive()
    for one in (before, after):
        assert one.done.is_set() and one.error is not None
        with pytest.raises(type(one.error)):
            one.wait()


def test_more_than_the_room_waits_and_what_is_larger_than_all_of_it_goes_alone() -> None:
    room, taken = ByteBudget(10), threading.Event()

    def want(nbytes: int) -> threading.Thread:
        taken.clear()
        thread = threading.Thread(target=lambda: (room.take(nbytes), taken.set()), daemon=True)
        thread.start()
        return thread

    room.take(6)
    room.take(4)
    want(1)
    assert not taken.wait(timeout=0.2)
    room.give(4)
    assert taken.wait(timeout=30)
    large = want(99)
    assert not taken.wait(timeout=0.2)
    room.give(6)
    room.give(1)
    assert taken.wait(timeout=30) and large.join(timeout=30) is None


class Broken:
    """Stands for a unit, and for its optimizer: its file cannot be read."""

    name, unit = "a unit", property(lambda self: self)

    def start_load(self, *_: Any, **__: Any) -> None:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("brought", [False, True])
def test_a_failed_update_gives_the_room_of_its_gradient_back_whoever_still_holds_that(brought: bool) -> None:
    room, broken = ByteBudget(10), cast(Any, Broken())
    transfer = GradientTransfer("a unit", Host(torch.device("cpu")), torch.ones(10), on_released=lambda: room.give(10))
    if brought:
        transfer.start_copy()
    room.take(10)
    failed = Job(broken, [], b"\1", 1.0, transfer, StreamEvent(), True, StreamEvent())
    failed.run()
    failed.done.set()
    with pytest.raises(OSError, match="the disk is gone"):
        failed.wait()
    waiting = threading.Thread(target=room.take, args=(10,), daemon=True)
    waiting.start()
    waiting.join(timeout=30)
    assert not waiting.is_alive() and transfer is not None
