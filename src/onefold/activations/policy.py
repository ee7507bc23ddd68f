"""What becomes of activations: which blocks are computed again in backward, from inputs that are kept where."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.activations.recompute import Recompute
from onefold.activations.store import Store
from onefold.runtime.engine import Engine


def attach_policy(engine: Engine, policy: str, blocks: Sequence[str]) -> None:
    """Lets these blocks of the model be computed again, unless all is kept."""
    if policy != "keep":
        recompute(engine, policy, blocks)


def recompute(engine: Engine, policy: str, blocks: Sequence[str]) -> Recompute:
    """Lets these blocks be computed again, with their inputs as the policy says."""
    shared = engine.comms.tp if policy.startswith("partition") else None
    store = Store(engine.device, shared, on_host=policy.endswith("+host"), blocks=len(blocks))
    engine.keep_block_inputs(store)
    found = Recompute(engine, store, policy)
    found.attach(engine.model, blocks)
    return found
