"""`onefold COMMAND …`: finds the command, reads its settings, runs it. A user's mistake is one line and exit code 2.

A command is a frozen dataclass: its fields are the settings, its `run()` does the work and returns the exit code. If it
has `defaults(arguments)`, that gives the settings which flags change; `arrange(arguments)` gives the words to parse.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import NamedTuple

from onefold.cli.mistakes import said_in_one_line
from onefold.errors import OnefoldError, visible
from onefold.train.run.diagnose import is_out_of_memory
from onefold.version import VERSION

SLOW = ("train", "verify", "simulate", "sample", "measure")  # commands that need torch, which takes seconds to load
QUIET = {"-h", "--help", "--json"}
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Command(NamedTuple):
    """The module and class of a command; imported when it is called, so that no command loads another's libraries."""

    module: str
    name: str
    summary: str


COMMANDS = {
    "train": Command("onefold.cli.train", "TrainCommand", "from text to a trained model"),
    "plan": Command("onefold.cli.plan", "PlanCommand", "what fits, what it costs, what to choose"),
    "verify": Command("onefold.cli.verify", "VerifyCommand", "run two real steps and compare them with the plan"),
    "measure": Command("onefold.cli.measure", "MeasureCommand", "what this device can do, for plans"),
    "simulate": Command("onefold.cli.simulate", "SimulateCommand", "one rank of many, with real memory and no peers"),
    "report": Command("onefold.cli.report", "ReportCommand", "a run, or several, as one page"),
    "sample": Command("onefold.cli.sample", "SampleCommand", "text from a trained model"),
    "export": Command("onefold.cli.checkpoint", "Export", "a checkpoint for Hugging Face, torch or DCP"),
    "inspect": Command("onefold.cli.checkpoint", "Inspect", "what is inside a checkpoint"),
    "import-config": Command("onefold.cli.import_config", "ImportConfig", "what becomes of a DeepSpeed configuration"),
    "import-checkpoint": Command("onefold.cli.import_checkpoint", "ImportCheckpoint", "from DeepSpeed, DCP, torch"),
    "doctor": Command("onefold.cli.doctor", "Doctor", "who kept a run from going on, from its ranks' records"),
    "run": Command("onefold.cli.run", "RunCommand", "your own script on local ranks"),
    "verify-checkpoint": Command("onefold.cli.checkpoint", "VerifyCheckpoint", "check every byte of a checkpoint"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        sys.stdout.write(f"onefold {VERSION}\n")
        return 0
    if not given or given[0] in ("-h", "--help"):
        sys.stdout.write(usage())
        return 0 if given else 2
    command = COMMANDS.get(given[0])
    if command is None:
        return _refuse(f"{given[0]!r} is no command; use one of {', '.join(COMMANDS)}")
    try:
        import tyro
    except ImportError:
        return _refuse("the command line needs two more packages: pip install 'onefold[cli]'")
    if given[0] in SLOW and sys.stderr.isatty() and "RANK" not in os.environ and not QUIET & set(given):
        sys.stderr.write("onefold: loading torch …\n")
        sys.stderr.flush()
    asked: list[int] = []
    try:
        kind = getattr(importlib.import_module(command.module), command.name)
        with _terminable(asked):  # not around the import: what is half imported swallows an exception
            asks_help = bool({"-h", "--help"} & set(given))
            with nullcontext() if asks_help else said_in_one_line(given[0]):
                settings = tyro.cli(
                    kind,
                    prog=f"onefold {given[0]}",
                    args=kind.arrange(given[1:]) if hasattr(kind, "arrange") else given[1:],
                    config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
                    **({"default": kind.defaults(given[1:])} if hasattr(kind, "defaults") else {}),
                )
            return int(settings.run())
    except OnefoldError as error:
        return _refuse(str(error))
    except BrokenPipeError:  # … | head: whoever read it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in a buffer goes there
        return 0
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _refuse(f"out of memory: {str(error).partition(chr(10))[0]}; try a smaller model or batch")
    except OSError as error:  # the last resort: what a file system refuses is seldom a mistake of ours
        if error.filename is None:
            raise
        return _refuse(f"{os.fsdecode(error.filename)}: {error.strerror}")
    except KeyboardInterrupt:
        number = signal.Signals(asked[0] if asked else signal.SIGINT)
        _refuse(f"ended by {number.name}")
        return 128 + number


@contextmanager
def _terminable(asked: list[int]) -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does: cleanup runs, and one line is printed.

    A rank keeps the default handlers and dies at once, inside whatever call it is in: its launcher reports it.
    """

    def interrupt(number: int, _: FrameType | None) -> None:
        asked.append(number)
        raise KeyboardInterrupt

    handlers = dict.fromkeys(SIGNALS, signal.SIG_DFL if "RANK" in os.environ else interrupt)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        del handlers[signal.SIGHUP]  # nohup
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def usage() -> str:
    rows = "".join(f"  {name:<18} {command.summary}\n" for name, command in COMMANDS.items())
    more = "onefold COMMAND --help lists a command's settings, onefold --version says which Onefold this is."
    return f"usage: onefold COMMAND [settings]\n\n{rows}\n{more}\n"


def _refuse(message: str) -> int:
    sys.stderr.write(f"onefold: {visible(message)}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
