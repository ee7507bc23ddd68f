"""Methods of a model that compute as its forward does: those that shard(methods=…) names, and Hugging Face's.

Each becomes a forward of its own. Before it, in-flight updates are waited for and parameters are checked; while it
runs, parameters are unsharded where they are used, and inputs are cast where 16 bits compute. Units are all-gathered as
they are needed, and not in the order of forward, since a method may use few of them: all ranks call it alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

import torch
from torch import nn

from onefold.model.containers import as_list, cast_tensors, tensors_in
from onefold.runtime.engine import Engine
from onefold.runtime.unsharding import in_backward


def attach_methods(engine: Engine, open_backward: Callable[[Any], None]) -> None:
    """Surrounds the methods; `open_backward` is called with what a method returns."""
    for name in dict.fromkeys([*engine.resolved.settings.methods, *_of_transformers(engine.model)]):
        method = _surrounded(engine, getattr(engine.model, name), open_backward)
        engine.attachments.attribute(engine.model, name, method)


def _of_transformers(model: nn.Module) -> list[str]:
    """The names of the methods get_image_features, get_text_features and so on of a Hugging Face model."""
    if not any(cls.__name__ == "PreTrainedModel" for cls in type(model).__mro__):
        return []
    names = (name for name in dir(type(model)) if name.startswith("get_") and name.endswith("_features"))
    return [name for name in names if callable(getattr(type(model), name))]


def _surrounded(engine: Engine, method: Callable[..., Any], open_backward: Callable[[Any], None]) -> Callable[..., Any]:
    compute = engine.resolved.precision.compute
    narrow = engine.resolved.precision.narrow
    call = id(method)  # another than that of the model, which the method may call

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if in_backward():  # a recomputation
            engine.enter_backward()
        outermost = not (in_backward() or engine.unsharding.running)
        if outermost:
            engine.before_forward(tensors_in([*args, *kwargs.values()]))
        if narrow:
            assert isinstance(compute, torch.dtype)
            args, kwargs = cast_tensors(args, compute), cast_tensors(kwargs, compute)
        unsharding = engine.unsharding  # a new one if parameters have been unfrozen
        unsharding.enter(call, [])
        try:
            output = method(*args, **kwargs)
        except Exception:
            engine.call_failed()
            with suppress(Exception):  # the first error is the one to raise
                unsharding.leave(call, [], [])
            raise
        except BaseException:
            engine.call_failed()
            unsharding.interrupt(call)
            raise
        if outermost:
            engine.watch.forward_ended()
        unsharding.leave(call, [], as_list(output))
        open_backward(output)
        return output

    return run
