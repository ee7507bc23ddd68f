"""Forward and backward over units whose values are sharded: who needs which unit when.

Forward. A block's units are gathered before it runs and idle when it has run. So are those of a module outside every
block that has parameters of its own and no modules below it (an embedding, a norm, a head). A parameter looked up
anywhere else while the root runs (a tied weight, a bare parameter of the root) is gathered at the look-up and stays
until the root's forward ends, since nobody knows what was made of it.

Backward. Tensors that autograd saves during forward are remembered with their unit where they are parameters, or
views of them; when autograd unpacks one, its unit is gathered first. A hook on a module's output gathers all its units
(an embedding's values are not needed), for functions that keep a parameter without telling autograd. A unit is released
when all its parameters have their gradients, or as many as usual and the graph holds none of its values any more; what
a recomputation saved is out of sight, so there, and where units are frozen, when the inputs of the module have their
gradients. What is left is released when backward ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onefold.comm.communicator import Comm
from onefold.comm.inflight import finish_posted_at_exit
from onefold.model.dtensor_shards import PLAIN, local_tensor
from onefold.runtime.gather_schedule import BACKWARD, FORWARD, GatherSchedule
from onefold.state.edits import Author
from onefold.state.unit import Unit


class SavedParameter:
    """Stands in autograd's memory for a tensor that lives in a unit's flat buffer."""

    __slots__ = ("_alive", "tensor", "unit", "version")

    def __init__(self, unit: int, tensor: Tensor, alive: list[int]) -> None:
        self.unit, self.tensor, self.version, self._alive = unit, tensor, tensor._version, alive
        alive[unit] += 1

    def __del__(self) -> None:
        self._alive[self.unit] -= 1


class SavedActivation(NamedTuple):
    """Any other tensor in autograd's memory."""

    tensor: Tensor
    version: int


