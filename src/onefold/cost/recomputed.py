"""How many blocks are computed again, and with which policy, where not all activations fit: activations="auto". Numbers
only."""

from __future__ import annotations

from typing import NamedTuple

from onefold.cost.activations import Option, choose_activations
from onefold.cost.text import format_bytes

USED = 0.8  # of the room beside states that blocks may take: heads and losses need some too
SPEED = {"keep": 1.0, "checkpoint": 0.75, "partition": 0.73, "checkpoint+host": 0.7, "partition+host": 0.69}


class Seen(NamedTuple):
    """Bytes of one block, and of what is free for all of them."""

    kept: int
    inputs: int
    room: int


class Decision(NamedTuple):
    policy: str
    recomputed: int  # blocks that are computed again, from the first on; the others keep their activations
    why: str


def choose_policy(seen: Seen, blocks: int, tp: int, others: int = 0) -> Decision:
    """The policy, for as few blocks as fit. `others` are blocks that keep what they have whatever is decided.

    Blocks that keep theirs are the last ones: backward comes to them first, and frees what they keep before the first
    of the others is computed again.

    >>> choose_policy(Seen(kept=12_000, inputs=1000, room=100_000), blocks=48, tp=1)
    Decision(policy='checkpoint', recomputed=46, why='keep needs 576 kB of 80.0 kB; checkpoint of 46 of 48 blocks fits \
with 70.0 kB of 80.0 kB')
    """
    kept, inputs, room = seen
    budget = USED * room - others * kept
    policies = {"checkpoint": (float(inputs), 0)}  # bytes of each block that is computed again, and of restored inputs
    if tp > 1:
        policies["partition"] = (inputs / tp, inputs)
    policies["checkpoint+host" if tp == 1 else "partition+host"] = (0.0, 2 * inputs)
    made = {"keep": Decision("keep", 0, "")}
    needs = {"keep": blocks * kept}
    for policy, (part, restored) in policies.items():
        need = [int(count * part) + max(blocks - count, 1) * kept + restored for count in range(blocks + 1)]
        count = next((count for count in range(1, blocks) if need[count] <= budget), blocks)
        label = policy if count == blocks else f"{policy} of {count} of {blocks} blocks"
        made[label], needs[label] = Decision(policy, count, ""), need[count]
    chosen, why = choose_activations(
        [
            Option(
                label, needs[label] <= budget, blocks / (blocks - count + count / SPEED[policy]),
                f"{format_bytes(needs[label] + others * kept)} of {format_bytes(USED * room)}",
            )
            for label, (policy, count, _) in made.items()
        ]
    )  # fmt: skip
    return made[chosen]._replace(why=why)
