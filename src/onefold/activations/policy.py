"""What becomes of activations: whether a policy can apply, and what it is made of."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.activations.recompute import Recompute
from onefold.activations.store import Store
from onefold.comm.communicator import Comm
from onefold.errors import ConfigError
from onefold.runtime.engine import Engine
from onefold.settings.zero import Zero


def check_activations(zero: Zero, blocks: Sequence[str], tp: int) -> None:
    """What is asked for can run, or raises: nothing is left undone silently."""
    policy = zero.activations
    if policy != "keep" and not blocks:
        raise ConfigError(
            f"activations={policy!r} computes blocks again, and this model has none: no list of two or more modules of "
            f"one class; name them with units="
        )
    if policy.startswith("partition") and tp == 1:
        raise ConfigError(
            f"activations={policy!r} shares block inputs among the ranks of the mesh axis 'tp', and there is none, or "
            f"of one rank; give mesh= such an axis, or use {policy.replace('partition', 'checkpoint')!r}"
        )


def attach_policy(engine: Engine, policy: str, blocks: Sequence[str], tensor: Comm) -> None:
    """Let these blocks be computed again, unless all is kept. `tensor` are the ranks along the mesh axis tp."""
    if policy != "keep":
        shared = tensor if policy.startswith("partition") else None
        store = Store(engine.device, shared, on_host=policy.endswith("+host"), blocks=len(blocks))
        engine.keep_block_inputs(store)
        Recompute(engine, store, policy).attach(engine.model, blocks)
