"""State of single ranks: random states, and `extra`, buffers and module notes where they differ from rank 0's.

At the same number of ranks in the same mesh, each rank loads its own, so that a run continues bit for bit. Otherwise
all load rank 0's; random states go to the ranks that read the same data, the same to all ranks of one "tp", and further
ranks get one derived from rank 0's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onefold.checkpoint.format.manifest import VALUE, ParamRecord
from onefold.checkpoint.format.notes import decode, encode
from onefold.checkpoint.format.reading import Checkpoint
from onefold.checkpoint.format.tensorfile import DTYPE_NAMES
from onefold.checkpoint.protocol.state import OwnedElements, own_tensor, plain
from onefold.errors import CheckpointDamaged
from onefold.model.element_order import contiguous_stride
from onefold.offload.host_memory import bytes_of
from onefold.runtime.engine import Engine
from onefold.runtime.full_parameters import EXTRA, extra_states, persistent_buffers

EXTRA_NOTE, BUFFERS, MODULES, RANDOM = "extra", "buffers", "modules", "random"
KINDS = {EXTRA_NOTE, BUFFERS, MODULES, RANDOM}


class Note(NamedTuple):
    """A nested value encoded as JSON, and its tensors by path."""

    json: Any
    tensors: dict[str, Tensor]

    def digest(self) -> str:
        sha = hashlib.sha256(json.dumps([self.json, sorted(self.tensors)]).encode())
        for _, tensor in sorted(self.tensors.items()):
            sha.update(bytes_of(tensor.contiguous()))
        return sha.hexdigest()

    def owned(self, rank: int) -> list[OwnedElements]:
        return [own_tensor(prefix(rank) + key, tensor) for key, tensor in self.tensors.items()]

    def records(self, rank: int) -> list[ParamRecord]:
        return [
            ParamRecord(
                prefix(rank) + key, "extra", tuple(t.shape), contiguous_stride(t.shape), {VALUE: DTYPE_NAMES[t.dtype]}
            )
            for key, t in self.tensors.items()
        ]


def prefix(rank: int) -> str:
    return f"rank-{rank:05}/"


def note(value: Any, where: str, *, copy: bool) -> Note:
    """Encodes a value; with `copy` its tensors are copied, so that later changes do not matter."""
    tensors: dict[str, Tensor] = {}
    tree = encode(value, where, tensors)
    return Note(tree, {key: plain(tensor.to("cpu", copy=copy)) for key, tensor in tensors.items()})


def notes_of(model: nn.Module, extra: Any, device: torch.device, *, copy: bool) -> dict[str, Note]:
    """This rank's notes, whether they differ from other ranks' or not."""
    modules = {key.removesuffix(EXTRA).removesuffix("."): value for key, value in extra_states(model).items()}
    return {
        EXTRA_NOTE: note(extra, EXTRA_NOTE, copy=copy),
        BUFFERS: note(persistent_buffers(model), BUFFERS, copy=copy),
        MODULES: note(modules, MODULES, copy=copy),
        RANDOM: note(random_state(device), RANDOM, copy=False),
    }


def differing(notes: Mapping[str, Note], rank: int, digests: list[dict[str, str]]) -> dict[str, Note]:
    """The notes that a rank writes: rank 0 all but its buffers, which are in the model's state; others those that
    differ from rank 0's."""
    if rank == 0:
        return {name: one for name, one in notes.items() if name != BUFFERS}
    return {name: one for name, one in notes.items() if name == RANDOM or digests[rank][name] != digests[0][name]}


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of this rank's torch generators."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


class RankPlace(NamedTuple):
    """A rank's position in the mesh."""

    rank: int
    ranks: int
    tp: int = 1  # size of "tp"; these ranks read the same data
    pp: int = 1  # size of "pp"; these ranks read the same data
    data: int = 0  # index among the ranks that read different data


def place_of(engine: Engine) -> RankPlace:
    world = engine.comms.world
    return RankPlace(world.rank, world.size, engine.comms.tp.size, engine.comms.pp.size, engine.everyone.rank)


