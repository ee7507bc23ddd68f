"""What a training loop says about its micro-batches: which of them accumulate, and when uneven forwards are over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from onefold.runtime.engine import engine_of


@contextmanager
def accumulate(model: nn.Module, reduce: str | None = None) -> Iterator[None]:
    """Accumulate gradients: put all micro-batches of a step but the last inside this context.

    reduce="once" keeps each rank's unreduced sum, which takes memory for gradients of full size, and reduces it with
    the last micro-batch. "each" reduces every micro-batch into the sharded gradient: 1/N of the memory, and one
    reduce-scatter per micro-batch. By default "once" at stages 0 and 1, "each" at stages 2 and 3.

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
    """With schedule="negotiate": serve other ranks the parameters they need, until every rank has called `catch_up`.

    Call it after a loop that is longer on some ranks than on others, such as generation, and before collectives of your
    own. Backward, `step` and `full_parameters` wait for other ranks in the same way. Collective.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(8, 8), stage=3, schedule="negotiate")
    >>> for _ in range(1 + torch.distributed.get_rank()):
    ...     _ = model(torch.ones(1, 8))
    >>> onefold.catch_up(model)
    """
    engine_of(model).unsharding.gathers.catch_up()
