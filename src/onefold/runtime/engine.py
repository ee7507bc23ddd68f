"""The life of one sharded model: what happens from a forward to the next step.

1 A backward opens with its first gradient (backward.py), and gradients arrive, unit by unit (arriving_gradients.py).
2 Unless local sums are kept (accumulating.py), complete units are reduced at once, in one order for all ranks
  (reduce_schedule.py); when backward closes, the rest. Then users see gradients, or placeholders, in .grad.
3 `complete_gradients` runs once per step, before clipping or updating: the ranks tell each other what they used, and
  reduce what is left (completing.py). After it, all ranks know the same. The update policy updates the units, and
  `drop_gradients` ends the step (dropping.py).

`progress` says how far the step is (phases.py); calls that are not allowed now are refused by a table (refusals.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from onefold.comm.buffers import Pool
from onefold.comm.communicator import Comm, Comms
from onefold.comm.freed import FreedMemory
from onefold.errors import ModelError, StateError
from onefold.model.dtensor_shards import wrapped
from onefold.model.resolved import Resolved
from onefold.model.survey import ATTRIBUTE
from onefold.offload.tiers import Tiers
from onefold.runtime.accumulating import Accumulating, check_reduce
from onefold.runtime.arriving_gradients import ArrivingGradients, Place
from onefold.runtime.attached import AttachedOptimizer, AttachedOptimizers, Averages, BlockInputs
from onefold.runtime.attachments import Attachments
from onefold.runtime.backward import Backward
from onefold.runtime.block_choice import BlockChoice
from onefold.runtime.completing import CompletingGradients
from onefold.runtime.done_alike import DoneAlike
from onefold.runtime.dropping import DroppingGradients
from onefold.runtime.freezing import Freezing
from onefold.runtime.no_parking import NoParking
from onefold.runtime.no_unfreezing import NoUnfreezing
from onefold.runtime.no_watch import NoWatch
from onefold.runtime.open_contexts import FullParameterContexts
from onefold.runtime.parameter_checks import ParameterChecks
from onefold.runtime.phases import Event, Phase, Progress
from onefold.runtime.pipeline_axis import Pipeline
from onefold.runtime.reduce_schedule import ReduceSchedule
from onefold.runtime.refusals import Call, Situation, refuse
from onefold.runtime.replicated_gradients import ReplicatedGradients
from onefold.runtime.scaled import GradientScale
from onefold.runtime.sequence_watch import NoSequences
from onefold.runtime.situations import check
from onefold.runtime.unsharding import Unsharding
from onefold.runtime.untied import NoTiedParameters
from onefold.runtime.update_policy import UpdatePolicy
from onefold.runtime.used_parameters import UsedParameters
from onefold.settings.placement import Scope
from onefold.state.edits import Edits
from onefold.state.unit import Unit
from onefold.state.visible_gradients import VisibleGradients


class Engine:
    """Drives one sharded model; hooks, Optimizers and reports ask it, and it owns the objects that do the work."""

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
        sequences: NoSequences,
    ) -> None:
        self.sequences = sequences  # watches attention where sequences are cut
        self.model, self.pool, self.tiers = model, pool, tiers
        self.comms, self.comm, self.everyone = comms, comms.shard, comms.everyone
        self.pipeline = pipeline
        self.attachments = Attachments()  # to the model's modules and parameters
        self._activations_why = ""  # activations="auto": what was chosen, and the reason
        self.optimizers = AttachedOptimizers()  # that were made for this model
        self.averages = Averages()
        self.alone_in_rank = True  # no other part of the same model is here
        self.tied = NoTiedParameters()  # which of these parameters another stage of a pipeline holds too
        self.device = pool.device
        self._background_comms: dict[str, Comm] = {}  # all ranks, by purpose; made when they are first needed
        self.alike = DoneAlike(self.everyone, self.optimizers.groups, lambda: self.accumulating.wide_sums)
        self._gradients_used = False  # by a step(), since a backward brought them
        self.unfreezing = NoUnfreezing()
        self.watch = NoWatch()  # over the memory of the device, where steps decide by it
        self.parking = NoParking()  # of state in host memory before a forward that may take more than any before
        self.ended = False  # by unshard()
        self.trains = True  # this forward uses a parameter of the model; not where functional_call has swapped them all
        self.broken: Situation | None = None  # why the values are of no use
        self.broken_unit = ""  # whose update failed
        self.assemble(resolved, units)

    def assemble(self, resolved: Resolved, units: Sequence[Unit]) -> None:
        """Builds everything that depends on the list of units. Called again when units change; nothing is in flight."""
        settings, placement, model = resolved.settings, resolved.placement, self.model
        sharded = [
            unit for unit in units if unit.placement.parameters is Scope.SHARDED or unit.placement.hidden_between_passes
        ]
        self.resolved = resolved
        self.units = [unit for unit in units if unit.trained]
        self.all_units = self.units + [unit for unit in sharded if unit not in self.units]  # frozen sharded ones too
        replicated = resolved.replicated_frozen
        self.frozen = [(name, param) for name, param in model.named_parameters() if name in replicated]
        self.frozen_edits = Edits([param for _, param in self.frozen])
        self.checkpoints: BlockInputs | None = None  # where blocks are computed again
        self.block_choice: BlockChoice | None = None  # how many of these may keep their activations, if a step decides
        self.names = [slot.name for unit in self.units for slot in unit.layout.slots]
        self.params = [param for unit in self.units for param in unit.params]
        self.places = [Place(u, s) for u, unit in enumerate(self.units) for s in range(len(unit.params))]
        freed = FreedMemory(self.device, counts=self.comms.shard.on_stream or self.comms.replica.on_stream)
        self.schedule = ReduceSchedule(self.units, self._starting, self._reduced, freed)
        negotiate = settings.schedule == "negotiate"
        self.unsharding = Unsharding(
            sharded, settings.prefetch, settings.live_bytes, self.enter_backward, self.comm, negotiate=negotiate,
            reshard_after_forward=settings.reshard_after_forward,
        )  # fmt: skip
        self.visible = VisibleGradients(self.params, self.names)
        self.accumulating = Accumulating(self.units, placement.gradients)
        replicated_gradients = placement.optimizer is Scope.REPLICATED and not placement.updated_on_host
        self._replicated = ReplicatedGradients(self.units, self.accumulating, wanted=replicated_gradients)
        self._accumulators: list[Node] = []  # autograd's nodes that carry our hooks
        self.progress = Progress()
        self.freezing = Freezing(self.units, self.params, self.optimizers)
        self.used = UsedParameters([len(unit.params) for unit in self.units])
        self.scale = GradientScale(needed=resolved.precision.compute is torch.float16)
        self.contexts = FullParameterContexts(self.unsharding)
        self.arriving = ArrivingGradients(
            self.units, self.params, self.places, self.used,
            self.schedule, self.unsharding, self.accumulating, self.comm,
        )  # fmt: skip
        self.completing = CompletingGradients(
            self.units, self.comms, self.pool, schedule=self.schedule, unsharding=self.unsharding,
            accumulating=self.accumulating, replicated=self._replicated, used=self.used, visible=self.visible,
            progress=self.progress, alike=self.alike, optimizers=self.optimizers, tied=lambda: self.tied,
        )  # fmt: skip
        self._dropping = DroppingGradients(
            self.units, self.places, schedule=self.schedule, replicated=self._replicated, arriving=self.arriving,
            used=self.used, visible=self.visible, progress=self.progress, scale=self.scale, optimizers=self.optimizers,
            tied=lambda: self.tied,
        )  # fmt: skip
        self._backward = Backward(
            self.unsharding, self.schedule, self.progress, self.accumulating, self._backward_closed, self.call_failed
        )
        self._checks = ParameterChecks(model, self.all_units, self.frozen)

    # -- what others bring -----------------------------------------------------------------------------------------

    @property
    def updates(self) -> UpdatePolicy:
        """When units are updated."""
        return self.optimizers.policy

    def update_by(self, policy: UpdatePolicy, optimizer: AttachedOptimizer) -> None:
        """A new Optimizer updates its parameters by this policy from now on."""
        self.updates.wait()
        self.parking.bring_back()  # for an older Optimizer, which may be gone afterwards
        self.optimizers.add(optimizer, policy)

    def tie(self, tied: NoTiedParameters) -> None:
        """Another stage of a pipeline holds some of these parameters too."""
        self.tied = tied

    def share_rank(self) -> None:
        """This rank holds other parts of the same model, too."""
        self.alone_in_rank = False

    def watch_memory(self, watch: NoWatch, parking: NoParking) -> None:
        """Steps decide where optimizer state is, by the memory that this watch sees."""
        self.watch, self.parking = watch, parking

    def see_placements(self, resolved: Resolved) -> None:
        """The optimizer state of some units is on other tiers now; their unit optimizers follow."""
        before = self.resolved.units
        self.resolved = resolved
        trained = [(old, new) for old, new in zip(before, resolved.units, strict=True) if new.trained]
        self.optimizers.follow_placement(
            [index for index, (old, new) in enumerate(trained) if old.placement != new.placement]
        )

    def tell_activations(self, why: str) -> None:
        """What activations="auto" has chosen, and the reason, or why it has not yet: shard() cannot know."""
        self._activations_why = why

    @property
    def why(self) -> str:
        """Every automatic choice, and the reasons, as placement() tells them."""
        resolved = self.resolved
        every = (resolved.why_at_shard, resolved.why_parameters, resolved.why, self._activations_why)
        return "; ".join(told for told in every if told)

    def leave_blocks_to_step(self, choice: BlockChoice) -> None:
        """The first step decides how many blocks keep their activations."""
        self.block_choice = choice

    def keep_block_inputs(self, store: BlockInputs) -> None:
        """Blocks are computed again in backward, from what this store keeps."""
        self.checkpoints = store

    def hold_accumulator(self, node: Node) -> None:
        """Autograd itself forgets a node, and its hooks, that nobody holds."""
        self._accumulators.append(node)

    def background_comm(self, timeout_s: float, name: str = "background") -> Comm:
        """All ranks, over a group of its own, for what may take long or run in another thread. Collective at first;
        later calls with the same name give the same group, since gloo would mix messages of two."""
        if name not in self._background_comms:
            self._background_comms[name] = self.comms.world.new_gloo_group(name, timeout_s)
        return self._background_comms[name]

    def mark_broken(self, how: Situation, unit: str = "") -> None:
        """Values are of no use until a load has replaced them all."""
        self.broken, self.broken_unit = how, unit

    def mark_repaired(self) -> None:
        """All values have been replaced, on every rank."""
        self.broken = None
        self.alike.forget_loads()

    def check(self, call: Call) -> None:
        """Raises if this call is refused in a situation the model is in."""
        check(self, call)

    # -- units that change ------------------------------------------------------------------------------------------

    def follow_unfreezing(self, unfreezing: NoUnfreezing) -> None:
        """What to do when parameters that were frozen in shard() train."""
        self.unfreezing = unfreezing

    def unfrozen_names(self) -> list[str]:
        """Names of parameters that were frozen, and are not now."""
        return self._checks.unfrozen()

    def prepare_units_change(self) -> None:
        """Waits for all that is in flight, and drops gradients: the units of the model are about to change."""
        self.quiesce()
        self.drop_gradients()
        self.unsharding.gathers.catch_up()
        self.unsharding.reshard_all()

    def change_units(self, resolved: Resolved, units: Sequence[Unit]) -> None:
        """The model has other units from now on; Optimizers and EMAs follow. Detaches the engine from the model."""
        accumulating = self.accumulating
        self.unsharding.retire()
        self.attachments.remove()
        self.assemble(resolved, units)
        self.parking.learn(None)
        self.watch.units_change()
        self.accumulating.follow(accumulating)
        self.pipeline = self.pipeline._replace(most_units=len(self.units))  # pipelines are refused
        self.optimizers.follow_units()
        self.averages.follow_units()

    def end(self) -> None:
        """The model's parameters are plain: detaches the engine from it, and frees all state."""
        self.unsharding.retire()
        self.attachments.remove()
        self.optimizers.end()
        self.averages.end()
        self.assemble(self.resolved, [])
        self.tiers.close()
        self.ended = True

    # -- forward and backward --------------------------------------------------------------------------------------

    def before_forward(self, inputs: Iterable[Tensor] = ()) -> None:
        self.check(Call.FORWARD)
        self.updates.finish()
        if torch.is_grad_enabled():
            self._backward.trains_here()
        self._backward.close_failed()
        self.optimizers.forget_freed()
        self.freezing.follow()
        if torch.is_grad_enabled():
            self.unfreezing.follow(in_forward=True)
            self._dropping.gradients_come()
            swapped = set() if self.unsharding.units else self._checks.swapped()
            self.trains = not swapped or not swapped.issuperset(map(id, self.params))
            if not swapped:
                self.check_parameters()
        if torch.is_grad_enabled() and self.trains:
            self.progress.forward_began(reducing=self.accumulating.reducing)
            if self.watch.failed():
                self.optimizers.make_room()
            sums = self.accumulating.wide_sums or (self.used.any and self.updates.keeps_gradients)
            if growth := self.watch.growth(inputs, sums=sums):
                self.optimizers.make_way(growth)
            self.watch.forward_begins()

    def call_failed(self) -> None:
        """A forward or a backward has raised: what it would have taken on the device is not known."""
        self.parking.expect_no_more()

    def enter_backward(self) -> None:
        """Called inside backward: autograd has come to this model."""
        if self.ended:
            refuse(Call.BACKWARD, Situation.OLD_GRAPH)
        self.sequences.serve()
        self._backward.enter()

    def first_gradient_coming(self) -> None:
        """Opens a backward: autograd is about to write its first gradient into .grad, which must be free for it."""
        self.enter_backward()
        self._dropping.drop_hidden()  # may raise: nothing is open then
        self.check(Call.BACKWARD)
        self._gradients_used = False
        if self.used.any:
            self.optimizers.gradients_change()
        self._dropping.gradients_come()
        self.scale.take()
        if self.accumulating.wide_everywhere:
            self.accumulating.keep_wide_sums()  # of units that held gradients when this rank heard of it
        self.completing.begin_reductions()
        self.progress.move(Event.OPENED)
        self.visible.hide()

    def _backward_closed(self) -> None:
        if self.accumulating.final and self.updates.keeps_gradients and not self.tied.names:
            self.show_gradients()  # where parameters are tied, the other stage may still be in its backward

    def _starting(self, index: int) -> None:
        self.updates.reduction_starts(index)

    def _reduced(self, index: int, final: bool) -> None:
        self.watch.reduced(index, final=final)
        if not self.updates.reduced(index, final=final):
            self._replicated.reduced(index, gather=final and index not in self.tied.units)

    # -- between backward and step ---------------------------------------------------------------------------------

    def complete_gradients(self, call: Call) -> None:
        """Before this call, agree on what was used and reduce what is left. Collective; once per step."""
        self._backward.close_failed()
        self.unsharding.gathers.catch_up()
        if self.progress.phase is Phase.AGREED:
            self.used.leave_out(self.visible.dropped())  # since the ranks agreed, on every rank alike
            return
        self._dropping.gradients_come()
        self.completing.complete(call)

    def wait_reduced(self, index: int) -> Unit:
        """Finishes the reductions of a unit and returns the unit."""
        self.schedule.finish(index)
        return self.units[index]

    def counts(self, name: str) -> bool:
        """Whether this rank includes a parameter in norms and checkpoints. A parameter that is replicated over "tp" is
        included on the first rank of "tp" only."""
        return self.comms.tp.rank == 0 or name in self.resolved.tensor_shards

    def forget_used(self) -> None:
        """The gradients of this step have been used up."""
        self.used.forget_all()
        self.progress.move(Event.DROPPED)

    def quiesce(self, *, host: bool = True) -> None:
        """Waits for updates in flight, and copies what users wrote into the masters, so that parameters and optimizer
        state can be read or replaced as one state. Collective. Reductions of gradients may still be in flight; without
        `host` so may host updates: forwards and steps wait for each unit where it is used. Inside
        full_parameters() users' writes are taken, or refused, at its end, and not here."""
        self.tiers.end_snapshot()
        self.updates.finish()
        self.parking.bring_back()
        if host:
            self.updates.forget_prepared()
            self.updates.wait()
        if not (self.contexts.open or self.averages.applied):
            for unit in self.units:
                unit.take_edits(uncounted=host)  # without `host`, the update that follows finds them

    @property
    def gradients_left(self) -> bool:
        """True if a backward has brought gradients, and no step() has used them."""
        return self.used.any and not self._gradients_used

    def step_begins(self) -> None:
        """step() uses the gradients, or skips them."""
        self._gradients_used = True

    def after_step(self) -> None:
        """Tell the schedule which units were used."""
        for index in range(len(self.units)):
            self.schedule.step_over(index, used=any(self.used.to_update_of(index)))
        self.comm.meter.cut()

    def drop_gradients(self, *, keep_as_zeros: bool = False) -> None:
        self._backward.close_failed()
        self.check(Call.ZERO_GRAD)
        self._dropping.drop_all(keep_as_zeros=keep_as_zeros)

    def drop_gradients_of(self, optimizer: AttachedOptimizer, *, keep_as_zeros: bool) -> None:
        """Drops all gradients but those of parameters that other Optimizers update. Once each of several Optimizers
        has done so, and no gradient has come since, all are dropped."""
        if self._dropping.completes(optimizer):
            self.drop_gradients(keep_as_zeros=keep_as_zeros)
            return
        self._backward.close_failed()
        self.check(Call.ZERO_GRAD)
        self._dropping.drop_of(optimizer, keep_as_zeros=keep_as_zeros)

    @contextmanager
    def accumulate(self, reduce: str | None) -> Iterator[None]:
        """Inside, gradients of backwards add up; a backward after it completes those of the step."""
        check_reduce(reduce)
        self.check(Call.ACCUMULATE)
        with self.accumulating.enter(reduce):
            yield

    def keep_across(self, nbytes: int) -> None:
        """Stage 3: keeps up to `nbytes` of units unsharded across forwards and backwards; 0 reshards them."""
        if self.schedule.agreed:  # before that the order of units is being learnt
            self.unsharding.keep_across(nbytes)

    # -- what users see --------------------------------------------------------------------------------------------

    def show_gradients(self) -> None:
        """Fills .grad: with gradients where every rank updates everything, else with placeholders that raise."""
        if self._replicated.wanted:
            self.complete_gradients(Call.STEP)
            self.visible.show(self.used.to_update(), self._replicated_gradient)
        else:
            self.visible.show_placeholders()

    @torch.no_grad()
    def end_schedule(self) -> None:
        """All backwards of a pipeline's schedule are through, here and at the other stages: show what is tied."""
        if self.tied.names:
            self.show_gradients()

    def _replicated_gradient(self, index: int) -> Tensor:
        place = self.places[index]
        return wrapped(self.params[index], self.units[place.unit].gradients.replicated_view(place.slot))

    def check_parameters(self) -> None:
        """Raises if the model has other parameters than when it was sharded, or not where shard() put them."""
        self._checks.check()

    def refuse_copy(self, *_: Any) -> NoReturn:
        raise StateError(
            "a sharded model cannot be copied or pickled: its parameters are views of flat buffers, spread over ranks; "
            "copy the model before shard(), or save onefold.full_state_dict(model)"
        )

    __deepcopy__ = __reduce_ex__ = refuse_copy


def engine_of(model: nn.Module) -> Engine:
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"expected the model that onefold.shard(model, ...) was called on, found {type(model).__name__}; give the "
            f"model itself, not its parameters"
        )
    engine = model.__dict__.get(ATTRIBUTE)
    if engine is None:
        raise ModelError(f"{type(model).__name__} has not been sharded; call onefold.shard(model, ...) first")
    return engine


def is_sharded(model: nn.Module) -> bool:
    """True for a model that shard() was called on, until unshard()."""
    return ATTRIBUTE in model.__dict__
