"""`onefold run`: a script of the user's on local ranks, which meet where no other user or machine can reach them.

What torchrun does on one node, without its store: that listens on every interface and, with --standalone, unpickles
what anybody puts there. The script calls onefold.init(): MASTER_ADDR is not set, so that nothing else opens a port.
Signals reach every rank; when one fails all end, and the first to fail is named.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from onefold.checkpoint.memory.places import owned_folder, remove
from onefold.cli.launch import Launch, Launcher, is_rank, say
from onefold.errors import ConfigError
from onefold.train.run.groups import MOST_RANKS, Bounds

SHUTDOWN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Run a script on local ranks. It joins them by onefold.init(), not by init_process_group(). Flags of
    `onefold run` stand before the script, its own behind it: onefold run --ranks 2 script.py --lr 0.1
    """

    ranks: int | None = None
    """Local ranks (processes); by default one per GPU, or 2 on a CPU."""

    max_restarts: int = 0
    """How often to restart all ranks after one was lost; the script resumes from its own checkpoint."""

    elastic: str | None = None
    """MIN:MAX ranks, such as 2:3: after ranks were lost, start those that are left; the script goes on with
    onefold.resilient."""

    timeout_s: float = 600.0
    """Seconds that a rank may be stopped (SIGSTOP) before all ranks are killed."""

    shutdown_s: float = SHUTDOWN_S
    """Seconds that the script has to end by itself after a signal."""

    module: bool = False
    """The script is a module name, as in python -m."""

    script: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """The script, and its own arguments."""

    @staticmethod
    def arrange(arguments: Sequence[str]) -> list[str]:
        """The flags of `onefold run`, then "--", then the script with its own arguments.

        >>> RunCommand.arrange(["--ranks", "2", "script.py", "--ranks", "3"])
        ['--ranks', '2', '--', 'script.py', '--ranks', '3']
        """
        at = 0
        while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "--":
            alone = arguments[at] in ("--module", "-h", "--help") or "=" in arguments[at]
            at += 1 if alone else 2
        return [*arguments[:at], *["--"] * (arguments[at : at + 1] != ["--"]), *arguments[at:]]

    def run(self) -> int:
        if is_rank():
            raise ConfigError("this process is a rank already; call the script directly under torchrun")
        if not self.script:
            raise ConfigError("no script was given; use for example: onefold run --ranks 2 script.py")
        if not self.module and not Path(self.script[0]).is_file():
            raise ConfigError(f"{self.script[0]} is no file; give a Python script, or --module and a module's name")
        bounds = None if self.elastic is None else Bounds.of(self.elastic)
        usual = bounds.most if bounds else torch.cuda.device_count() or 2
        ranks = self.ranks if self.ranks is not None else usual
        for name, value, least in (("ranks", ranks, 1), ("max-restarts", self.max_restarts, 0)):
            if value < least:
                raise ConfigError(f"--{name} {value} is out of range; use a number of at least {least}")
        if ranks > MOST_RANKS:
            raise ConfigError(f"--ranks {ranks} is out of range; use a number of at most {MOST_RANKS:,}")
        if bounds and not bounds.least <= ranks <= bounds.most:
            raise ConfigError(f"--ranks {ranks} is not within --elastic {self.elastic}; leave --ranks out")
        for name, limit_s in (("timeout-s", self.timeout_s), ("shutdown-s", self.shutdown_s)):
            if not 0 < limit_s < float("inf"):
                raise ConfigError(f"--{name} {limit_s:g} is out of range; use a number of seconds above 0")
        command = [sys.executable, *["-m"] * self.module, *self.script]
        launch = Launch(
            ranks=ranks, command=command, max_restarts=self.max_restarts, timeout_s=self.timeout_s,
            shutdown_s=self.shutdown_s, forwards_signals=True,
            elastic=range(bounds.least, bounds.most + 1) if bounds else (),
        )  # fmt: skip
        try:
            outcome = Launcher(launch).run()
        finally:
            remove(owned_folder(os.getpid()))  # copies of onefold.resilient, of a script that failed
        if not outcome.good:
            say(outcome.message)
        return outcome.code
