"""Spans: names in the torch profiler's trace for what Onefold does. Without a profiler a span costs almost nothing.

A span is named `onefold.VERB WHAT OF`: `onefold.wait gather-forward blocks.3`. torch's profiler records it among its
own events, whether `onefold.profile` or a user has started it.

    start, sum          messages: what this rank does to send and receive them, and to sum what it received
    wait                for messages of peers, for a host update, for memory that host updates hold, a copy, a disk
    upload, download    a copy to the device, or from it
    update              of one unit: in step, in backward, or on the host
    forward, again      of the model, of a block, and of a block that is computed again in backward
    close, clip, step   the end of backward, and calls of the optimizer
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
SAFE = " !#$&'()*+,-./:;<=>?@[]^_`{|}~"  # characters a trace can hold beside letters and digits: it escapes nothing

P = ParamSpec("P")
T = TypeVar("T")


class SpanName(NamedTuple):
    """The parts of a span's name."""

    verb: str
    what: str
    of: str


def span(verb: str, what: str, of: str) -> AbstractContextManager[Any]:
    """A span around something that Onefold does. Without a profiler it costs the check of one flag."""
    return named_span(span_name(verb, what, of)) if profiler._is_profiler_enabled else NOTHING


def named_span(name: str) -> AbstractContextManager[Any]:
    """A span of any name, around something that Onefold does."""
    return Span(name) if profiler._is_profiler_enabled else NOTHING


class Span:
    """A fast record_function, which takes a tenth of its time. If another thread starts the profiler inside a span,
    torch raises at the span's end, which is suppressed."""

    __slots__ = ("_inner",)

    def __init__(self, name: str) -> None:
        self._inner = torch._C._profiler._RecordFunctionFast(name)

    def __enter__(self) -> None:
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        with suppress(RuntimeError):
            self._inner.__exit__(*error)


def spanned(verb: str, what: str, of: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator that puts a span around every call of a function."""

    def around(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with span(verb, what, of):
                return function(*args, **kwargs)

        return called

    return around


@lru_cache(maxsize=8192)
def span_name(verb: str, what: str, of: str) -> str:
    return f"{PREFIX}{verb} {what} {quote(of.replace('…', '...'), safe=SAFE)}"


def read(name: str) -> SpanName | None:
    """The parts of a trace event's name, if the event is a span of Onefold.

    >>> read("onefold.wait gather-forward blocks.3")
    SpanName(verb='wait', what='gather-forward', of='blocks.3')
    >>> read("aten::mm") is None
    True
    """
    if not name.startswith(PREFIX):
        return None
    verb, what, of = (*name.removeprefix(PREFIX).split(" ", 2), "", "")[:3]
    return SpanName(verb, what, unquote(of).replace("...", "…"))
