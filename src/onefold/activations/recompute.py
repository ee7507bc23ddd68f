"""Activation checkpointing of blocks: each is computed again in backward, from inputs that a store keeps.

A block's forward runs in torch's own non-reentrant checkpoint, which saves the block's inputs as autograd's saved
tensors, and nothing else. So saved_tensors_hooks around that call see the inputs alone. Inputs that require a gradient
go to the store; others (masks, tables that all blocks share) and parameters stay where they are.

If the user has saved_tensors_hooks around the model (a checkpoint of several blocks, save_on_cpu), these keep the
inputs, and the store does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from onefold.activations.store import Call, KeptInput, Store
from onefold.comm.spans import span
from onefold.errors import ConfigError
from onefold.model.containers import tensors_in
from onefold.runtime.calls import replace_forward
from onefold.runtime.engine import Engine
from onefold.runtime.unsharding import Unsharding, in_backward


class Wrapped(NamedTuple):
    """An input that is a tensor subclass around one tensor, such as a DTensor, whose inner tensor is kept."""

    kept: KeptInput
    rebuild: Callable[[Tensor], Tensor]


def other_hooks_save(unsharding: Unsharding) -> bool:
    """Whether the innermost saved_tensors_hooks are not Onefold's."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and top[0] != unsharding.pack


class ChangedBuffers:
    """Buffers that a block's forward changes, such as BatchNorm's statistics; the recomputation must not change them a
    second time."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._names = {  # BatchNorm changes its statistics without incrementing their version
            f"{prefix}.{name}" if prefix else name
            for prefix, module in block.named_modules()
            if isinstance(module, _NormBase)
            for name in module._buffers
        }

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around a block's forward: records which buffers it changes."""
        before = {name: buffer._version for name, buffer in self._block.named_buffers()}
        yield
        after = self._block.named_buffers()
        self._names |= {name for name, buffer in after if buffer._version != before.get(name)}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Around a recomputation: restores the buffers that it changes."""
        kept = {name: buffer.clone() for name, buffer in self._block.named_buffers() if name in self._names}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, buffer in self._block.named_buffers():
                    if name in kept:
                        buffer.data.copy_(kept[name])  # .data: no new version, since a graph may have saved the buffer


class Recompute:
    """Makes the blocks of a model recompute in backward from the inputs in a store."""

    def __init__(self, engine: Engine, store: Store, policy: str) -> None:
        self.store, self.policy = store, policy
        self._unsharding: Unsharding = engine.unsharding
        self._attachments = engine.attachments
        self._attached = 0  # blocks
        self._keeping = frozenset[str]()  # of them, those that keep their activations

    def keep(self, blocks: frozenset[str]) -> None:
        """These blocks keep their activations from the next forward on, and no others. No graph is alive."""
        self._keeping = blocks
        self.store.start_anew(self._attached - len(blocks))

    def attach(self, model: nn.Module, blocks: Sequence[str]) -> None:
        modules, self._attached = dict(model.named_modules()), len(blocks)
        for name in blocks:
            self._surround(name, modules[name])
        self._attachments.hook(model.register_forward_pre_hook(self._begin, prepend=True))
        self._attachments.hook(model.register_forward_hook(self._end))

    def _surround(self, name: str, block: nn.Module) -> None:
        """Recomputes whatever forward the block has when it is called. Hooks of the block are not called again, unless
        block.compile() came before shard() and made them part of what is compiled."""
        written = ChangedBuffers(block)
        replace_forward(block, lambda forward: self._recomputed(name, forward, written), self._attachments)

    def _recomputed(self, name: str, forward: Callable[..., Any], written: ChangedBuffers) -> Callable[..., Any]:
        @wraps(forward)
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or name in self._keeping:
                return forward(*args, **kwargs)
            leaves, spec = tree_flatten((args, kwargs))
            given = [(args, kwargs)]  # the first run gets the caller's own containers, to which a block may write

            def run(*leaves: Any) -> Any:
                if given:
                    args, kwargs = given.pop()
                    with written.recording():
                        return forward(*args, **kwargs)
                args, kwargs = tree_unflatten(leaves, spec)
                with written.restored(), span("again", "forward", name):
                    return forward(*args, **kwargs)

            call = self.store.call(name)
            if other_hooks_save(self._unsharding):
                return checkpoint(run, *leaves, use_reentrant=False)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: self._pack(call, t), self._unpack):
                return checkpoint(run, *leaves, use_reentrant=False)

        return recomputed

    def _pack(self, call: Call, tensor: Tensor) -> Any:
        """saved_tensors_hooks' pack: what autograd keeps of a block's input until backward."""
        if not tensor.requires_grad or not tensor.numel() or isinstance(tensor, nn.Parameter):
            return self._unsharding.pack(tensor)
        if hasattr(tensor, "__tensor_flatten__"):
            return self._pack_wrapped(call, tensor)
        if self._unsharding.holds(tensor):
            return self._unsharding.pack(tensor)
        with torch.no_grad():
            return self.store.keep(call, tensor)

    def _pack_wrapped(self, call: Call, tensor: Any) -> Any:
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        inner = [name for name, part in parts.items() if isinstance(part, Tensor)]
        if len(inner) != 1:
            return self._unsharding.pack(tensor)
        split = [place for place in getattr(tensor, "placements", ()) if not place.is_replicate()]
        if split and self.store.ranks > 1:
            raise ConfigError(
                f"activations={self.policy!r} partitions inputs that are replicated over the mesh axis 'tp', but the "
                f"input of {call.name} is split over it already ({split[0]}: sequence parallelism); use "
                f"{self.policy.replace('partition', 'checkpoint')!r}"
            )
        size, stride, cls = tensor.size(), tensor.stride(), type(tensor)
        with torch.no_grad():
            kept = self.store.keep(call, parts.pop(inner[0]))
        return Wrapped(
            kept, lambda part: cls.__tensor_unflatten__({inner[0]: part, **parts}, context, size, stride).detach()
        )

    def _unpack(self, saved: Any) -> Tensor:
        """saved_tensors_hooks' unpack: restores a block's input before the block is computed again."""
        with torch.no_grad():
            if isinstance(saved, KeptInput):
                return saved.restore()
            if isinstance(saved, Wrapped):
                return saved.rebuild(saved.kept.restore())
        return self._unsharding.unpack(saved)

    # -- the root's forward -----------------------------------------------------------------------------------------

    @torch._disable_dynamo
    def _begin(self, *_: Any) -> None:
        if torch.is_grad_enabled() and not in_backward():
            self.store.begin_forward()

    @torch._disable_dynamo
    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or in_backward():
            return
        if self.store.moving and self.store.calls and not self.store.parts:
            raise ConfigError(
                f"activations={self.policy!r} has nothing to do: no block was given an activation that carries a "
                f"gradient, or saved_tensors_hooks of your own (a checkpoint around the model) keep them; use "
                f'activations="checkpoint"'
            )
        last = self.store.end_forward()  # backward begins with this call
        for tensor in tensors_in(output) if self.store.moving else ():
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda _: self.store.start_restore(last))
