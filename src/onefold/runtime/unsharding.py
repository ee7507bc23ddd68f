"""When units with sharded parameters are unsharded and resharded in forward and backward (stage 3).

Forward. A block's units are unsharded before the block runs, and idle when it has run. So are the units of a module
outside every block that has parameters of its own and no submodules (an embedding, a norm, a head). A parameter looked
up anywhere else while the root runs (a tied weight, a parameter of the root itself) is unsharded at the look-up and
stays so until the root's forward ends, since its uses cannot be followed; so is one that an operation uses that came by
another way (`self.parameters()`).

Outside. Between a training forward and its backward, where a loss is computed, an operation that uses a parameter's
values unshards its unit, and tensors that autograd saves are treated as in forward: all ranks compute the same loss. At
any other time such an operation raises, since other ranks may not run it.

Backward. When autograd saves a parameter, or a view of one, during forward, its unit is remembered; when autograd
unpacks that tensor, the unit is unsharded first. A hook on a module's output unshards all its units (not those of an
embedding, whose weights are not needed), for functions that keep a parameter without autograd's saved tensors. A unit
is resharded when all its parameters have their gradients, or when as many as usual have and no graph has saved its
tensors. Frozen units, and units of recomputed blocks (whose saved tensors are not tracked), are resharded when the
inputs of the module have their gradients. The rest is resharded when backward ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from onefold.comm.communicator import Comm
from onefold.comm.inflight import finish_posted_at_exit
from onefold.comm.meter import Label
from onefold.model.containers import as_list
from onefold.model.dtensor_shards import PLAIN, local_tensor
from onefold.runtime.gather_schedule import BACKWARD, FORWARD, LOAD, NONE, GatherSchedule
from onefold.runtime.refusals import Call, Situation, refuse
from onefold.runtime.unit_order import with_missing
from onefold.state.unit import Unit

T = TypeVar("T")
UNSEEN = ".data"  # what is read or written through it, autograd does not see


class SavedParameter:
    """What autograd keeps of a saved tensor that is a view of a unit's flat buffer."""

    __slots__ = ("_alive", "tensor", "unit", "version")

    def __init__(self, unit: int, tensor: Tensor, alive: list[int]) -> None:
        self.unit, self.tensor, self.version, self._alive = unit, tensor, tensor._version, alive
        alive[unit] += 1

    def __del__(self) -> None:
        self._alive[self.unit] -= 1


