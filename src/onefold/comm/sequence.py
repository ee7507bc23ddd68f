"""The ranks that share each sequence: their communicator, on a link of its own, and that of all ranks that read data.

There is one group per mesh and device, shared by all models on it. Its bytes are counted by the meter of the model
whose forward or backward began last.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from onefold.comm.communicator import Comm
from onefold.comm.links import SEQUENCE
from onefold.comm.mesh import axes_of
from onefold.comm.meter import Label, Meter
from onefold.errors import ConfigError, MismatchError

TIMEOUT_S = 600.0
DOCUMENTS = Label("sequence-documents", "a batch")

_groups: dict[tuple[DeviceMesh, str], SequenceGroup] = {}  # by mesh and type of device
_world: Any = None  # torch's default group when they were made


class SequenceGroup:
    """This rank among the ranks that hold stretches of the same sequences (`comm`), and among all ranks that read data
    (`readers`): those of "replica", "shard" and "sequence"."""

    def __init__(self, mesh: DeviceMesh, device: torch.device) -> None:
        axes, meter = axes_of(mesh), Meter()
        self.comm = Comm(axes.sequence, device, TIMEOUT_S, meter, one_link=SEQUENCE)
        self.readers = Comm(axes.everyone, device, TIMEOUT_S, meter, one_link=SEQUENCE)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.calls = 0  # of sequence_attention() so far
        self.batches = 0  # that cut_sequence() has cut
        self.balanced: bool | None = None  # how it cut the last one
        self.attending = False  # inside such a call
        self._compared = set[str]()  # shapes that ranks have compared
        self._gathered: tuple[ref[Tensor], int, Tensor] | None = None  # whose documents, their version, the whole

    def serve(self, meter: Meter, timeout_s: float) -> None:
        """What is sent from here on is counted by this meter."""
        for comm in (self.comm, self.readers):
            comm.meter, comm.timeout = meter, timedelta(seconds=timeout_s)

    def compare_shapes(self, mine: str, remedy: str) -> None:
        """compare(), each time in host memory, where a message waits for its peer anyhow; else for each new shape."""
        if self.comm.on_host or mine not in self._compared:
            self.compare(mine, remedy)
            self._compared.add(mine)

    def compare(self, mine: str, remedy: str) -> None:
        """Raises on all ranks of a sequence if they say different things. Collective."""
        rows = [row.decode() for row in self.comm.exchange(mine.encode(), Label("agree", "stretches of a sequence"))]
        for rank, row in enumerate(rows):
            if row != rows[0]:
                raise MismatchError(
                    f"the ranks of one sequence differ: rank {self.comm.world_rank(0)} has {rows[0]}, and rank "
                    f"{self.comm.world_rank(rank)} has {row}; {remedy}"
                )

    def check_balance(self, tokens: int, balanced: bool) -> None:
        """Raises if attention takes stretches of so many tokens for others than cut_sequence() made last, but in
        backward, which may recompute an earlier batch."""
        if balanced and tokens % 2:
            raise ConfigError(
                f"sequence_attention(balanced=True) got {tokens} tokens; a balanced stretch has two equal pieces, as "
                f"onefold.cut_sequence(…, balanced=True) makes them"
            )
        recomputes = torch._C._current_graph_task_id() != -1
        if self.balanced is not None and self.balanced is not balanced and not recomputes:
            raise ConfigError(
                f"cut_sequence(balanced={self.balanced}) cut the batch, and sequence_attention(balanced={balanced}) "
                f"takes its tokens for others; give both the same"
            )

    def whole_documents(self, documents: Tensor) -> Tensor:
        """The documents (batch, tokens) of the whole sequence. Ranks send them once for each tensor, so once for a
        batch whose blocks are given the same tensor. Collective."""
        known, version = self._gathered, 0 if documents.is_inference() else documents._version
        if known is None or known[0]() is not documents or known[1] != version:
            flat = torch.empty(self.size, *documents.shape, dtype=torch.int32, device=documents.device)
            flat[self.rank].copy_(documents)
            self.comm.all_gather(flat.view(-1), DOCUMENTS).wait()
            self._gathered = known = ref(documents), version, flat.transpose(0, 1).flatten(1)
        return known[2]


def sequence_group(mesh: DeviceMesh, device: torch.device) -> SequenceGroup:
    """The group of a mesh for tensors on this device. Collective when it is new."""
    global _world
    if _world is not dist.group.WORLD:
        _groups.clear()
        _world = dist.group.WORLD
    key = mesh, device.type
    if key not in _groups:
        _groups[key] = SequenceGroup(mesh, device)
    return _groups[key]
