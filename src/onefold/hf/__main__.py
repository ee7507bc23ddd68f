"""`python -m onefold.hf`: a user's mistake is one line and exit code 2; all else is as the script leaves it."""

from __future__ import annotations

import os
import sys

from onefold import ConfigError, ModelError, OnefoldError, OptimizerError
from onefold.errors import visible
from onefold.hf.launch_settings import parse

MISTAKES = (ConfigError, ModelError, OptimizerError)  # found before training


def main() -> int:
    rank = os.environ.get("RANK", "0")
    try:
        launch = parse(sys.argv[1:])
    except OnefoldError as error:  # every rank reads the same command line
        return _refuse(error) if os.environ.get("LOCAL_RANK", "0") == "0" else 2
    try:
        from onefold.hf.launch import run
    except ImportError as error:
        return _refuse(f"{error}; pip install 'onefold[hf]'")
    try:
        run(launch)
    except MISTAKES as error:
        return _refuse(f"rank {rank}: {error}" if rank != "0" else error)
    return 0


def _refuse(message: object) -> int:
    sys.stderr.write(f"onefold.hf: {visible(message)}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
