"""torch's own launcher, as a child of ours: it ends with us, and tells us how ranks ended instead of the screen."""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys

from onefold.cli.lifeline import LINE, connect, follow_launcher


def main() -> int:
    follow_launcher()
    logging.disable(logging.ERROR)  # that a rank failed is said once, by the launcher
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(bool(error.code))
    except Exception as error:
        failures = getattr(error, "failures", None)  # of ChildFailedError: by rank
        if failures is None:
            raise
        line = connect(os.environ[LINE])
        if line is not None:
            line.sendall(json.dumps({"ended": {rank: one.exitcode for rank, one in failures.items()}}).encode() + b"\n")
            line.close()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