class Unsharding:
    def __init__(
        self,
        units: Sequence[Unit],
        prefetch: int | str,
        live_bytes: int | None,
        on_backward: Callable[[], None],
        comm: Comm,
        *,
        negotiate: bool,
    ) -> None:
        self._on_backward = on_backward
        finish_posted_at_exit(self)
        self.units = list(units)
        self.gathers = GatherSchedule(units, prefetch, live_bytes, comm, negotiate=negotiate)
        self._index = {id(unit): index for index, unit in enumerate(self.units)}
        self._by_storage = {unit.flat_params.storage: index for index, unit in enumerate(units)}
        self._recomputed: set[int] = set()  # in this backward: what that saved is out of our sight
        self._running: list[int] = []  # hooked modules, the innermost last
        self._looked_up: set[int] = set()  # held until the root's forward ends
        self._pinned: set[int] = set()  # in the root's outputs, or in a graph that backward made: until backward ends
        self._backward = False
        self._graph_made = False
        self._loading = False
        self._all_whole = 0  # full_parameters contexts that are open
        self._kept: list[int] = []  # whole over several passes, so no pass gathers them
        self.looked_up_only: set[int] = set()  # units of embeddings: backward does without their values
        self._calls = [0] * len(self.units)  # of modules that backward has not left yet
        self.forward_seen: list[int] = []
        self.backward_seen: list[int] = []

    # -- forward ----------------------------------------------------------------------------------------------------

    def enter(self, module: int, indices: Sequence[int], *, root: bool = False) -> None:
        """A hooked module starts."""
        if in_backward():  # a recomputation; backward decides when to release
            self._on_backward()
            self.open_backward()
            self._recomputed.update(indices)
            self.gathers.need(*indices)
            return
        if not self._running:
            torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
            if root:
                keep = self.gathers.kept if torch.is_grad_enabled() else None
                self._begin(FORWARD, self.gathers.forward, release_when_idle=True, keep=keep)
        self._running.append(module)
        self.gathers.hold(*indices)

    def _begin(self, purpose: str, order: list[int], *, release_when_idle: bool, keep: int | None = None) -> None:
        order = [] if self._all_whole else [index for index in order if index not in self._kept]
        self.gathers.begin(purpose, order, release_when_idle=release_when_idle, keep=keep)

    def leave(self, module: int, indices: Sequence[int], output: Sequence[Tensor], *, root: bool = False) -> None:
        """It has run, or failed; one that failed before it was entered has not."""
        if in_backward() or module not in self._running:
            return
        while self._running.pop() != module:
            pass
        for tensor in output if self._running else ():  # a parameter, or a part of one, handed on to other modules
            handed_on = self._unit_of(tensor)
            if handed_on is not None:
                self._hold_until_the_end(handed_on)
        for index in indices:
            self.gathers.idle(index)
        if self._running:
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        for index in self._looked_up:
            self.gathers.idle(index)
        self._looked_up.clear()
        self._keep_returned(output)
        if root:
            self.forward_seen = self.gathers.seen
        self.gathers.end()

    def _keep_returned(self, output: Sequence[Tensor]) -> None:
        """A parameter among the outputs stays whole until backward is over."""
        for tensor in output:
            index = self._unit_of(tensor)
            if index is not None:
                self._keep_whole(index)

    def _unit_of(self, tensor: Tensor) -> int | None:
        """The unit whose buffer a tensor lies in."""
        try:
            local = tensor if type(tensor) in PLAIN else local_tensor(tensor)
            return self._by_storage.get(local.untyped_storage()._cdata)
        except NotImplementedError:  # inside torch.func transforms
            return None

    def _keep_whole(self, index: int) -> None:
        if index not in self._pinned:
            self._pinned.add(index)
            self.units[index].flat_params.pins += 1

    def _hold_until_the_end(self, index: int) -> None:
        """Of the root's forward: nobody knows what was made of it."""
        if index not in self._looked_up:
            self._looked_up.add(index)
            self.gathers.hold(index)

    def look_up(self, index: int) -> None:
        """A parameter of this unit was asked for by name."""
        if self._backward:
            self._recomputed.add(index)
            if not self.gathers.ready(index):
                self.gathers.need(index)
        elif self._running and not self.gathers.busy(index):
            self._hold_until_the_end(index)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a unit's buffer."""
        return self._unit_of(tensor) is not None

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps of a tensor that forward saves."""
        index = self._unit_of(tensor)
        if index is not None:
            return SavedParameter(index, tensor, self.gathers.saved)
        # an output that its own node saves would keep itself alive; autograd gives the detached one its history back
        return SavedActivation(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def unpack(self, saved: Any) -> Tensor:
        tensor: Tensor = saved.tensor
        if tensor._version != saved.version:  # autograd leaves this check to whoever has the hooks
            what = "a parameter was updated" if isinstance(saved, SavedParameter) else "an activation was changed"
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{what} after the forward that this backward belongs to"
            )
        if type(saved) is SavedParameter:
            self.need_in_backward([saved.unit])
        return tensor

    # -- backward ---------------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """A backward of this model has begun, and its end has not been told."""
        return self._backward

    def open_backward(self) -> None:
        if not self._backward:
            self._backward = True
            self.gathers.catch_up()
            self._begin(BACKWARD, self.gathers.backward, release_when_idle=False)

    def need_in_backward(self, indices: Sequence[int]) -> None:
        if not self._backward:
            self._on_backward()
            self.open_backward()
        if not all(map(self.gathers.ready, indices)):
            self.gathers.need(*indices)
        if torch.is_grad_enabled():  # create_graph: what this backward saves is out of our sight
            self._graph_made = True
            for index in indices:
                self._keep_whole(index)

    def take(self, unit: Unit) -> None:
        """A unit's values are about to change."""
        index = self._index.get(id(unit))
        if index is not None:
            self.gathers.take(index)

    def gradients_came(self, index: int, *, every: bool) -> None:
        """A unit has as many gradients as usual, or one for every parameter."""
        if index not in self._recomputed and (every or not self.gathers.saved[index]):
            self.gathers.done(index)

    def ran(self, indices: Sequence[int]) -> None:
        """A module was run whose inputs will tell when backward has left it."""
        for index in indices:
            self._calls[index] += 1

    def left(self, indices: Sequence[int], frozen: Sequence[int], *, counted: bool) -> None:
        """Backward has left a module. It may have others of its calls before it."""
        for index in indices:
            self._calls[index] -= counted
            if self._calls[index] <= 0 and (index in frozen or index in self._recomputed):
                self.gathers.done(index)

    def close_backward(self) -> None:
        if self._backward:
            self._recomputed.clear()
            self._calls = [0] * len(self.units)
            self.backward_seen += self.gathers.seen
            if not self._graph_made:
                self._unpin()
            self._graph_made = self._backward = False
            self.gathers.end()

    def learn(self, forwards: Sequence[list[int]], backwards: Sequence[list[int]]) -> None:
        """Take the order rank 0 showed. Units it did not use keep a place, as any rank may use them later. In backward
        those are left out that no rank needed, if they are of embeddings, or frozen and used by some rank."""
        everything = range(len(self.units))
        self.gathers.forward = _with_missing(forwards[0], everything)
        forward, backward = set().union(*forwards), set().union(*backwards)
        spared = self.looked_up_only | {i for i in everything if not self.units[i].trained and i in forward}
        wanted = [index for index in everything if index in backward or index not in spared]
        order = list(dict.fromkeys(backwards[0]))
        self.gathers.backward = [i for i in _with_missing(order, reversed(wanted)) if i != self.gathers.kept]

    def release_all(self) -> None:
        """Before values change: no whole copy may outlive them, and peers have had the old ones."""
        self._unpin()
        self._loading = False
        self.gathers.end()
        self.finish_posted()

    def finish_posted(self) -> None:
        for unit in self.units:
            unit.flat_params.finish_posted()

    def pin_all(self) -> None:
        """Make every unit whole and keep it so."""
        self.gathers.catch_up()
        for index, unit in enumerate(self.units):
            self.gathers.need(index)
            unit.flat_params.pins += 1
        self._all_whole += 1

    def unpin_all(self) -> None:
        for unit in self.units:
            unit.flat_params.pins -= 1
        self._all_whole -= 1
        self.gathers.end()

    def keep_across(self, nbytes: int) -> None:
        """Make the first units of forward whole, as many as the budget holds, until this is called again."""
        for index in self._kept:
            self.units[index].flat_params.pins -= 1
        released, self._kept = self._kept, []
        left = 0 if self._all_whole else nbytes
        for index in self.gathers.forward:
            size = self.units[index].layout.numel * self.units[index].layout.itemsize
            if size <= left and index not in self._kept:
                left -= size
                self._kept.append(index)
                self.gathers.need(index)
                self.units[index].flat_params.pins += 1
        if released and not self._backward:
            self.gathers.end()

    def begin_load(self, indices: Sequence[int]) -> None:
        """New values are about to be copied into the parameters of these units."""
        if not self._loading:
            self._loading = True
            self.gathers.catch_up()
            self.gathers.begin("load", [], release_when_idle=True)
        self.gathers.hold(*indices)

    def end_load(self, indices: Sequence[int]) -> None:
        for index in indices:
            self.units[index].flat_params.write_back(Author.LOAD)
            self.gathers.idle(index)

    def _unpin(self) -> None:
        for index in self._pinned:
            self.units[index].flat_params.pins -= 1
        self._pinned.clear()