class SavedActivation(NamedTuple):
    """What autograd keeps of any other saved tensor."""

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
        reshard_after_forward: bool,
    ) -> None:
        self._on_backward, self._comm = on_backward, comm
        finish_posted_at_exit(self)
        self.units = list(units)
        self.gathers = GatherSchedule(
            units, prefetch, live_bytes, comm, negotiate=negotiate, reshard_after_forward=reshard_after_forward
        )
        self._index = {id(unit): index for index, unit in enumerate(self.units)}
        self._by_storage = {unit.flat_params.storage: index for index, unit in enumerate(units)}
        self._recomputed = set[int]()  # units of recomputed blocks, whose saved tensors are not tracked
        self._running: list[int] = []  # ids of hooked modules that run, the innermost last
        self._looked_up: set[int] = set()  # units that stay unsharded until the root's forward ends
        self._pinned: set[int] = set()  # units in the root's outputs or in a graph that backward made: until it ends
        self._interrupted = False  # the last forward was, and its gathers have not been ended
        self._backward = False
        self._loss_due = False  # a training forward has ended, and no backward since
        self._outside: list[int] = []  # units that the last operation outside forward and backward used
        self._outside_runs = 0  # such operations that run: one for each unit of the parameters of one call
        self._graph_made = False
        self._loading = False
        self._full_contexts = 0  # open full_parameters contexts
        self._kept: list[int] = []  # units that stay unsharded over several forwards and backwards (keep_across)
        self._calls = [0] * len(self.units)  # per unit: calls of its modules whose backward has not ended
        self._order_known = False  # whether ranks have agreed on the order of forward
        self.forward_seen: list[int] = []
        for index, unit in enumerate(self.units):
            unit.flat_params.guard.ask(partial(self._use, index))
        self.backward_seen: list[int] = []

    def retire(self) -> None:
        """The units of the model have changed: a backward of a forward before that raises."""
        self._on_backward = partial(refuse, Call.BACKWARD, Situation.OLD_GRAPH)

    # -- forward ----------------------------------------------------------------------------------------------------

    def enter(self, module: int, indices: Sequence[int], *, root: bool = False) -> None:
        """A hooked module begins its forward: unshards its units."""
        if in_backward():  # a recomputation; backward decides when to reshard
            self._on_backward()
            self.open_backward()
            self._recomputed.update(indices)
            self.gathers.unshard(*indices)
            return
        if not self._running:
            self._check_transforms()
            if root:
                keep = self.gathers.kept_units if torch.is_grad_enabled() else NONE
                self._begin(FORWARD, self.gathers.forward, reshard_when_idle=True, keep=keep)
            torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
        self._running.append(module)
        self.gathers.hold(*indices)

    def _check_transforms(self) -> None:
        """Raises inside torch.func's transforms, where units cannot be unsharded: before any message is sent."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            refuse(Call.FORWARD, Situation.TRANSFORMED)

    @property
    def running(self) -> bool:
        """True while a hooked module, or a method of the model, runs."""
        return bool(self._running)

    def _begin(self, purpose: str, order: list[int], *, reshard_when_idle: bool, keep: frozenset[int] = NONE) -> None:
        if self._interrupted:
            self._interrupted = False
            self.gathers.end()
        self._end_outside_use()
        order = [] if self._full_contexts else [index for index in order if index not in self._kept]
        self.gathers.begin(purpose, order, reshard_when_idle=reshard_when_idle, keep=keep)

    def leave(self, module: int, indices: Sequence[int], output: Sequence[Tensor], *, root: bool = False) -> None:
        """A hooked module has ended its forward, also by an error: its units may be resharded. A module that failed
        before `enter` is ignored."""
        if in_backward() or module not in self._running:
            return
        while self._running.pop() != module:
            pass
        for tensor in output if self._running else ():  # a parameter, or a view of one, that other modules get
            handed_on = self._unit_of(tensor)
            if handed_on is not None:
                self._hold_until_forward_ends(handed_on)
        for index in indices:
            self.gathers.idle(index)
        if self._running:
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        for index in self._looked_up:
            self.gathers.idle(index)
        self._looked_up.clear()
        self._keep_returned(output)
        self._loss_due = self._loss_due or torch.is_grad_enabled()
        if root:
            self.forward_seen = self.gathers.seen
        self.gathers.end()

    def interrupt(self, module: int) -> None:
        """KeyboardInterrupt or SystemExit has ended the forward of a hooked module: removes the saved-tensor hooks. The
        gathers of that forward are ended by the next forward or backward; ending them here could wait for peers that
        have exited."""
        if in_backward() or module not in self._running:
            return
        while self._running.pop() != module:
            pass
        if not self._running:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._looked_up.clear()
            self._interrupted = True

    def _keep_returned(self, output: Sequence[Tensor]) -> None:
        """Keeps a parameter that the root returns unsharded until backward ends."""
        for tensor in output:
            index = self._unit_of(tensor)
            if index is not None:
                self._pin(index)

    def _unit_of(self, tensor: Tensor) -> int | None:
        """The unit whose flat buffer a tensor is a view of."""
        try:
            local = tensor if type(tensor) in PLAIN else local_tensor(tensor)
            return self._by_storage.get(local.untyped_storage()._cdata)
        except NotImplementedError:  # inside torch.func transforms
            return None

    def _pin(self, index: int) -> None:
        if index not in self._pinned:
            self._pinned.add(index)
            self.units[index].flat_params.pins += 1

    def _hold_until_forward_ends(self, index: int) -> None:
        """Keeps a unit unsharded until the root's forward ends, since the uses of a parameter cannot be followed."""
        if index not in self._looked_up:
            self._looked_up.add(index)
            self.gathers.hold(index)

    def look_up(self, index: int) -> None:
        """A module looked up a parameter of this unit by name: unshards it while the model runs."""
        if self._backward:
            self._recomputed.add(index)
            if not self.gathers.ready(index):
                self.gathers.unshard(index)
        elif self._running and not self.gathers.busy(index):
            self._hold_until_forward_ends(index)

    def _use(self, index: int, name: str, use: str, run: Callable[[], T]) -> T:
        """An operation uses the values of a parameter of this unit, which is sharded, or kept for backward."""
        if in_backward():  # a recomputation, or a hook of the user's
            self._on_backward()
            self.open_backward()
            self._recomputed.add(index)
            self.gathers.unshard(index)
        elif self._running:
            self._hold_until_forward_ends(index)
        elif self._loss_due and torch.is_grad_enabled() and use != UNSEEN:
            return self._run_outside(index, run)
        else:
            refuse(Call.PARAMETER, Situation.RELEASED, name=name, use=use)
        return run()

    def _run_outside(self, index: int, run: Callable[[], T]) -> T:
        """Runs an operation of a loss, with the unit unsharded. Views that it returns keep the unit so until backward
        ends. Other operations on the unit are likely to follow, so it is resharded when another is used. An operation
        on parameters of several units comes here for each of them, the later ones inside the first."""
        if index not in self._outside:
            if not self._outside_runs:
                self._end_outside_use()
            self._outside.append(index)
        self.gathers.hold(index)
        self._outside_runs += 1
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                result = run()
        finally:
            self._outside_runs -= 1
            self.gathers.idle(index)
        self._keep_returned(as_list(result))
        self.units[index].flat_params.hide()
        return result

    def _end_outside_use(self) -> None:
        used, self._outside = self._outside, []
        for index in used:
            if not self.gathers.keeps(index):
                self.gathers.reshard(index)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of some unit's flat buffer."""
        return self._unit_of(tensor) is not None

    def pack(self, tensor: Tensor) -> Any:
        """The saved_tensors_hooks' pack: what autograd keeps of a tensor that forward saves."""
        index = self._unit_of(tensor)
        if index is not None:
            return SavedParameter(index, tensor, self.gathers.saved)
        # detached: an output that its own node saves would keep itself alive; autograd restores its history
        return SavedActivation(tensor if tensor.is_leaf else tensor.detach(), tensor._version)

    def unpack(self, saved: Any) -> Tensor:
        """The saved_tensors_hooks' unpack: unshards the unit of a saved parameter first."""
        tensor: Tensor = saved.tensor
        if tensor._version != saved.version:  # with hooks autograd does not check this itself
            what = "a parameter was updated" if isinstance(saved, SavedParameter) else "an activation was changed"
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{what} after the forward that this backward belongs to"
            )
        if type(saved) is SavedParameter:
            self.need_in_backward([saved.unit])
        return tensor

    @staticmethod
    def called_by_autograd() -> list[Callable[..., Any]]:
        """The functions that run where autograd saves a tensor, also inside compiled code."""
        return [Unsharding.pack, Unsharding._unit_of, SavedParameter.__init__, SavedParameter.__del__, local_tensor]

    def skip_forward_and_backward(self) -> None:
        """Takes part in the all-gathers of a forward of the model and of its backward, which peers run."""
        self._begin(FORWARD, self.gathers.forward, reshard_when_idle=True)
        self.gathers.end()
        self.open_backward()
        self.close_backward()

    # -- backward ---------------------------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """True from `open_backward` to `close_backward`."""
        return self._backward

    def open_backward(self) -> None:
        if not self._backward:
            self._backward = True
            self.gathers.catch_up()
            self._agree_on_forward()
            self._begin(BACKWARD, self.gathers.backward, reshard_when_idle=False)

    def _agree_on_forward(self) -> None:
        """Before the first backward, where all ranks must gather in one order: it is rank 0's first forward, reversed.
        The order of registration may differ, and ranks that skip units leave it in different ways. Collective."""
        if self._order_known or self._comm.size == 1 or self._comm.any_order or not self.units:
            return
        self._order_known, kept = True, self.gathers.kept_units  # by the forward that has ended
        label = Label("agree", "the order of units")
        seen = json.loads(self._comm.broadcast_bytes(json.dumps(self.forward_seen).encode(), label))
        self.gathers.forward = with_missing(seen, range(len(self.units)))
        self.gathers.backward = [i for i in dict.fromkeys(reversed(self.gathers.forward)) if i not in kept]

    def need_in_backward(self, indices: Sequence[int]) -> None:
        if not self._backward:
            self._on_backward()
            self.open_backward()
        if not all(map(self.gathers.ready, indices)):
            self.gathers.unshard(*indices)
        if torch.is_grad_enabled():  # create_graph: the tensors that this backward saves cannot be followed
            self._graph_made = True
            for index in indices:
                self._pin(index)

    def receive_posted(self, unit: Unit) -> None:
        """Receives what peers have posted of a unit whose parameters are about to change."""
        index = self._index.get(id(unit))
        if index is not None:
            self.gathers.receive_posted(index)

    def gradients_came(self, index: int, *, every: bool) -> None:
        """A unit has as many gradients as usual, or `every` parameter's: reshards it if backward needs it no more."""
        if index not in self._recomputed and (every or not self.gathers.saved[index]):
            self.gathers.reshard(index)

    def count_call(self, indices: Sequence[int]) -> None:
        """Counts a call of a module, whose backward has ended when its inputs have gradients (`backward_left`)."""
        for index in indices:
            self._calls[index] += 1

    def backward_left(self, indices: Sequence[int], frozen: Sequence[int], *, counted: bool) -> None:
        """The backward of one call of a module has ended: reshards units that are frozen or recomputed, if it was the
        last call."""
        for index in indices:
            self._calls[index] -= counted
            if self._calls[index] <= 0 and (index in frozen or index in self._recomputed):
                self.gathers.reshard(index)

    def close_backward(self) -> None:
        if self._backward:
            self._recomputed.clear()
            self._calls = [0] * len(self.units)
            self.backward_seen += self.gathers.seen
            if not self._graph_made:
                self._unpin()
            self._graph_made = self._backward = self._loss_due = False
            self.gathers.end()

    def learn(
        self, forward: list[int], backward: list[int], *, used_in_forward: set[int], used_in_backward: set[int]
    ) -> None:
        """Sets the gather schedule to the orders that rank 0 saw. Units it did not use keep a place, since any rank may
        use them later; but backward leaves out units of embeddings, and frozen units that some rank used in forward, if
        no rank needed them in backward."""
        everything = range(len(self.units))
        self.gathers.forward = with_missing(forward, everything)
        spared = self.gathers.embeddings | {i for i in everything if not self.units[i].trained and i in used_in_forward}
        wanted = [index for index in everything if index in used_in_backward or index not in spared]
        order = with_missing(list(dict.fromkeys(backward))[::-1], wanted)
        self.gathers.backward = [i for i in reversed(order) if i not in self.gathers.kept_units]

    def reshard_all(self) -> None:
        """Reshards all units and waits until peers have received this rank's shards, before the shards change."""
        self._unpin()
        self._loading = False
        self.gathers.end()
        self.finish_posted()

    def finish_posted(self) -> None:
        for unit in self.units:
            unit.flat_params.finish_posted()

    def pin_all(self) -> None:
        """Unshards every unit and keeps it unsharded until `unpin_all`."""
        self.gathers.catch_up()
        for index, unit in enumerate(self.units):
            self.gathers.unshard(index)
            unit.flat_params.pins += 1
        self._full_contexts += 1

    def unpin_all(self) -> None:
        for unit in self.units:
            unit.flat_params.pins -= 1
        self._full_contexts -= 1
        self.gathers.end()

    def keep_across(self, nbytes: int) -> None:
        """Keeps the first units of forward unsharded, as many as fit into so many bytes, until the next call."""
        for index in self._kept:
            self.units[index].flat_params.pins -= 1
        released, self._kept = self._kept, []
        left = 0 if self._full_contexts else nbytes
        for index in self.gathers.forward:
            size = self.units[index].layout.numel * self.units[index].layout.itemsize
            if size <= left and index not in self._kept:
                left -= size
                self._kept.append(index)
                self.gathers.unshard(index)
                self.units[index].flat_params.pins += 1
        if released and not self._backward:
            self.gathers.end()

    def begin_load(self, indices: Sequence[int]) -> None:
        """Gives units memory for the parameters that load_state_dict() is about to copy. Sends nothing: a load that one
        rank makes alone is found in step()."""
        if not self._loading:
            self._loading = True
            self.gathers.catch_up()
            self.gathers.begin(LOAD, [], reshard_when_idle=True)
        self.gathers.hold(*indices)

    def end_load(self, indices: Sequence[int]) -> None:
        """Keeps what load_state_dict() has copied into the parameters of these units."""
        for index in indices:
            self.units[index].flat_params.write_back()
            self.gathers.idle(index)

    def _unpin(self) -> None:
        for index in self._pinned:
            self.units[index].flat_params.pins -= 1
        self._pinned.clear()


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