class OwnNotes:
    """Reads the notes of a checkpoint for one rank of the run that loads it."""

    def __init__(self, checkpoint: Checkpoint, place: RankPlace) -> None:
        self._checkpoint = checkpoint
        shared = [checkpoint.manifest.about.get(axis) for axis in ("tp", "pp")]
        if not all(type(size) is int and size > 0 for size in shared):
            raise CheckpointDamaged(f"{checkpoint.folder}: the manifest does not say how many ranks shared a model")
        self._tp: int = shared[0]  # type: ignore[assignment]
        self._pp: int = shared[1]  # type: ignore[assignment]
        saved = checkpoint.manifest.about.get("own")
        if not isinstance(saved, list) or len(saved) != checkpoint.manifest.ranks or not saved:
            raise CheckpointDamaged(f"{checkpoint.folder}: the manifest does not say what each rank has of its own")
        if not all(isinstance(row, dict) and row.keys() <= KINDS for row in saved):
            raise CheckpointDamaged(f"{checkpoint.folder}: what a rank has of its own is not among {sorted(KINDS)}")
        self._saved: list[dict[str, Any]] = [{**saved[0], EXTRA_NOTE: checkpoint.manifest.extra}, *saved[1:]]
        self._place, self._rank = place, place.rank
        self.same_ranks = (place.ranks, place.tp, place.pp) == (len(saved), self._tp, self._pp)

    @property
    def ranks(self) -> int:
        """The number of ranks that saved the checkpoint."""
        return len(self._saved)

    @property
    def streams(self) -> int:
        """The number of saving ranks that read different data, and so had different random states."""
        return -(-self.ranks // (self._tp * self._pp))

    @property
    def has_random_states(self) -> bool:
        return RANDOM in self._saved[0]

    @property
    def differing_names(self) -> list[str]:
        """The notes that were not equal on all saving ranks, without random states."""
        return sorted({name for row in self._saved[1:] for name in row if name != RANDOM})

    def get(self, name: str) -> Any:
        """This rank's note if the ranks are the same and it was saved, else rank 0's."""
        mine = self._rank if self.same_ranks and name in self._saved[self._rank] else 0
        return self._decode(name, mine) if name in self._saved[mine] else None

    def random_states(self, device: torch.device) -> dict[str, Tensor]:
        """The states of the CPU's and this device's generators; states that were not saved are derived. None if no rank
        saved any, as in an imported checkpoint."""
        if not self.has_random_states:
            return {}
        like = self._rank if self.same_ranks else self._place.data * self._tp
        saved = self._decode(RANDOM, like) if like < self.ranks else {}
        missing = [kind for kind in dict.fromkeys(("cpu", device.type)) if kind not in saved]
        first = self._decode(RANDOM, 0)["cpu"] if missing else torch.empty(0)
        mine = self._rank if self.same_ranks else self._place.data
        return saved | {kind: derived_state(kind, first, mine) for kind in missing}

    def _decode(self, name: str, rank: int) -> Any:
        return self.decode(self._saved[rank].get(name), rank)

    def decode(self, note: Any, rank: int = 0) -> Any:
        """Decodes a note whose tensors are in this rank's file."""

        def read(key: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
            full = prefix(rank) + key
            record = self._checkpoint.records.get(full)
            if record is None or record.shape != shape or record.dtype() != dtype:
                raise CheckpointDamaged(f"{self._checkpoint.folder}: {full} is not in the checkpoint as its note says")
            out = torch.empty(shape, dtype=dtype)
            self._checkpoint.whole(full, out.view(-1))
            return out

        return decode(note, read)


def derived_state(kind: str, state: Tensor, rank: int) -> Tensor:
    """A generator's state for a rank that has no saved one; depends on the given state and the rank only."""
    seed = hashlib.sha256(bytes_of(state.contiguous()).tobytes() + rank.to_bytes(8, "big")).digest()
    generator = torch.Generator(device=kind)
    generator.manual_seed(int.from_bytes(seed[:8], "big") >> 1)
    return generator.get_state()


def set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    setters: dict[str, Callable[[Tensor], None]] = {"cpu": torch.set_rng_state}
    if device.type == "cuda":
        setters["cuda"] = lambda state: torch.cuda.set_rng_state(state, device)
    for kind, setter in setters.items():
        if kind in states:
            setter(states[kind])
