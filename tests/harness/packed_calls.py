"""What a test and its ranks say to each other. Plain pickles: a tensor crosses by value, never by shared memory."""

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple


class Setup(NamedTuple):
    """Everything a rank process needs to know before it is called."""

    rank: int
    world_size: int
    store_port: int
    init: bool  # join a default group before the call
    once: bool  # one call, then exit: a fresh rank, not a pool's
    env: dict[str, str]
    stacks_path: str
    backend: str = "gloo"


# From the test to a rank. The end of the pipe means: exit.
class Call(NamedTuple):
    payload: bytes  # pickled apart, so that a rank can report why it could not load it


class Reset(NamedTuple):
    generation: int  # leave every group, then meet again under this name


# From a rank to the test.
class Ready(NamedTuple):
    pass


class Told(NamedTuple):
    payload: bytes


class Returned(NamedTuple):
    payload: bytes
    seconds: float
    left_groups: bool  # the call made or destroyed process groups, so the next one needs a Reset


class Raised(NamedTuple):
    type_name: str
    message: str
    traceback: str
    at_s: float  # time.monotonic(), which all processes of a machine share
    seconds: float


class Died(NamedTuple):
    """Not said by the rank, but seen by the test: its process ended."""

    exitcode: int


Reply = Returned | Raised | Died


def name_of(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", repr(fn))


def pack_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    try:
        return Call(pickle.dumps((fn, args, kwargs)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"cannot send {name_of(fn)} to a rank: {error}; "
            "the function must be defined at module level and its arguments must pickle"
        ) from error
