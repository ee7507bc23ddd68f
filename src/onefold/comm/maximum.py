"""An all-reduce of a few bytes between hosts: at every place the largest byte that any rank gave.

In round k a rank sends what it has to the rank 2^k places after it, and receives from the rank 2^k before it. The
maximum of a byte with itself is the byte, so a byte may arrive twice, and ceil(log2 N) rounds do for any N. Each round
sends as many bytes as the message has. A ring, which is what gloo's own all-reduce is, sends 2(N-1)/N of that in all,
in 2(N-1) hops one after the other: 8190 hops at 4096 ranks instead of 12. For flags, latency is what counts.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from onefold.comm.endpoint import Endpoint
from onefold.comm.meter import Label
from onefold.comm.strategy import max_rounds
from onefold.comm.wires import PairwiseWire


class Maximum:
    """An all-reduce in flight: its first round has started, the others run in `finish`."""

    def __init__(self, endpoint: Endpoint, wire: PairwiseWire, blob: bytes, label: Label) -> None:
        self._rank, self._size, self._wire, self._label = endpoint.rank, endpoint.size, wire, label
        self._largest, self._received = bytes_tensor(blob), torch.empty(len(blob), dtype=torch.uint8)
        self._start(0)

    def _start(self, number: int) -> None:
        after, before = (self._rank + (1 << number)) % self._size, (self._rank - (1 << number)) % self._size
        self._pending = self._wire.swap({after: self._largest}, {before: self._received}, self._label)

    def finish(self) -> bytes:
        """Waits for all rounds."""
        for number in range(max_rounds(self._size)):
            if number:
                self._start(number)
            self._pending.wait()
            torch.maximum(self._largest, self._received, out=self._largest)
        return tensor_bytes(self._largest)


def bytes_tensor(blob: bytes) -> Tensor:
    """A tensor with a copy of these bytes, on the host."""
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.empty(0, dtype=torch.uint8)


def tensor_bytes(flat: Tensor) -> bytes:
    """A copy of a contiguous tensor's bytes."""
    flat = flat.cpu()
    return ctypes.string_at(flat.data_ptr(), flat.numel()) if flat.numel() else b""
