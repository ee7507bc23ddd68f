"""compile=: every block is compiled by itself, so that equal blocks share a graph, and hooks stay outside of graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn

from onefold.errors import ModelError
from onefold.runtime.calls import compiled_module, copy_as_plain
from onefold.runtime.engine import Engine


def forget_graphs() -> None:
    """Lets torch.compile trace models anew. A graph of the time before shard() has no hooks and no recomputation in it,
    and torch does not look for them again."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def compile_blocks(engine: Engine) -> None:
    """Compiles the forward of each block, unless its user has compiled it."""
    options = engine.resolved.settings.compile_options
    modules = dict(engine.model.named_modules())
    for name in engine.resolved.blocks if options is not None else ():
        block = modules[name]
        if block._compiled_call_impl is None and compiled_module(block.forward) is None:
            copy_as_plain(block, engine.attachments)
            engine.attachments.attribute(block, "forward", _compiled(name, block, options or {}))


def _compiled(name: str, block: nn.Module, options: Mapping[str, Any]) -> Callable[..., Any]:
    compiled = torch.compile(block.forward, **options)
    from torch._dynamo.exc import TorchDynamoException  # torch.compile has imported it

    what = f"{name} ({type(block).__name__})"
    whole = "leave out fullgraph=True, and that part runs uncompiled"
    remedy = f"change the block, or {whole if options.get('fullgraph') else 'leave out compile='}"

    @wraps(compiled)
    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            why = str(error).strip().partition("\n")[0]
            raise ModelError(f"torch.compile cannot compile {what}: {why}; {remedy}") from error

    return forward
