"""Watches that a model whose sequences are cut attends across the cuts.

A rank has one stretch of each sequence. Attention that knows nothing of the others computes something, and trains
something, but not the model. So every forward must call sequence_attention(), and the first one must not call torch's
own attention beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from onefold.comm.meter import Meter
from onefold.comm.sequence import SequenceGroup
from onefold.errors import ModelError
from onefold.model.mixing import REMEDY


class NoSequences:
    """Where no sequences are cut: nothing to watch."""

    def serve(self) -> None:
        pass

    def enter(self) -> None:
        pass

    def leave(self, *, failed: bool = False) -> None:
        pass


class SequenceWatch(NoSequences):
    """Around the forwards of one model. With `compiled` blocks, torch's own attention is inside graphs, unseen."""

    def __init__(
        self, model: nn.Module, group: SequenceGroup, meter: Meter, timeout_s: float, *, compiled: bool
    ) -> None:
        self._model, self._group, self._meter, self._timeout_s = model, group, meter, timeout_s
        self._first = None if compiled else _NoOtherAttention(model, group)
        self._entered: _NoOtherAttention | None = None
        self._before = 0  # calls of attention when the forward began

    def serve(self) -> None:
        """What attention sends from here on is sent for this model."""
        self._group.serve(self._meter, self._timeout_s)

    def enter(self) -> None:
        self._before = self._group.calls
        self._entered, self._first = self._first, None
        if self._entered is not None:
            self._entered.__enter__()

    def leave(self, *, failed: bool = False) -> None:
        mode, self._entered = self._entered, None
        if mode is not None:
            mode.__exit__(None, None, None)
        if not failed and self._group.calls == self._before:
            raise ModelError(
                f'the mesh cuts sequences over {self._group.size} ranks ("sequence"), but the forward of '
                f"{type(self._model).__name__} did not call sequence_attention(), so tokens of one rank never saw "
                f"those of others; use {REMEDY}, or a mesh without that axis"
            )


class _NoOtherAttention(TorchFunctionMode):
    """Raises where torch's own attention is called by anyone but sequence_attention()."""

    def __init__(self, model: nn.Module, group: SequenceGroup) -> None:
        super().__init__()
        self._model, self._group = model, group

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and not self._group.attending:
            raise ModelError(
                f"{_calling_module(self._model)} calls torch's scaled_dot_product_attention, which sees only this "
                f"rank's stretch of each sequence, and the mesh cuts sequences over {self._group.size} ranks "
                f'("sequence"); use {REMEDY}'
            )
        return func(*args, **(kwargs or {}))


def _calling_module(model: nn.Module) -> str:
    """The innermost module of the model that is being called."""
    names = {id(module): name for name, module in model.named_modules()}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, nn.Module) and id(found) in names:
            return f"{names[id(found)] or 'the model'} ({type(found).__name__})"
        frame = frame.f_back
    return type(model).__name__
