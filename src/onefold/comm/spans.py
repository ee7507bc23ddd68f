"""Names for what the engine does, in the trace of whoever profiles; next to nothing where nobody does.

A span is called `onefold.VERB WHAT OF`: `onefold.wait gather-forward blocks.3`. torch's profiler keeps it among its own
events, whoever started it: `onefold.profile`, or a user.

    start, sum          messages: what this rank does to send and receive them, and to add what came
    wait                for messages of peers, for an update on the host, for room there, for a copy, for a disk
    upload, download    a copy to the device, or from it
    update              of one unit: in step, inside backward, or on the host
    forward, again      of the model, of a block, and of a block that is computed again in backward
    close, clip, step   the end of backward, and what the optimizer is asked for
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import lru_cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar
from urllib.parse import quote, unquote

import torch
import torch.autograd.profiler as profiler

PREFIX = "onefold."
NOTHING = nullcontext()
SAFE = " !#$&'()*+,-./:;<=>?@[]^_`{|}~"  # what a trace can hold beside letters and digits: it escapes nothing

P = ParamSpec("P")
T = TypeVar("T")


class Said(NamedTuple):
    """A span's name, taken apart."""

    verb: str
    what: str
    of: str


def span(verb: str, what: str, of: str) -> AbstractContextManager[Any]:
    """Around something the engine does. Costs a look at one flag if nobody profiles."""
    return marked(named(verb, what, of)) if profiler._is_profiler_enabled else NOTHING


def marked(name: str) -> AbstractContextManager[Any]:
    """The same under any name."""
    return Span(name) if profiler._is_profiler_enabled else NOTHING


class Span:
    """record_function takes 10 times longer. What is on its way in one thread while another starts to profile has not
    been opened, and torch would complain when it is closed."""

    __slots__ = ("_inner",)

    def __init__(self, name: str) -> None:
        self._inner = torch._C._profiler._RecordFunctionFast(name)

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        with suppress(RuntimeError):
            self._inner.__exit__(*error)


def spanned(verb: str, what: str, of: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """The same around every call of a function."""

    def around(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(verb, what, of):
                return function(*args, **kwargs)

        return called

    return around


@lru_cache(maxsize=8192)
def named(verb: str, what: str, of: str) -> str:
    return f"{PREFIX}{verb} {what} {quote(of.replace('…', '...'), safe=SAFE)}"


def read(name: str) -> Said | None:
    """What the name of an event says, if it is one of ours.

    >>> read("onefold.wait gather-forward blocks.3")
    Said(verb='wait', what='gather-forward', of='blocks.3')
    >>> read("aten::mm") is None
    True
    """
    if not name.startswith(PREFIX):
        return None
    verb, what, of = (*name.removeprefix(PREFIX).split(" ", 2), "", "")[:3]
    return Said(verb, what, unquote(of).replace("...", "…"))
