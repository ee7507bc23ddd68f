"""The life of one sharded model: what happens between a backward and the next step.

1 A backward opens with its first gradient, and gradients arrive, unit by unit.
2 Unless the local sums are to be kept (`accumulate(reduce="once")`), complete units are reduced at once; when backward
  closes, the rest. Then each parameter's .grad shows what it is.
3 `complete_gradients` runs once per step, before clipping or updating: the ranks tell each other which parameters they
  used and which units hold gradients that were not reduced, and reduce those. After it, all ranks know the same.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comm, Comms
from onefold.comm.meter import Label
from onefold.comm.spans import spanned
from onefold.errors import ModelError, StateError
from onefold.model.dtensor_shards import aligned, wrapped
from onefold.model.resolved import Resolved
from onefold.model.survey import ATTRIBUTE
from onefold.model.tree import ParameterTree
from onefold.offload.tiers import Tiers
from onefold.runtime.phases import Due, Event, Phase, after_backward, after_drop, after_forward, after_phase
from onefold.runtime.pipeline_axis import Pipeline
from onefold.runtime.reduce_schedule import ReduceSchedule
from onefold.runtime.replicated_gradients import ReplicatedGradients
from onefold.runtime.scaled import running_scale
from onefold.runtime.unsharding import Unsharding
from onefold.runtime.untied import NoTiedParameters
from onefold.runtime.update_policy import NoUpdates, UpdatePolicy
from onefold.settings.placement import Scope
from onefold.settings.zero import check_reduce
from onefold.state.unit import Unit
from onefold.state.visible_gradients import VisibleGradients

UNUSED, USED, DROPPED = 0, 1, 2  # what a rank says of a parameter, one byte each


class Place(NamedTuple):
    """A trained parameter's place: its unit, and which of the unit's slots."""

    unit: int
    slot: int


class AttachedOptimizer(Protocol):
    """What an engine and its reports ask of the Optimizer that was made for a model."""

    def gradients_change(self) -> None: ...

    def forget_clipping(self) -> None: ...

    def planned_state(self, index: int) -> tuple[int, int]: ...


class BlockInputs(Protocol):
    """What reports and pipelines ask of the store of block inputs, where blocks are computed again in backward."""

    blind: bool  # the inputs of this forward hold nothing, so there is nothing to compare
    parts: list[int]  # bytes of each part that the last forward kept
    host_storages: set[int]

    @property
    def ranks(self) -> int: ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]: ...

    def planned(self) -> dict[str, int]: ...

    def planned_gathers(self) -> int: ...


class Engine:
    def __init__(
        self,
        model: nn.Module,
        resolved: Resolved,
        *,
        comms: Comms,
        pool: Pool,
        tiers: Tiers,
        units: Sequence[Unit],
        pipeline: Pipeline,
    ) -> None:
        settings, placement = resolved.settings, resolved.placement
        sharded = [unit for unit in units if unit.placement.parameters is Scope.SHARDED or unit.placement.late]
        self.model, self.resolved, self.pool = model, resolved, pool
        self.comms, self.comm, self.everyone = comms, comms.shard, comms.everyone
        self.pipeline = pipeline
        self.units = [unit for unit in units if unit.trained]
        self.all_units = self.units + [unit for unit in sharded if unit not in self.units]  # frozen sharded ones too
        replicated = resolved.replicated_frozen
        self.frozen = [(name, param) for name, param in model.named_parameters() if name in replicated]
        self._activations_why = ""  # activations="auto": what was chosen, and the reason
        self._open_contexts: list[bool] = []  # open full_parameters contexts: whether their writes are kept
        self._scale: float | None = None  # what the gradients of this step are multiplied by, if there are any
        self.updates: UpdatePolicy = NoUpdates()  # when units are updated
        self.tiers = tiers
        self.optimizer: AttachedOptimizer | None = None  # the Optimizer that was made for this model
        self.alone_in_rank = True  # no other part of the same model is here
        self.tied = NoTiedParameters()  # which of these parameters another stage of a pipeline holds too
        self.checkpoints: BlockInputs | None = None  # where blocks are computed again
        self.device = pool.device
        self._background_comm: Comm | None = None  # all ranks, for saving and loading; made when it is first needed
        self.broken = ""  # why the values are of no use
        self.names = [slot.name for unit in self.units for slot in unit.layout.slots]
        self.params = [param for unit in self.units for param in unit.params]
        self.places = [Place(u, s) for u, unit in enumerate(self.units) for s in range(len(unit.params))]
        sizes = [len(unit.params) for unit in self.units]
        self.first_param = list(accumulate(sizes, initial=0))[:-1]
        self.schedule = ReduceSchedule(self.units, self._starting, self._reduced)
        negotiate = settings.schedule == "negotiate"
        self.unsharding = Unsharding(
            sharded, settings.prefetch, settings.live_bytes, self.enter_backward, self.comm, negotiate=negotiate
        )
        self.visible = VisibleGradients(self.params, self.names)
        self.used = bytearray(len(self.params))  # by this rank, since gradients were last dropped
        self.kept = bytearray(len(self.params))  # to be updated: used by some rank, dropped by none; after settle
        self._pass_index = {id(unit): index for index, unit in enumerate(sharded)}
        self._whole = ReplicatedGradients(
            self.units, wanted=placement.optimizer is Scope.REPLICATED and not placement.updated_on_host
        )
        self._accumulators: list[Node] = []  # autograd's nodes that carry our hooks
        self._tree = ParameterTree(model)
        self._accumulating: str | None = None
        self._training_thread = threading.get_ident()
        self.phase, self._due = Phase.IDLE, Due.NOTHING
        self.wide_sums = False  # gradients have accumulated: buffers of local sums stay

    # -- what others bring -----------------------------------------------------------------------------------------

    def update_by(self, policy: UpdatePolicy, optimizer: AttachedOptimizer | None = None) -> None:
        """Units are updated by this policy from now on."""
        self.updates, self.optimizer = policy, optimizer

    def tie(self, tied: NoTiedParameters) -> None:
        """Another stage of a pipeline holds some of these parameters too."""
        self.tied = tied

    def share_rank(self) -> None:
        """This rank holds other parts of the same model, too."""
        self.alone_in_rank = False

    def tell_activations(self, why: str) -> None:
        """What activations="auto" has chosen, and the reason, or why it has not yet: shard() cannot know."""
        self._activations_why = why

    @property
    def why(self) -> str:
        """Every automatic choice, and the reasons, as placement() tells them."""
        return "; ".join(told for told in (self.resolved.why, self._activations_why) if told)

    def keep_block_inputs(self, store: BlockInputs) -> None:
        """Blocks are computed again in backward, from what this store keeps."""
        self.checkpoints = store

    def hold_accumulator(self, node: Node) -> None:
        """Autograd itself forgets a node, and its hooks, that nobody holds."""
        self._accumulators.append(node)

    def background_comm(self, timeout_s: float) -> Comm:
        """All ranks, over a group of its own, for what may take long or run in another thread. Collective at first."""
        if self._background_comm is None:
            self._background_comm = self.comms.world.new_gloo_group("background", timeout_s)
        return self._background_comm

    @property
    def in_full_parameters(self) -> bool:
        """A full_parameters context is open."""
        return bool(self._open_contexts)

    @property
    def in_writable_full_parameters(self) -> bool:
        """A full_parameters context is open whose writes are kept."""
        return any(self._open_contexts)

    @contextmanager
    def unsharded(self, *, write: bool) -> Iterator[bool]:
        """Every parameter is whole on every rank. True if this context is the outermost one whose writes are kept."""
        outermost = write and not self.in_writable_full_parameters
        self.unsharding.pin_all()
        self._open_contexts.append(write)
        try:
            yield outermost
        finally:
            self._open_contexts.pop()
            self.unsharding.unpin_all()

    def mark_broken(self, why: str) -> None:
        """The values are of no use until a load has replaced them all."""
        self.broken = why

    def mark_repaired(self) -> None:
        """All values have been replaced."""
        self.broken = ""

    def check_usable(self) -> None:
        """Raises if the values are of no use."""
        if self.broken:
            raise StateError(self.broken)

    # -- forward and backward --------------------------------------------------------------------------------------

    @property
    def reducing(self) -> bool:
        return self._accumulating != "once"

    def before_forward(self) -> None:
        self.check_usable()
        self.updates.finish()
        if torch.is_grad_enabled():
            self._training_thread = threading.get_ident()
        self.close_failed_backward()
        if torch.is_grad_enabled():
            self.check_parameters()
            self._due = after_forward(self._due, reducing=self.reducing)

    def enter_backward(self) -> None:
        """Called inside backward, in its outermost graph where we can: its end closes what was opened."""
        if not self.unsharding.in_backward:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_backward)
            self.unsharding.open_backward()

    def gradient_coming(self) -> None:
        """Autograd is about to put a gradient into .grad, which must be free for it. The first one opens backward."""
        if self.phase is Phase.BACKWARD:
            return
        self.enter_backward()
        self._forget_dropped()  # may raise: nothing is open then
        self._check_scale()
        self.tied.check_backward()
        self._begin_reductions()
        self._move(Event.OPENED)
        self.visible.hide()

    def _check_scale(self) -> None:
        """All backwards of a step have one scale, and fp16 has one at all. Clipping comes after them."""
        scale = running_scale()
        if self.resolved.precision.compute is torch.float16 and scale is None:
            raise StateError("fp16 gradients need a loss scale: call optimizer.backward(loss), not loss.backward()")
        if any(self.used) and self._scale is not None and self._scale != (scale or 1.0):
            raise StateError(f"gradients scaled by {self.grad_scale:g} and {scale or 1.0:g} would add up in one step")
        if self.optimizer is not None and any(self.used):
            self.optimizer.gradients_change()
        self._scale = scale or 1.0

    @property
    def grad_scale(self) -> float:
        """What the gradients of this step are multiplied by."""
        return 1.0 if self._scale is None else self._scale

    def _begin_reductions(self) -> None:
        """What came too late for the rounds of an earlier backward is reduced first: at every stage alike."""
        self.updates.check_backward()
        if self.phase is Phase.REDUCED:
            rows = self.everyone.gather_bytes(self._waiting(), Label("used-flags", "backward"))
            self._agree_on_order()
            self._reduce_late(bytes(map(max, zip(*rows, strict=True))))
            self._move(Event.LATE_REDUCED)
        self.schedule.begin(final=self._accumulating is None)

    def _waiting(self) -> bytes:
        return bytes(unit.gradients.waiting for unit in self.units)

    def _reduce_late(self, waiting: bytes) -> None:
        for index in self.schedule.order:
            if waiting[index]:
                self.schedule.extra_reduction(index)

    def gradient_arrived(self, index: int) -> None:
        """A parameter's .grad has been made by autograd: take it."""
        param = self.params[index]
        grad, param.grad = param.grad, None
        if grad is None:
            return
        if torch.is_grad_enabled():  # create_graph
            with torch.no_grad():
                self._take(index, grad)
        else:
            self._take(index, grad)

    def _take(self, index: int, grad: Tensor) -> None:
        at, slot = self.places[index]
        unit = self.units[at]
        self.updates.check_gradient(index)
        unit.gradients.add(slot, grad if type(grad) is Tensor else self._aligned(index, grad))
        self.used[index] = USED
        if self.schedule.arrived(at, start=self._accumulating != "once"):
            sharded = self._pass_index.get(id(unit))
            if sharded is not None:
                self.unsharding.gradients_came(sharded, every=self.schedule.count(at) >= len(unit.params))

    def _aligned(self, index: int, grad: Tensor) -> Tensor:
        """A gradient as its parameter lies on the ranks of "tp", which run the same backward in the same order."""
        local, collective, sent_bytes = aligned(grad, self.params[index])
        if collective:
            self.comm.meter.count("tp-gradient", collective, sent_bytes)
        return local

    @spanned("close", "backward", "the model")
    def _end_of_backward(self) -> None:
        if self.unsharding.in_backward:  # else an error cut it short and it has been tidied
            with torch.no_grad():
                closed = self._close()
                shows = self._accumulating is None and self.updates.keeps_gradients
                if closed and shows and not self.tied.names:  # else the other end may still be in its backward
                    self.show_gradients()

    def _close(self) -> bool:
        """True if the backward brought gradients."""
        gradients, reducing = self.phase is Phase.BACKWARD, self.reducing
        self._due = after_backward(self._due, gradients=gradients, reducing=reducing)
        if gradients:
            self._move(Event.REDUCED if reducing else Event.SUMMED)
        self.unsharding.close_backward()
        if gradients:
            self.schedule.flush(start=reducing)
        return gradients

    def _move(self, event: Event) -> None:
        self.phase = after_phase(self.phase, event)

    def close_failed_backward(self) -> None:
        """A backward that raised left rounds half done: complete the order, so that all ranks stay in step."""
        ours = threading.get_ident() == self._training_thread  # another thread may run a forward during our backward
        if self.unsharding.in_backward and ours and torch._C._current_graph_task_id() == -1:
            self._close()

    def _starting(self, index: int) -> None:
        self.updates.reduction_starts(index)

    def _reduced(self, index: int, final: bool) -> None:
        if not self.updates.reduced(index, final=final):
            self._whole.reduced(index, gather=final and index not in self.tied.units)

    # -- between backward and step ---------------------------------------------------------------------------------

    def complete_gradients(self) -> None:
        """Agree on what was used and reduce what is left. Collective; once per step."""
        self.close_failed_backward()
        self.unsharding.gathers.catch_up()
        if self.phase is Phase.AGREED:
            self._mark_dropped()
            return
        self._bring_what_is_due()
        if self.updates.keeps_gradients:
            late = self._agree_on_used()
            self._agree_on_order()
            self._reduce_late(late)
            self.tied.sum()
        else:  # what ranks used of a unit travelled beside its reduction, the only one
            self._agree_on_order()
            self.schedule.drain()
        if self._whole.wanted:
            self.schedule.drain()
            self._whole.gather_all()
        self._move(Event.AGREED)

    def _agree_on_used(self) -> bytes:
        """Tell which parameters this rank used; which units hold, on any rank, gradients that no round has taken."""
        said = bytearray(self.used)
        for index in self.visible.dropped():
            said[index] = DROPPED
        rows = self.everyone.gather_bytes(bytes(said) + self._waiting(), Label("used-flags", "step"))
        words = bytearray(map(max, zip(*rows, strict=True)))
        self.kept = bytearray(word == USED for word in words[: len(said)])
        if not any(words[: len(said)]):
            raise StateError("no rank has gradients: call loss.backward() before optimizer.step() or clip_grad_norm()")
        return bytes(words[len(said) :])

    def _bring_what_is_due(self) -> None:
        """If this rank's backward touched no parameter, or never came, its peers wait for its shards and its zeros."""
        if self.updates.awaits_step:
            return  # all reductions have run
        if self._due is Due.NOTHING or (any(self.used) and self._due is not Due.ZEROS):
            if not any(self.used):
                raise StateError("no gradients: call loss.backward() before optimizer.step() or clip_grad_norm()")
            return
        if self._due is not Due.ZEROS:
            self.unsharding.open_backward()
            self.unsharding.close_backward()
        self._begin_reductions()
        self.schedule.flush(start=True)
        self._due = Due.NOTHING

    def _agree_on_order(self) -> None:
        """From the first backward on, all ranks follow the order in which rank 0 used and completed its units."""
        if self.schedule.agreed:
            return
        mine = [self.schedule.order_seen(), self.unsharding.forward_seen, self.unsharding.backward_seen]
        blobs = self.everyone.exchange(json.dumps(mine).encode(), Label("agree", "the order of units"))
        ranks = [json.loads(blob) for blob in blobs]
        self.schedule.order, self.schedule.agreed = ranks[0][0], True
        self.unsharding.learn([rank[1] for rank in ranks], [rank[2] for rank in ranks])
        self.pool.trim()  # in the first backward units may have waited for another order

    def wait_reduced(self, index: int) -> Unit:
        """A unit whose gradient is complete."""
        self.schedule.finish(index)
        return self.units[index]

    def counts(self, name: str) -> bool:
        """Whether a parameter counts here: what is the same on all ranks of "tp" counts on the first of them."""
        return self.comms.tp.rank == 0 or name in self.resolved.tensor_shards

    def keep(self, index: int, kept: bytes) -> None:
        """Which parameters of a unit are to be updated: those that some rank used."""
        first = self.first_param[index]
        self.kept[first : first + len(kept)] = kept

    def forget_used(self) -> None:
        """The gradients of this step have been used up."""
        self.used = bytearray(len(self.params))
        self._move(Event.DROPPED)

    def kept_of(self, index: int) -> bytearray:
        """Which parameters of a unit are to be updated, a flag each."""
        first = self.first_param[index]
        return self.kept[first : first + len(self.units[index].params)]

    def quiesce(self, *, host: bool = True) -> None:
        """Nothing is in flight, and what users wrote has reached the masters: values may be read, updated or replaced
        as one state. Collective. Without `host`, host updates may go on: forwards and steps wait for each unit where
        it is used. Inside full_parameters(write=True) users are not through, so their writes are not looked at."""
        self.updates.finish()
        if host:
            self.updates.wait()
        if not self.in_writable_full_parameters:
            for unit in self.units:
                unit.take_edits()

    def after_step(self) -> None:
        """Tell the schedule which units were used."""
        for index in range(len(self.units)):
            self.schedule.step_over(index, used=any(self.kept_of(index)))
        self.comm.meter.cut()

    def drop_gradients(self, *, keep_as_zeros: bool = False) -> None:
        self.close_failed_backward()
        self.updates.check_zero_grad()
        self.schedule.drain()
        self._whole.drop()
        for unit in self.units:
            unit.gradients.zero() if keep_as_zeros else unit.gradients.drop()
        self._move(Event.DROPPED)
        self._scale = None  # zeros have none
        self.tied.forget()
        if self.optimizer is not None:
            self.optimizer.forget_clipping()
        if not keep_as_zeros:
            self._due = after_drop(self._due)
            self.visible.hide()
            self.used = bytearray(len(self.params))

    def keep_wide_sums(self) -> None:
        """Gradients have accumulated in this run: from then on sums are fp32."""
        self.wide_sums = True
        for unit in self.units:
            unit.gradients.widen()

    @contextmanager
    def accumulate(self, reduce: str | None) -> Iterator[None]:
        check_reduce(reduce)
        self.updates.check_accumulation()
        if self._accumulating is not None:
            raise StateError("accumulate() is already on for this model; leave the outer one first")
        self._accumulating = reduce or ("once" if self.resolved.placement.gradients is Scope.REPLICATED else "each")
        self.keep_wide_sums()
        try:
            yield
        finally:
            self._accumulating = None

    def keep_across(self, nbytes: int) -> None:
        """Stage 3: let units of so many bytes stay whole over the passes that follow; 0 releases them again."""
        if self.schedule.agreed:  # before that the passes are being watched
            self.unsharding.keep_across(nbytes)

    # -- what users see --------------------------------------------------------------------------------------------

    def show_gradients(self) -> None:
        """Values where gradients are whole, else placeholders."""
        if self._whole.wanted:
            self.complete_gradients()
            used = [index for index, kept in enumerate(self.kept) if kept]
            self.visible.show(used, self._whole_gradient)
        else:
            self.visible.show_placeholders()

    @torch.no_grad()
    def end_schedule(self) -> None:
        """All backwards of a pipeline's schedule are through, here and at the other stages: show what is tied."""
        if self.tied.names:
            self.show_gradients()

    def _whole_gradient(self, index: int) -> Tensor:
        place = self.places[index]
        return wrapped(self.params[index], self.units[place.unit].gradients.whole_view(place.slot))

    def _mark_dropped(self) -> None:
        """Set to None since the ranks agreed (on every rank alike)."""
        for index in self.visible.dropped():
            self.kept[index] = 0

    def _forget_dropped(self) -> None:
        """Set to None before another backward: what was there does not add to what comes."""
        dropped = self.visible.dropped()
        if dropped:
            self.schedule.drain()
            self._whole.wait()
        for index in dropped:
            self.units[self.places[index].unit].gradients.forget(self.places[index].slot)
            self.used[index] = UNUSED

    def check_parameters(self) -> None:
        """The model still has the parameters it had when it was sharded, and they are where we put them."""
        self._tree.check()
        for unit in self.all_units:
            unit.flat_params.check()
        sharded = [(s.name, p) for u in self.all_units[len(self.units) :] for s, p in zip(u.layout.slots, u.params)]
        for name, param in self.frozen + sharded:
            if param.requires_grad:
                raise StateError(f"{name} was frozen when shard() was called and is not now; unfreeze before shard()")

    def refuse_copy(self, *_: Any) -> NoReturn:
        raise StateError(
            "a sharded model cannot be copied or pickled: its parameters are views of buffers shared with other ranks; "
            "copy the model before shard(), or save onefold.full_state_dict(model)"
        )

    __deepcopy__ = __reduce_ex__ = refuse_copy


def engine_of(model: nn.Module) -> Engine:
    engine = model.__dict__.get(ATTRIBUTE) if isinstance(model, nn.Module) else None
    if engine is None:
        raise ModelError(f"{type(model).__name__} has not been sharded; call onefold.shard(model, ...) first")
    return engine
