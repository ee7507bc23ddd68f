"""A fault at one point of one process, put in from outside: Python imports this file at its start if it is on its path.

ONEFOLD_TEST_FAULT holds {"point": "module:name", "call": n, "rank": r, "what": a signal, or "exception",
"launcher": bool, "fired": path}. When rank r calls that function for the n-th time, it writes the time to `fired` and
strikes itself, or the launcher (an exception there comes by SIGUSR1, for which a handler is set).
"""

import functools
import importlib.abc
import json
import os
import signal
import sys
import time

FAULT = "ONEFOLD_TEST_FAULT"
HEARD_S = 1.0


class Injected(RuntimeError):
    pass


def strike(fault: dict) -> None:
    with open(fault["fired"], "x") as file:  # also proves that it strikes once
        file.write(repr(time.time()))
    if fault["what"] == "exception" and not fault["launcher"]:
        raise Injected("injected")
    number = signal.SIGUSR1 if fault["what"] == "exception" else signal.Signals[fault["what"]]
    os.kill(os.getppid() if fault["launcher"] else os.getpid(), number)
    if fault["launcher"] and fault["what"] in ("SIGTERM", "SIGINT"):
        time.sleep(HEARD_S)  # steps take milliseconds: the run may be done before the launcher passes it on


def wrapped(call, fault: dict):
    calls = 0

    @functools.wraps(call)
    def watched(*args, **kwargs):
        nonlocal calls
        calls += os.environ.get("RANK") == str(fault["rank"])  # now: the launcher, which loads this, may be forked
        if calls == fault["call"]:
            strike(fault)
        return call(*args, **kwargs)

    return watched


class Finder(importlib.abc.MetaPathFinder):
    """Wraps a function as soon as its module is loaded, before anybody can import it from there."""

    def __init__(self, fault: dict) -> None:
        self.fault = fault
        self.module, self.name = fault["point"].split(":")

    def find_spec(self, name, path, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            *outer, last = self.name.split(".")
            holder = functools.reduce(getattr, outer, module)
            setattr(holder, last, wrapped(getattr(holder, last), self.fault))

        spec.loader.exec_module = exec_module
        return spec


def explode(*_) -> None:
    raise Injected("injected")


if FAULT in os.environ:
    import importlib.util

    given = json.loads(os.environ[FAULT])
    sys.meta_path.insert(0, Finder(given))
    if "RANK" not in os.environ:
        signal.signal(signal.SIGUSR1, explode)
