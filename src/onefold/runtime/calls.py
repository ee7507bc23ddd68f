"""Calls of modules, surrounded: what Onefold does before and after a module's forward and its users' hooks.

A surrounded call is skipped by torch.compile, while the module's own forward is compiled as usual: so compiled graphs
hold a module's compute and nothing of Onefold's, wherever torch.compile was applied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame  # of the thread: what compiles the functions that it calls

from onefold.runtime.attachments import Attachments

REPLACED = ("_call_impl", "_compiled_call_impl", "compile")  # attributes of a module


class Around(NamedTuple):
    """What runs around a call of a module."""

    before: Callable[[Sequence[Any], Mapping[str, Any]], None]  # with the arguments
    after: Callable[[Any], None]  # with the output
    failed: Callable[[], None]  # after an exception, also one of `before`
    interrupted: Callable[[], None]  # after KeyboardInterrupt or SystemExit


def surround(module: nn.Module, around: Around, attachments: Attachments) -> None:
    before, after, failed, interrupted = (torch._disable_dynamo(one) for one in around)

    def surrounded(call: Callable[..., Any], *, compiled: bool) -> Callable[..., Any]:
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            try:
                before(args, kwargs)
                output = call(*args, **kwargs)
            except Exception:
                with suppress(Exception):  # the first error is the one to raise
                    failed()
                raise
            except BaseException:
                interrupted()
                raise
            after(output)
            return output

        return run

    replace_calls(module, surrounded, attachments)


class Replacement(Protocol):
    def __call__(self, call: Callable[..., Any], *, compiled: bool) -> Callable[..., Any]:
        """A method of the module to be called instead of `call`, which is `compiled` if the user has compiled it."""
        ...


def replace_calls(module: nn.Module, replacement: Replacement, attachments: Attachments) -> None:
    """Replaces what runs when the module is called. From now on, module.compile() compiles its forward. A deep copy of
    the module is called as it was called before."""
    copy_as_plain(module, attachments)
    for name in ("_call_impl", "_compiled_call_impl"):  # the second by module.compile()
        call = getattr(module, name)
        if call is not None:
            run = replacement(call, compiled=name == "_compiled_call_impl")
            skip_frames(run)
            attachments.attribute(module, name, MethodType(run, module))
    attachments.attribute(module, "compile", partial(_compile_forward, module))


def copy_as_plain(module: nn.Module, attachments: Attachments) -> None:
    """A deep copy of the module will be called as the module is now, and is not compiled."""
    own = module.__dict__
    if "__deepcopy__" not in own:
        before = {name: own[name] for name in REPLACED if name in own}
        attachments.attribute(module, "__deepcopy__", partial(_copied, module, before))


def replace_forward(
    module: nn.Module, instead: Callable[[Callable[..., Any]], Callable[..., Any]], attachments: Attachments
) -> None:
    """Runs `instead(forward)` wherever the module's forward would run, which users may compile or replace meanwhile.
    Hooks of the module run around it as ever. It is never compiled itself, but the forward that it gets is, wherever it
    is called, also for torch.compile of a model around the module: torch's checkpoint function turns the compiler off,
    and backward has none. Where module.compile() came before, hooks are part of what is compiled, and of that
    forward."""
    own = module.__dict__

    def replacement(call: Callable[..., Any], *, compiled: bool) -> Callable[..., Any]:
        def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            compiler, before = set_eval_frame(None), own.get("forward")
            try:
                if compiled:
                    return instead(_compiled_by(compiler, call))(*args, **kwargs)
                own["forward"] = instead(_compiled_by(compiler, module.forward))
                return call(*args, **kwargs)
            finally:
                own.pop("forward", None) if before is None else own.update(forward=before)
                set_eval_frame(compiler)

        return run

    replace_calls(module, replacement, attachments)


def _compiled_by(compiler: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Calls forward as if it were called where `compiler` was the thread's, whatever it is by then."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(compiler)
        try:
            return forward(*args, **kwargs)
        finally:
            set_eval_frame(before)

    return run


def skip_frames(*functions: Callable[..., Any]) -> None:
    """torch.compile never traces these functions, which may run while its compiled code does. It may trace what they
    call, unless that is skipped or disabled too."""
    from torch._dynamo.decorators import skip  # a slow import, which making any torch optimizer needs too

    for function in functions:
        skip(function)


def _compile_forward(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """nn.Module.compile() of a surrounded module."""
    module.forward = torch.compile(module.forward, *args, **kwargs)


def compiled_module(forward: object) -> object:
    """The module whose forward torch.compile(module.forward) has compiled to this function; None if it is none."""
    return getattr(getattr(forward, "_torchdynamo_orig_callable", None), "__self__", None)


def _copied(module: nn.Module, before: dict[str, Any], memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a surrounded module: a plain one. `before` has the replaced attributes as the module had them."""
    own = module.__dict__
    ours = {name: own.pop(name) for name in (*REPLACED, "__deepcopy__") if name in own}
    if compiled_module(own.get("forward")) is module:
        ours["forward"] = own.pop("forward")  # bound to this module
    own.update(before)
    try:
        return copy.deepcopy(module, memo)
    finally:
        own.update(ours)
