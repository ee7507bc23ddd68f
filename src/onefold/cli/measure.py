"""`onefold measure`: what this device can do, by shape and dtype, as a file for `onefold plan --hardware FILE`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from onefold.comm.shutdown import shutdown
from onefold.cost.rates import Rates
from onefold.errors import ConfigError
from onefold.planner.device.clock import Clock
from onefold.planner.device.record import json_of, measure

Part = Literal[
    "links", "products", "attention", "elementwise", "loss", "blocks", "sustained", "updates", "copies", "host"
]


@dataclass(frozen=True, kw_only=True)
class MeasureCommand:
    """Measure this device in a minute or two: matrix products, attention, updates, copies, links, and the host's time.
    Start it on several ranks, as with torchrun, to measure links too."""

    out: Path | None = None
    """The file to write; by default rates-DEVICE.json in this folder."""

    device: Literal["cuda", "cpu"] | None = None
    """By default the GPU, if there is one."""

    only: tuple[Part, ...] = ()
    """Measure these parts alone."""

    threads: int | None = None
    """Threads that torch computes with on a CPU, as each rank of a run has."""

    disk: Path | None = None
    """A folder on the disk to measure."""

    quick: bool = False
    """Few and tiny sizes, to see that every part works here. Do not plan with it."""

    json: bool = False
    """Print the record too."""

    def run(self) -> int:
        clock = Clock(self._target(), 0.0 if self.quick else 0.01, self.quick)
        if self.disk is not None and not self.disk.is_dir():
            raise ConfigError(f"--disk {self.disk} is no folder; give one on the disk to measure")
        if self.out is not None and not self.out.resolve().parent.is_dir():
            raise ConfigError(f"--out {self.out} lies in no folder; make {self.out.parent} first")
        if self.threads is not None:
            if not 1 <= self.threads <= 4096:
                raise ConfigError(f"--threads {self.threads} is not a number of threads from 1 to 4096")
            torch.set_num_threads(self.threads)
        found = measure(clock, self._command(), self.only, self.disk, self._tell)
        shutdown()
        if int(os.environ.get("RANK", "0")):
            return 0
        out = self.out or Path(f"rates-{re.sub(r'[^a-z0-9]+', '-', found['device'].lower()).strip('-')}.json")
        out.write_text(json_of(found))
        if self.json:
            sys.stdout.write(json_of(found))
        else:
            sys.stdout.write("".join(f"{line}\n" for line in [*Rates(found).lines(), f"written: {out}"]))
        return 0

    def _target(self) -> torch.device:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch finds no GPU here; use --device cpu, or a torch built for CUDA")
        if self.device == "cpu" or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())

    def _command(self) -> str:
        """The command without paths of this machine."""
        words = ["onefold", "measure"]
        words += [f"--device {self.device}"] if self.device else []
        words += ["--only", *self.only] if self.only else []
        words += [f"--threads {self.threads}"] if self.threads else []
        words += ["--disk DIR"] if self.disk else []
        words += ["--quick"] if self.quick else []
        ranks = os.environ.get("WORLD_SIZE", "1")
        return " ".join(words) + (f" (on {shlex.quote(ranks)} ranks)" if ranks != "1" else "")

    def _tell(self, line: str) -> None:
        if "RANK" not in os.environ and not self.json:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
