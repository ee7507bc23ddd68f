"""What a training loop says about its forwards and backwards: which of them add up, and when ranks that ran more of
them than others meet again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from onefold.runtime.engine import engine_of


@contextmanager
def accumulate(model: nn.Module, reduce: str | None = None) -> Iterator[None]:
    """Around all micro-batches of a step but the last: their gradients add up.

    reduce="once" keeps each rank's sum and reduces it with the last micro-batch (whole gradients in memory, no more
    traffic); "each" reduces every micro-batch into the shard (1/N of the memory, one more reduction each). By default
    "once" where gradients are whole, "each" where they are sharded.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=2)
    >>> with onefold.accumulate(model):
    ...     model(torch.ones(1, 8)).sum().backward()
    >>> model(torch.ones(1, 8)).sum().backward()
    """
    with engine_of(model).accumulate(reduce):
        yield


def catch_up(model: nn.Module) -> None:
    """With schedule="negotiate": give other ranks the parameters they need until all ranks have come here.

    For the end of a loop that is longer on some ranks than on others (generation), before collectives of your own.
    Backward, step and `full_parameters` wait in the same way. Collective.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=3, schedule="negotiate")
    >>> for _ in range(1 + torch.distributed.get_rank()):
    ...     _ = model(torch.ones(1, 8))
    >>> onefold.catch_up(model)
    """
    engine_of(model).unsharding.gathers.catch_up()
