"""The systems that are measured, by name: how each is built, and what is known of it beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from benchmarks.systems.loop import Ready
from benchmarks.work import Work

Agrees = Literal["every step", "first step", "nothing"]


class System(NamedTuple):
    where: str  # module:function, imported by the process that is to run it, and no other
    settings: dict[str, Any]
    moves: float  # what a rank sends in a step by theory, in Ψ(N-1)/N elements
    agrees: Agrees = "every step"  # how many of its losses are to be those of the reference
    near: float | None = None  # how close, if that is not the work's
    needs: str | None = None  # a library that is not always there

    def build(self, work: Work) -> Ready:
        module, _, name = self.where.partition(":")
        build: Callable[..., Ready] = getattr(import_module(f"benchmarks.systems.{module}"), name)
        return partial(build, **self.settings)(work)


def ours(moves: float, **settings: Any) -> System:
    return System("ours:ours", settings, moves)


def of_torch(name: str, moves: float, agrees: Agrees = "every step", **settings: Any) -> System:
    return System(f"torchs:{name}", settings, moves, agrees)


def of_deepspeed(stage: int, moves: float) -> System:
    """After equal first losses DeepSpeed's drift, in fp32 too."""
    return System("deepspeeds:deepspeed", {"stage": stage}, moves, near=0.1, needs="deepspeed")


SYSTEMS = {
    "floor": of_torch("floor", 0, "first step"),  # ranks train apart, or in bf16 without a master
    "amp": of_torch("amp", 0),
    "amp+compile": of_torch("amp", 0, compiled=True),
    "ddp": of_torch("ddp", 2),
    "zero1": of_torch("zero1", 3),  # gradients to all, then updated parameters
    "fsdp2": of_torch("fsdp2", 3),
    "fsdp2+compile": of_torch("fsdp2", 3, compiled=True),
    "deepspeed1": of_deepspeed(1, 2),
    "deepspeed2": of_deepspeed(2, 2),
    "deepspeed3": of_deepspeed(3, 3),
    "stage0": ours(2, stage=0),
    "stage1": ours(2, stage=1),
    "stage2": ours(2, stage=2),
    "stage3": ours(3, stage=3),
    "stage3+prefetch0": ours(3, stage=3, prefetch=0),
    "stage3+prefetch2": ours(3, stage=3, prefetch=2),
    "stage3+prefetch-auto": ours(3, stage=3, prefetch="auto"),
    "onefold": ours(3),  # stage 3, as it comes
    "onefold+inside": ours(3, inside=True),  # updated in backward
    "onefold+clip": System("ours:ours", {"clip": True}, 3, "first step"),
    "onefold+compile": ours(3, compiled=True),
    "onefold+inside+compile": ours(3, inside=True, compiled=True),
}


def missing(name: str) -> str | None:
    """Why a system cannot run here, in a line."""
    library = SYSTEMS[name].needs
    if library is None or find_spec(library) is not None:
        return None
    return f"{name} is left out: it needs {library}, which is not installed; pip install 'onefold[peers]'"