class GatheringDict(dict[str, "nn.Parameter | None"]):
    """A module's parameters by name; a look-up makes the parameter whole while the model runs."""

    def __init__(self, params: dict[str, nn.Parameter | None], unsharding: Unsharding, units: dict[str, int]) -> None:
        super().__init__(params)
        self._passes, self._unit_of = unsharding, units

    def __getitem__(self, name: str) -> nn.Parameter | None:
        index = self._unit_of.get(name)
        if index is not None:
            self._passes.look_up(index)
        return dict.__getitem__(self, name)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def watch_parameters(modules: Iterator[nn.Module], unit_of: dict[int, int], unsharding: Unsharding) -> None:
    """Let every module that owns a sharded parameter tell when it is looked up."""
    for module in modules:
        units = {name: unit_of[id(p)] for name, p in module._parameters.items() if p is not None and id(p) in unit_of}
        if units:
            module.__dict__["_parameters"] = GatheringDict(module._parameters, unsharding, units)


def _with_missing(order: list[int], everything: Iterable[int]) -> list[int]:
    """`order` with what it lacks of `everything`, each before the first one that follows it there."""
    rank = {index: place for place, index in enumerate(everything)}
    result = list(order)
    for index in rank:
        if index not in order:
            later = (at for at, other in enumerate(result) if rank.get(other, -1) > rank[index])
            result.insert(next(later, len(result)), index)
    return result
