"""activations="auto": decided when the first block runs, from what it keeps and from what is left of memory.

The first block of the first forward runs as it is, and what autograd keeps of it is counted, each storage once. From
that and from the size of its input follows what each policy would need, and how many blocks may keep their activations
beside those that are computed again. The ranks take the largest needs and the smallest memory of all, so that all
decide alike.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from onefold.activations.policy import attach_policy, recompute
from onefold.activations.recompute import other_hooks_save
from onefold.comm.meter import Label
from onefold.cost.recomputed import Seen, choose_policy
from onefold.model.containers import tensors_in
from onefold.model.storage import storage_key
from onefold.runtime.attachments import Attachments
from onefold.runtime.automatic import room_left
from onefold.runtime.block_choice import BlockChoice
from onefold.runtime.calls import replace_forward
from onefold.runtime.engine import Engine
from onefold.runtime.unsharding import in_backward

LOG = logging.getLogger("onefold")
LEFT = 'activations="auto" leaves them to the checkpoint around the model, or other hooks on saved tensors'
UNDECIDED = 'activations="auto" decides when the first block runs'


def attach_activations(engine: Engine) -> None:
    """Apply what activations= asks for, at once or, with "auto", when the first block has run."""
    resolved = engine.resolved
    if resolved.activations_wait:
        AutomaticActivations(engine)
    else:
        attach_policy(engine, resolved.settings.activations, resolved.recomputed)


class AutomaticActivations:
    """Waits for the first block to run."""

    def __init__(self, engine: Engine) -> None:
        resolved = engine.resolved
        self._engine, self._tensor = engine, engine.comms.tp
        self._blocks = resolved.recomputed
        self._others = len(resolved.blocks) - len(self._blocks)  # that keep their activations in any case
        self._bytes: dict[int, int] = {}
        self._attachments = Attachments()  # until it is decided
        modules = dict(engine.model.named_modules())
        for name in self._blocks:
            replace_forward(modules[name], self._watched, self._attachments)
        engine.attachments.change(self._attachments.remove)
        engine.tell_activations(UNDECIDED)

    def _watched(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or in_backward():
                return forward(*args, **kwargs)
            if other_hooks_save(self._engine.unsharding):
                self._engine.tell_activations(LEFT)
                return forward(*args, **kwargs)
            carrying = [t for t in tensors_in([*args, *kwargs.values()]) if t.requires_grad]
            self._bytes = {}
            with torch.autograd.graph.saved_tensors_hooks(self._count, self._engine.unsharding.unpack):
                output = forward(*args, **kwargs)
            self._decide(sum(tensor.nbytes for tensor in carrying))
            return output

        return watched

    @torch._disable_dynamo  # autograd calls it inside compiled code
    def _count(self, tensor: Tensor) -> Any:
        if not isinstance(tensor, torch.nn.Parameter) and not self._engine.unsharding.holds(tensor):
            self._bytes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return self._engine.unsharding.pack(tensor)

    def _decide(self, inputs: int) -> None:
        self._attachments.remove()
        engine, seen = self._engine, self._agreed(inputs)
        policy, recomputed, why = choose_policy(seen, len(self._blocks), self._tensor.size, self._others)
        said = f"activations={policy!r}: {why}"
        if engine.watch.active and not engine.watch.decided and not policy.endswith("+host"):
            said = self._leave_to_step("checkpoint" if policy == "keep" else policy, seen)
        else:
            attach_policy(engine, policy, self._blocks[:recomputed])
        engine.tell_activations(said)
        if engine.everyone.rank == 0 and self._tensor.rank == 0:
            LOG.info('activations="auto" chose %s', said)

    def _leave_to_step(self, policy: str, seen: Seen) -> str:
        """Computes all blocks again until the first step has shown what is left beside them."""
        attached = recompute(self._engine, policy, self._blocks)
        inputs = seen.inputs // (self._tensor.size if policy == "partition" else 1)
        choice = BlockChoice(self._blocks, max(seen.kept - inputs, 0), attached.keep)
        self._engine.leave_blocks_to_step(choice)
        return f"activations={policy!r} of all {len(self._blocks)} blocks until the first step has shown what is left"

    def _room(self) -> int:
        """Bytes that states leave, with the Optimizers that there are now."""
        engine = self._engine
        return room_left(
            engine.resolved, engine.comm.strategy, cost=engine.optimizers.state_cost,
            accumulates=not engine.accumulating.final, in_backward=engine.optimizers.in_backward,
        )  # fmt: skip

    def _agreed(self, inputs: int) -> Seen:
        """What all ranks decide by: the largest needs and the smallest room of all."""
        weights = {storage_key(p) for p in self._engine.params}  # views of whole units are not activations
        kept = sum(nbytes for key, nbytes in self._bytes.items() if key not in weights)
        mine = [Seen(kept, inputs, self._room())]
        for comm in (self._engine.everyone, self._tensor):
            blob = b"".join(number.to_bytes(8, "big") for number in mine[0])
            rows = comm.all_gather_bytes(blob, Label("agree", "activations")) if comm.size > 1 else [blob]
            seen = [Seen(*(int.from_bytes(row[i : i + 8], "big") for i in (0, 8, 16))) for row in rows]
            mine = [Seen(max(s.kept for s in seen), max(s.inputs for s in seen), min(s.room for s in seen))]
        return mine[0]
