"""The `onefold` command, and each rank that it starts: what must happen before torch is imported, which takes seconds.

1 a signal ends the process at once, with one line and no traceback  2 nothing is imported from the folder that the user
happens to stand in, where others may have put files  3 a process that will fork its ranks has silent libraries and one
thread  4 onefold itself
"""

import os
import signal
import sys
from contextlib import suppress
from types import FrameType

LAUNCHING = ("train", "verify")  # commands that start ranks of Onefold's own
NUMPY_THREADS = "OPENBLAS_NUM_THREADS"  # numpy starts its threads when it is imported, and a fork does not copy them


def _end(number: int, _: FrameType | None) -> None:
    """Not by an exception: libraries that are half imported swallow it, or abort."""
    os.write(2, f"onefold: ended by {signal.Signals(number).name}\n".encode())
    os._exit(128 + number)


def main() -> int:
    rank = "RANK" in os.environ  # its launcher says why it ended
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL if rank else _end)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed: nobody listens
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  for the life of the process

    from onefold.cli.environment import QUIET  # here: signals have their handlers by now

    launching = not rank and sys.argv[1:2] != [] and sys.argv[1] in LAUNCHING
    alone = launching and NUMPY_THREADS not in os.environ
    for name, level in QUIET.items() if launching else ():
        os.environ.setdefault(name, level)
    if alone:
        os.environ[NUMPY_THREADS] = "1"
        with suppress(ImportError):
            import numpy  # noqa: F401  now: the command imports it later
        del os.environ[NUMPY_THREADS]  # the ranks' own is theirs

    from onefold.cli.main import main as run

    return run()


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        sys.path.append(sys.path.pop(0))  # the folder of this file: last, so that it hides nothing
    sys.exit(main())
