"""What becomes of activations: which blocks are computed again in backward, from inputs that are kept where."""

from __future__ import annotations

from collections.abc import Sequence

from onefold.activations.recompute import Recompute
from onefold.activations.store import Store
from onefold.runtime.engine import Engine


def attach_policy(engine: Engine, policy: str, blocks: Sequence[str]) -> None:
    """Let these blocks of the model be computed again, unless all is kept."""
    if policy != "keep":
        shared = engine.comms.tp if policy.startswith("partition") else None
        store = Store(engine.device, shared, on_host=policy.endswith("+host"), blocks=len(blocks))
        engine.keep_block_inputs(store)
        Recompute(engine, store, policy).attach(engine.model, blocks)
