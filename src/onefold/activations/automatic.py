"""activations="auto": decided when the first block runs, from what it keeps and from what is left of memory.

The first block of the first forward runs as it is, and what autograd keeps of it is counted, each storage once. From
that and from the size of its input follows what each policy would need for all blocks. The ranks take the largest
needs and the smallest memory of all, so that all decide alike.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.activations.policy import attach_policy
from onefold.activations.recompute import other_hooks_save
from onefold.comm.meter import Label
from onefold.cost.activations import Option, choose_activations
from onefold.cost.text import format_bytes
from onefold.model.containers import tensors_in
from onefold.model.storage import storage_key
from onefold.runtime.automatic import room_left
from onefold.runtime.engine import Engine
from onefold.runtime.unsharding import in_backward
from onefold.settings.zero import AUTO

LOG = logging.getLogger("onefold")
USED = 0.8  # of the room beside states that blocks may take: heads and losses need some too
SPEED = {"keep": 1.0, "checkpoint": 0.75, "partition": 0.73, "checkpoint+host": 0.7, "partition+host": 0.69}
LEFT = 'activations="auto" leaves them to the checkpoint around the model, or other hooks on saved tensors'
UNDECIDED = 'activations="auto" decides when the first block runs'


def attach_activations(engine: Engine) -> None:
    """Apply what activations= asks for, at once or, with "auto", when the first block has run."""
    policy = engine.resolved.settings.activations
    if policy == AUTO:
        AutomaticActivations(engine)
    else:
        attach_policy(engine, policy)


class Seen(NamedTuple):
    """Bytes of one block, and of what is free for all of them."""

    kept: int
    inputs: int
    room: int


def choose_policy(seen: Seen, blocks: int, tp: int, others: int = 0) -> tuple[str, str]:
    """The policy and the reason. `others` are blocks that keep what they have whatever is decided.

    >>> choose_policy(Seen(kept=12, inputs=1, room=100), blocks=48, tp=1)
    ('checkpoint', 'keep needs 0.6 kB of 0.1 kB; checkpoint fits with 0.1 kB of 0.1 kB')
    """
    kept, inputs, room = seen
    needs = {"keep": blocks * kept, "checkpoint": blocks * inputs + kept}
    if tp > 1:
        needs["partition"] = blocks * inputs // tp + inputs + kept
    needs["checkpoint+host" if tp == 1 else "partition+host"] = 2 * inputs + kept
    needs = {policy: need + others * kept for policy, need in needs.items()}
    return choose_activations(
        [
            Option(policy, need <= USED * room, SPEED[policy], f"{format_bytes(need)} of {format_bytes(USED * room)}")
            for policy, need in needs.items()
        ]
    )


class AutomaticActivations:
    """Waits for the first block to run."""

    def __init__(self, engine: Engine) -> None:
        resolved = engine.resolved
        self._engine, self._tensor, self._room = engine, engine.comms.tp, room_left(resolved, engine.comm.strategy)
        self._blocks = resolved.recomputed
        self._others = len(resolved.blocks) - len(self._blocks)  # that keep their activations in any case
        self._handles: list[Any] = []
        self._bytes: dict[int, int] = {}
        self._inputs, self._counting = 0, False
        modules = dict(engine.model.named_modules())
        for name in self._blocks:
            self._handles.append(modules[name].register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(modules[name].register_forward_hook(self._after, always_call=True))
        for handle in self._handles:
            engine.attachments.hook(handle)
        engine.tell_activations(UNDECIDED)

    def _before(self, module: Any, args: Any, kwargs: Any) -> None:
        watched = torch.is_grad_enabled() and not in_backward()
        self._counting = watched and not other_hooks_save(self._engine.unsharding)
        if not self._counting:
            if watched:
                self._engine.tell_activations(LEFT)
            return
        carrying = [t for t in tensors_in([*args, *kwargs.values()]) if t.requires_grad]
        self._inputs = sum(tensor.nbytes for tensor in carrying)
        self._bytes = {}
        torch._C._autograd._push_saved_tensors_default_hooks(self._count, self._engine.unsharding.unpack)

    def _count(self, tensor: Tensor) -> Any:
        if not isinstance(tensor, torch.nn.Parameter) and not self._engine.unsharding.holds(tensor):
            self._bytes[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return self._engine.unsharding.pack(tensor)

    def _after(self, module: Any, args: Any, output: Any) -> None:
        if not self._counting:
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        self._counting = False
        if output is None:  # it failed
            return
        for handle in self._handles:
            handle.remove()
        policy, why = self._agreed()
        engine = self._engine
        said = f"activations={policy!r}: {why}"
        engine.tell_activations(said)
        if engine.everyone.rank == 0 and self._tensor.rank == 0:
            LOG.info('activations="auto" chose %s', said)
        attach_policy(engine, policy)

    def _agreed(self) -> tuple[str, str]:
        weights = {storage_key(p) for p in self._engine.params}  # views of whole units are not activations
        kept = sum(nbytes for key, nbytes in self._bytes.items() if key not in weights)
        mine = [Seen(kept, self._inputs, self._room)]
        for comm in (self._engine.everyone, self._tensor):
            blob = b"".join(number.to_bytes(8, "big") for number in mine[0])
            rows = comm.all_gather_bytes(blob, Label("agree", "activations")) if comm.size > 1 else [blob]
            seen = [Seen(*(int.from_bytes(row[i : i + 8], "big") for i in (0, 8, 16))) for row in rows]
            mine = [Seen(max(s.kept for s in seen), max(s.inputs for s in seen), min(s.room for s in seen))]
        return choose_policy(mine[0], len(self._blocks), self._tensor.size, self._others)
