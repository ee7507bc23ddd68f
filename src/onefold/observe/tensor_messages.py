"""Counts the messages of tensor parallelism, which torch sends by itself: bytes and calls, by collective."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from onefold.comm.meter import Flow
from onefold.model.dtensor_shards import holds_dtensors

PURPOSE = "tensor-parallel"
NAMESPACE = "_c10d_functional"  # of the operators that DTensors communicate by


class TensorMessages(TorchDispatchMode):
    """While this mode is on, counts what one of `ranks` ranks of "tp" sends, in rings."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self.flows: dict[tuple[str, str], Flow] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if holds_dtensors(types):
            return NotImplemented  # DTensor computes with local tensors, which come here again
        if func.namespace == NAMESPACE:
            self._count(func.__name__.partition(".")[0].rstrip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, args: Any) -> None:
        others, n = self._ranks - 1, self._ranks
        rings = {  # bytes of an argument -> bytes that a rank sends
            "all_reduce": ("all-reduce", lambda nbytes: 2 * nbytes * others // n),
            "all_gather_into_tensor": ("all-gather", lambda nbytes: nbytes * others),
            "reduce_scatter_tensor": ("reduce-scatter", lambda nbytes: nbytes * others // n),
            "all_to_all_single": ("all-to-all", lambda nbytes: nbytes * others // n),
        }
        if operator in rings:
            collective, sent = rings[operator]
            flow = self.flows.get((PURPOSE, collective), Flow())
            self.flows[PURPOSE, collective] = Flow(flow.sent_bytes + sent(args[0].nbytes), flow.calls + 1)
