"""What is to be trained, over a grid of ranks: a number of parameters, a GPT's shape, or a rehearsed model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from onefold.comm.strategy import WIDE, equal_per_node
from onefold.cost.activations import (
    NOTHING,
    ActivationBytes,
    check_policy,
    flops_per_sample,
    shape_activations,
    tensor_parallel_elements,
)
from onefold.cost.cut_sequences import attention_bytes, cut_shape, with_trades
from onefold.cost.layout import ParamInfo, UnitLayout, blocks_of, plan_units
from onefold.cost.owners import newton_schulz_flops
from onefold.cost.shapes import Shape, adapters
from onefold.cost.sizes import Sizes, size_of_layout, sizes_of_count
from onefold.cost.tiles import check_tile, with_tiled_loss, with_tiled_mlps
from onefold.errors import ConfigError
from onefold.settings.placement import Placement, Scope
from onefold.settings.values import SHARED_BYTES
from onefold.settings.widths import Widths

T = TypeVar("T")
TRAINED, FROZEN = "trained", "frozen"  # kinds of a shape's parameters
MOST_RANKS = 1 << 20


class Grid(NamedTuple):
    """The number of ranks along each axis. Of the `shard` ranks that share states, runs of `sequence` ranks cut their
    sequences among themselves, so that `shard` × `replica` / `sequence` read data of their own."""

    shard: int = 1
    tp: int = 1
    pp: int = 1
    replica: int = 1
    sequence: int = 1

    @property
    def ranks(self) -> int:
        return self.shard * self.tp * self.pp * self.replica

    @property
    def everyone(self) -> int:
        """Ranks that average their gradients."""
        return self.shard * self.replica

    @property
    def data(self) -> int:
        """Ranks, or groups of them, that read data of their own."""
        return self.everyone // self.sequence

    def shards_per_node(self, node_ranks: int) -> int:
        """How many ranks of the shard axis of rank 0 each node has; 1 if not all nodes have as many."""
        return _shards_per_node(self.shard, self.tp, node_ranks)

    def __str__(self) -> str:
        sizes = (self.shard // self.sequence, *self[1:])
        axes = zip(("shard", "tp", "pp", "replica", "sequence"), sizes, strict=True)
        return " × ".join(f"{size} {name}" for name, size in axes if size > 1 or name == "shard")


@lru_cache(maxsize=1024)
def _shards_per_node(shard: int, tp: int, node_ranks: int) -> int:
    return equal_per_node(range(0, shard * tp, tp), node_ranks)  # neighbouring ranks share "tp"


def grid_of(ranks: int, tp: int = 1, pp: int = 1, replica: int = 1, sequence: int = 1) -> Grid:
    """All axes from the number of ranks; raises unless their sizes multiply to it.

    >>> grid_of(64, tp=4)
    Grid(shard=16, tp=4, pp=1, replica=1, sequence=1)
    """
    for name, size in (("ranks", ranks), ("tp", tp), ("pp", pp), ("replica", replica), ("sequence", sequence)):
        if type(size) is not int or not 1 <= size <= MOST_RANKS:
            raise ConfigError(f"{name}={size!r} is not a positive whole number up to {MOST_RANKS:,}")
    if ranks % (tp * pp * replica * sequence):
        more = (" × sequence", f" × {sequence}") if sequence > 1 else ("", "")
        raise ConfigError(
            f"{ranks} ranks is not a multiple of tp × pp × replica{more[0]} = {tp} × {pp} × {replica}{more[1]}; choose "
            f"axes whose product divides it"
        )
    if sequence > 1 and pp > 1:
        raise ConfigError(f"sequence={sequence} with pp={pp}: a mesh with both is unsupported; use one of the two")
    return Grid(ranks // (tp * pp * replica), tp, pp, replica, sequence)


@dataclass(frozen=True)
class Module:
    """A model of any kind, as rehearsals with one sample measured it."""

    infos: tuple[ParamInfo, ...]
    widths: dict[str, Widths]  # by kind of parameter
    batch: int  # of the sample
    tokens: int  # of one row of it
    activations: dict[str, int]  # policy -> bytes at the peak
    block_inputs: tuple[int, ...]
    flops: dict[str, int]  # policy -> of one forward and backward
    frozen: frozenset[str] = frozenset()  # kinds that are not trained
    buffers_bytes: int = 0
    matrices: Mapping[str, int] = field(default_factory=dict)  # that Muon updates: flops of the update of each


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is to be trained: one of `numel`, `shape` and `module` is given."""

    widths: Widths
    numel: int | None = None
    shape: Shape | None = None
    module: Module | None = None
    bucket_bytes: int = 128 << 20
    shared_bytes: int | None = SHARED_BYTES  # neighbouring blocks share units up to so many bytes; None: `bucket_bytes`
    lora: int = 0  # of a shape: the rank of adapters on every linear layer of its blocks; all else is frozen
    tile: int | None = None  # of a shape: the tokens in a tile of the loss and of MLPs; None: they run whole
    tiled_mlps: bool = True  # False: only the loss runs by tiles
    auto_wire: bool = False  # where NCCL sums, 16-bit gradients travel in fp32: Precision(wire=…) says nothing
    _cache: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def remember(self, key: Any, make: Callable[[], T]) -> T:
        """Caches a figure that does not depend on the batch, since a search asks for it many times."""
        if key not in self._cache:
            self._cache[key] = make()
        found: T = self._cache[key]
        return found

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.numel, self.shape, self.module)) != 1:
            raise ConfigError("a plan is for a number of parameters, or for a shape: give one of them")
        if self.numel is not None and self.numel < 1:
            raise ConfigError(f"{self.numel} parameters is not a positive number")
        if self.lora and (self.shape is None or not 1 <= self.lora <= self.shape.hidden):
            most = f"1 to {self.shape.hidden}, the hidden size" if self.shape else "a shape, by --model or --layers"
            raise ConfigError(f"lora={self.lora} needs {most}")
        check_tile(self.tile, self.shape)

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole model."""
        if self.module:
            return sum(info.numel for info in self.module.infos)
        if self.shape and self.lora:
            return sum(info.numel for info in self._infos(self.shape, Grid()))
        return self.shape.numel if self.shape else self.numel or 0

    @property
    def tokens_per_sample(self) -> int:
        return self.shape.seq if self.shape else self.module.tokens if self.module else 0

    @property
    def knows_activations(self) -> bool:
        return self.numel is None and not (self.module and not self.module.activations)

    def sizes(self, grid: Grid, rank: int = 0, *, own_sum: bool = True) -> Sizes:
        """The units over a grid of ranks, which sum 16-bit gradients themselves (`own_sum`) or let NCCL sum."""
        found = self._sizes(grid, rank)
        if own_sum or not self.auto_wire:
            return found
        wide = (unit._replace(widths=unit.widths._replace(wire=WIDE)) for unit in found.units)
        return replace(found, units=tuple(new if new.widths.narrow else old for new, old in zip(wide, found.units)))

    def _sizes(self, grid: Grid, rank: int) -> Sizes:
        if self.module:
            return self._module_sizes(self.module, grid, rank)
        if self.shape is None:
            assert self.numel is not None
            local = -(-self.numel // (grid.tp * grid.pp))
            units = max(1, min(4096, -(-local * self.widths.compute // self.bucket_bytes)))
            return Sizes(tuple(sizes_of_count(local, grid.shard, self.widths, units)), grid.shard)
        infos = self._infos(self.shape, grid)
        rows = [
            size_of_layout(
                unit,
                rank,
                self._widths_of(unit.kind),
                blocks=blocks,
                trained=unit.kind == TRAINED,
                matrices=self.matrices,
            )
            for unit, blocks in self._units(infos, grid)
        ]
        return Sizes(tuple(rows), grid.shard, flags=sum(info.kind == TRAINED for info in infos))

    def _infos(self, shape: Shape, grid: Grid) -> list[ParamInfo]:
        """The parameters of a shape; of one with adapters these are trained, after the frozen matrix they belong to."""
        if self.lora and grid.tp > 1:
            raise ConfigError(f"lora={self.lora} is planned without tensor parallelism, and tp={grid.tp}; use tp=1")
        base, found = FROZEN if self.lora else TRAINED, []
        for part in shape.parts(grid.tp, grid.pp):
            found.append(ParamInfo(part.name, part.numel, self.widths.compute, base, part.block))
            for name, numel in adapters(part, shape.hidden, self.lora):
                found.append(ParamInfo(name, numel, self.widths.compute, TRAINED, part.block))
        return found

    def _widths_of(self, kind: str) -> Widths:
        return self.widths if kind == TRAINED else self.widths._replace(master=0)

    @property
    def matrices(self) -> Mapping[str, int]:
        """The parameters that Muon updates, with the flops of the update of each; none where only a number of
        parameters is known."""
        if self.module:
            return self.module.matrices
        shape = self.shape
        if shape is None:
            return {}
        return self.remember(
            "matrices", lambda: {name: newton_schulz_flops(*size) for name, size in shape.matrices().items()}
        )

    def _units(self, infos: Sequence[ParamInfo], grid: Grid) -> Iterator[tuple[UnitLayout, tuple[str, ...]]]:
        """The units, and the blocks of each."""
        known = {info.name: info for info in infos}
        for unit in plan_units(infos, grid.shard, self.bucket_bytes, grid.replica, shared_bytes=self.shared_bytes):
            yield unit, blocks_of(known[slot.name] for slot in unit.slots)

    def _module_sizes(self, module: Module, grid: Grid, rank: int) -> Sizes:
        rows = [
            size_of_layout(
                unit, rank, module.widths[unit.kind], blocks=blocks, trained=unit.kind not in module.frozen,
                matrices=module.matrices,
            )
            for unit, blocks in self._units(module.infos, grid)
        ]  # fmt: skip
        flags = sum(info.kind not in module.frozen for info in module.infos)
        return Sizes(tuple(rows), grid.shard, module.buffers_bytes, flags)

    def tied(self, sizes: Sizes) -> int | None:
        """The index of the unit that the output layer shares with the token embedding."""
        return 0 if self.shape and self.shape.is_tied and sizes.units else None

    def passes(self, sizes: Sizes, placements: Sequence[Placement]) -> tuple[list[int], list[int]]:
        """The units that are all-gathered in forward and in backward, as in the runtime; where only a number of
        parameters is known, all of them in both."""
        sharded = [i for i, placement in enumerate(placements) if placement.parameters is Scope.SHARDED]
        if self.module:
            return sharded, sharded[-2::-1]
        if self.shape is None or not sharded:
            return sharded, sharded[::-1]
        tied = self.tied(sizes)
        forward = sharded + [tied] if tied in sharded and sharded[-1] != tied else sharded
        positions = [i for i in sharded if i != tied and sizes.units[i].name == "wpe.weight"]
        return [i for i in forward if i is not None], [i for i in sharded[::-1] if i not in (forward[-1], *positions)]

    def activations(self, batch: int, policy: str, grid: Grid) -> ActivationBytes:
        """Bytes of activations on one rank for one micro-batch."""
        if self.module and self.module.activations:
            return _module_activations(self.module, batch, policy, grid)
        if self.shape is None:
            return NOTHING
        cut, itemsize = cut_shape(self.shape, grid.sequence), self.widths.compute
        found = shape_activations(cut, batch, policy, grid.tp, itemsize)
        if self.tile is not None:
            check_tile(self.tile, self.shape, grid.tp)
            tokens, trained = self.tile, not self.lora
            found = with_tiled_loss(found, cut, batch, itemsize, tokens, trained=trained)
            if self.tiled_mlps:
                found = with_tiled_mlps(found, cut, batch, policy, itemsize, tokens)
        return with_trades(found, self.shape, batch, policy, grid.tp, grid.sequence, itemsize)

    def flops(self, batch: int, policy: str, grid: Grid) -> float:
        """Flops of one rank for forward and backward of one micro-batch."""
        if self.module and self.module.flops:
            rehearsed = "keep" if policy == "keep" else "checkpoint"
            return self.module.flops[rehearsed] * batch / self.module.batch
        if self.shape is None:
            return 0.0
        passes = 3 if policy == "keep" else 4  # of which a frozen model leaves out one: the gradients of its matrices
        trained = (passes - 1) / passes if self.lora else 1.0
        return trained * flops_per_sample(self.shape, policy) * batch / (grid.tp * grid.pp * grid.sequence)

    def tile_flops(self, batch: int, grid: Grid) -> float:
        """Flops of the extra forward of MLPs that tiles run in backward, for one micro-batch on one rank."""
        if self.shape is None or self.tile is None or not self.tiled_mlps:
            return 0.0
        mlps = sum(inputs * outputs * times for inputs, outputs, times in self.shape.mlp_products())
        return 2 * self.shape.seq * mlps * batch / (grid.pp * grid.sequence)

    def layers_here(self, grid: Grid) -> int:
        if self.module:
            return 1  # its activations are of the whole model
        return -(-self.shape.layers // grid.pp) if self.shape else 0

    def tensor_elements(self, batch: int, policy: str, grid: Grid) -> int:
        """Elements that one rank sends for tensor parallelism in one micro-batch."""
        if self.shape is None:
            return 0
        shape = cut_shape(self.shape, grid.sequence)
        return self.layers_here(grid) * tensor_parallel_elements(shape, batch, policy, grid.tp)

    def sequence_bytes(self, batch: int, policy: str, grid: Grid) -> int:
        """Bytes that one rank sends for attention over cut sequences in one micro-batch."""
        if self.shape is None:
            return 0
        each = attention_bytes(self.shape, batch, policy, grid.tp, grid.sequence, self.widths.compute)
        return self.layers_here(grid) * each


def _module_activations(module: Module, batch: int, policy: str, grid: Grid) -> ActivationBytes:
    """The activations of a rehearsed model: all at the peak; P_a leaves out what the other ranks of "tp" keep."""
    check_policy(policy, grid.tp)

    def scaled(nbytes: float) -> int:
        return int(nbytes * batch / module.batch)

    peak = module.activations["keep" if policy == "keep" else "checkpoint"]
    inputs, largest = sum(module.block_inputs), max(module.block_inputs, default=0)
    part = inputs // grid.tp if policy.startswith("partition") else inputs
    if policy.endswith("+host"):
        working = scaled(peak - inputs + 2 * largest)
        return ActivationBytes(0, scaled(part), *_throughout(working))
    if policy == "partition":
        peak -= inputs - part
    return ActivationBytes(0, 0, *_throughout(scaled(peak)))


def _throughout(working: int) -> tuple[int, int, int, int, int]:
    """Activations of which only the sum is known: any module may need all of it."""
    return working, 0, working, working, working
