"""The systems that are measured, by name: how each is built, and what is known of it beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.systems.loop import Ready
from benchmarks.work import Work

Agrees = Literal["every step", "first step"]


class System(NamedTuple):
    label: str  # in tables
    where: str  # module:function, imported by the process that is to run it, and no other
    settings: dict[str, Any]
    moves: float  # what a rank sends in a step by theory, in Ψ(N-1)/N elements
    agrees: Agrees = "every step"  # which of its losses are to be those of the base
    needs: str | None = None  # a library that is not always there
    checkout: str | None = None  # another checkout of this project whose code runs it; else this one's

    def build(self, work: Work) -> Ready:
        module, _, name = self.where.partition(":")
        build: Callable[..., Ready] = getattr(import_module(f"benchmarks.systems.{module}"), name)
        return build(work, **self.settings)


def ours(label: str, moves: float, agrees: Agrees = "every step", **settings: Any) -> System:
    return System(label, "ours:ours", settings, moves, agrees)


def lean(label: str, state: str, accumulate: str = "fp32", **settings: Any) -> System:
    settings |= {"compile": True, "activations": "auto", "tile": 4096, "accumulate": accumulate, "state": state}
    return ours(label, 3, "first step", **settings)


def of_torch(label: str, name: str, moves: float, agrees: Agrees = "every step", **settings: Any) -> System:
    return System(label, f"torchs:{name}", settings, moves, agrees)


def of_deepspeed(stage: int, moves: float) -> System:
    return System(f"DeepSpeed {stage}", "deepspeeds:deepspeed", {"stage": stage}, moves, needs="deepspeed")


SYSTEMS = {
    "floor": of_torch("compute only", "floor", 0, "first step"),  # ranks train apart; or bf16 without a master
    "amp": of_torch("autocast, fp32 parameters", "amp", 0),
    "amp+compile": of_torch("autocast, compiled", "amp", 0, compiled=True),
    "ddp": of_torch("DDP", "ddp", 2),
    "zero1": of_torch("DDP + ZeroRedundancyOptimizer", "zero1", 3),  # gradients to all, then updated parameters
    "fsdp2": of_torch("FSDP2", "fsdp2", 3),
    "fsdp2+compile": of_torch("FSDP2, compiled", "fsdp2", 3, compiled=True),
    "deepspeed1": of_deepspeed(1, 2),
    "deepspeed2": of_deepspeed(2, 2),
    "deepspeed3": of_deepspeed(3, 3),
    "stage0": ours("Onefold, stage 0", 2, stage=0),
    "stage1": ours("Onefold, stage 1", 2, stage=1),
    "stage2": ours("Onefold, stage 2", 2, stage=2),
    "stage2+overlap": ours("Onefold, stage 2, gathered in forward", 2, stage=2, overlap_param_gather=True),
    "stage3": ours("Onefold, stage 3", 3, stage=3),
    "stage3+prefetch0": ours("Onefold, stage 3, gathered at need", 3, stage=3, prefetch=0),
    "stage3+prefetch2": ours("Onefold, stage 3, two units ahead", 3, stage=3, prefetch=2),
    "stage3+prefetch-auto": ours("Onefold, stage 3, prefetch auto", 3, stage=3, prefetch="auto"),
    "onefold": ours("Onefold", 3),  # stage 3, as it comes
    "onefold+keep": ours("Onefold, not resharded after forward", 2, reshard_after_forward=False),
    "onefold+inside": ours("Onefold, updated in backward", 3, inside=True),
    "onefold+clip": ours("Onefold, clipped", 3, "first step", clip=1.0),  # the base does not clip
    "onefold+clip-never": ours("Onefold, the norm below its limit", 3, clip=1e9),
    "onefold+clip-always": ours("Onefold, every step clipped", 3, "first step", clip=1e-6),
    "onefold+compile": ours("Onefold, compiled", 3, compiled=True),
    # Of Muon's matrices also gradients, masters and updated masters move once between shards and owners: 1/N each.
    "stage2+muon": ours("Onefold, stage 2, Muon", 3, "first step", stage=2, muon=True),
    "onefold+muon": ours("Onefold, Muon", 4.5, "first step", muon=True),
    # torch's arithmetic: on CPUs with bf16 instructions faster than fp32, on others much slower.
    "onefold+muon+bf16": ours("Onefold, Muon in bf16", 4.5, "first step", muon=True, products="bf16"),
    "onefold+inside+muon": ours("Onefold, Muon, updated in backward", 4.5, "first step", inside=True, muon=True),
    # What one fine-tunes giants with: blocks compiled, moments and sums over micro-batches in bf16, the loss by tiles.
    "onefold+lean": lean("Onefold, compiled, bf16 moments, tiled loss", "bf16", accumulate="bf16"),
    "onefold+lean8": lean("Onefold, compiled, 8-bit moments, tiled loss", "8bit", accumulate="bf16"),
    "onefold+lean8+inside": lean(
        "Onefold, compiled, 8-bit moments, tiled loss, updated in backward", "8bit", inside=True
    ),
    "onefold+inside+compile": ours("Onefold, updated in backward, compiled", 3, inside=True, compiled=True),
}


OTHER = "other:"  # before the name of a system that another checkout runs


def add_other(checkout: Path, names: Iterable[str]) -> list[str]:
    """Add those of these systems that are ours once more, as another checkout of this project runs them."""
    names = [name for name in names if SYSTEMS[name].where == "ours:ours"]
    for name in names:
        found = SYSTEMS[name]
        SYSTEMS[OTHER + name] = found._replace(label=f"{found.label}, other checkout", checkout=str(checkout.resolve()))
    return [OTHER + name for name in names]


def missing(name: str) -> str | None:
    """Why a system cannot run here, in a line."""
    library = SYSTEMS[name].needs
    if library is None or find_spec(library) is not None:
        return None
    return f"{name} is left out: it needs {library}, which is not installed; pip install 'onefold[peers]'"
