"""Runs an unmodified script whose Trainers train under Onefold.

1 `transformers.Trainer` gets a `__new__` that makes an object of `sharded(cls)` wherever the script makes one of `cls`:
Trainer itself or any subclass, imported or defined before or after. So there is one implementation, that of `sharded`.
2 At stage 3 from_pretrained leaves the values in their files until the model is sharded.  3 The script runs as python
would run it: as __main__, with its own sys.argv and with its folder first in sys.path.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from onefold.hf.launch_deepspeed import following
from onefold.hf.launch_settings import Launch
from onefold.hf.refusals import refuse_engine_flags, refuse_engines
from onefold.hf.trainer import ShardedTrainer, on_mesh, sharded
from onefold.integrations.transformers_loading import deferring


def run(launch: Launch) -> None:
    """Runs the script or module of a launch, in this process."""
    refuse_engines({})
    defer = launch.zero.stage in (3, "auto")
    with trainers_under(lambda cls: _trainer(cls, launch)), deferring() if defer else nullcontext():
        sys.argv = [launch.script, *launch.arguments]
        if launch.module:
            runpy.run_module(launch.script, run_name="__main__", alter_sys=True)
            return
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = str(Path(launch.script).resolve().parent)
        runpy.run_path(launch.script, run_name="__main__")


def _trainer(cls: type, launch: Launch) -> type:
    found: type = sharded(cls, launch.zero, tile_loss=launch.tile_loss)
    if launch.axes is not None:
        found = on_mesh(found, launch.axes)
    return found if launch.deepspeed is None else following(found, launch.deepspeed)


@contextmanager
def trainers_under(made: Callable[[type], type]) -> Iterator[None]:
    """Inside, each Trainer that is made is one of the class `made(cls)`, a subclass of the class asked for; and flags
    that ask for another engine are refused."""
    from transformers import Trainer, TrainingArguments

    under, check = cache(made), TrainingArguments.__post_init__

    def new(cls: Any, *_: Any, **__: Any) -> Any:
        return object.__new__(cls if issubclass(cls, ShardedTrainer) else under(cls))

    def refuse_and_check(self: Any) -> None:
        refuse_engine_flags(self)  # before transformers looks for the engine, or starts it
        check(self)

    Trainer.__new__ = staticmethod(new)
    TrainingArguments.__post_init__ = refuse_and_check
    try:
        yield
    finally:
        # not deleted: Python would then refuse the arguments of every Trainer
        Trainer.__new__ = staticmethod(lambda cls, *_, **__: object.__new__(cls))
        TrainingArguments.__post_init__ = check
