"""onefold.Optimizer: a torch.optim.Optimizer over the model's parameters, which runs a wrapped class on shards.

The wrapped class never sees the model's parameters, only the elements of each unit that this rank updates; or, if it
needs whole tensors, copies of those that this rank owns.

A step: 1 complete the gradients: the ranks agree on which parameters were used, and reduce what is left  2 if gradients
are not finite, skip or raise, on every rank alike  3 the update policy updates the units, and all-gathers parameters
that are replicated.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onefold.comm.spans import spanned
from onefold.errors import OptimizerError, StateError
from onefold.optim.arguments import check_policies, ids_of, listed
from onefold.optim.clipping import Clipping, check_norm
from onefold.optim.finite import FiniteCheck
from onefold.optim.foreign_checkpoints import StateOfUnits
from onefold.optim.host_update import HostUpdates, UpdateOnHost
from onefold.optim.loss_scale import LossScale, Scaler
from onefold.optim.param_groups import GroupedOptimizer
from onefold.optim.preflight import agree_on_kernel
from onefold.optim.reduced_gradients import complete, pieces, share_writes
from onefold.optim.small_state import form_of
from onefold.optim.spikes import SpikeCheck, Spikes
from onefold.optim.unit_optimizer import NOT_SETTINGS
from onefold.optim.update_at_step import UpdateAtStep
from onefold.optim.update_in_backward import UpdateInBackward
from onefold.optim.update_whole import UpdateWhole, UpdateWholeInBackward
from onefold.optim.whole_tensors import whole
from onefold.runtime.engine import engine_of
from onefold.runtime.refusals import Call
from onefold.runtime.scaled import scaled_backward
from onefold.runtime.update_policy import NoUpdates, StepInputs, UpdatePolicy
from onefold.settings.precision import Precision

FORMAT = 1  # of state_dict()


class Optimizer(GroupedOptimizer):
    """A torch.optim.Optimizer for a sharded model: it runs an element-wise torch optimizer on this rank's shards, or
    one that needs whole tensors, such as Muon, on those that this rank owns.

    Making an Optimizer is collective. A model may have several, each for parameters of its own (`groups`); a new one
    replaces older ones that have any of its parameters, and the state of those is freed. Where there are several,
    `clip_grad_norm` and `zero_grad` leave out the parameters of the others. `stepped` says whether the last `step`
    updated the parameters or was skipped; `skipped` counts those. Both wait for a CUDA device, which skips by itself.

    >>> import torch, onefold
    >>> onefold.init()
    >>> model = onefold.shard(torch.nn.Linear(4, 4), stage=2)
    >>> optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> norm = optimizer.clip_grad_norm(1.0)
    >>> optimizer.step(); optimizer.zero_grad()
    """

    _chooses_groups = False  # a subclass has param groups for all parameters, also for those that are frozen now

    def __init__(
        self,
        model: nn.Module,
        cls: type[torch.optim.Optimizer],
        *,
        groups: list[Any] | None = None,
        loss_scale: LossScale | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        step_in_backward: bool = False,
        state: Literal["fp32", "bf16", "8bit"] = "fp32",
        state_seed: int = 0,
        skip_spikes: Spikes | None = None,
        **kwargs: Any,
    ) -> None:
        """`cls` and `kwargs` are the torch class and its settings, `groups` are param groups of the model's parameters.
        Beside a class that needs whole tensors, such as Muon, groups may name an element-wise one: `"cls": AdamW`.
        `loss_scale` is for fp16. `on_nonfinite` says whether a step raises or is skipped if clip_grad_norm found a norm
        that is not finite; with `skip_spikes` such steps are skipped, and spikes too. With `step_in_backward` each unit
        is updated as soon as its gradient is reduced, and no gradients are kept: for runs without clipping,
        accumulation and fp16. `state` is the form of the moments of Adam, AdamW and SGD: with "bf16" or "8bit" they are
        rounded at random, from `state_seed`, the step and the element's place in its parameter, and take 4 or 2 bytes
        per parameter with Adam instead of 8."""
        engine = self._engine = engine_of(model)
        engine.check(Call.OPTIMIZER)
        groups = None if groups is None else [listed(group) for group in groups]
        engine.unfreezing.follow(ids_of(groups or []))
        engine.freezing.train_again()
        self._stepped = False  # the last step() was not skipped by the host
        self._tried = 0  # steps, taken or skipped
        self._clipping = Clipping(engine)
        self._hooks: OrderedDict[int, Callable[[str, Tensor], object]] = OrderedDict()
        self._hooked = False  # the gradients of this step have been shown to the hooks
        self._written = False  # pieces of gradients were given out, and may have been changed
        self._by_unit = []
        error: Exception | None = None
        try:
            half = engine.resolved.precision.compute is torch.float16
            check_policies(half, loss_scale, on_nonfinite, step_in_backward, skip_spikes)
            self._scaler = Scaler(loss_scale or LossScale()) if half else None
            self._all = groups is None or self._chooses_groups
            self._on_nonfinite, self._in_backward = on_nonfinite, step_in_backward
            self._form = form_of(state, state_seed)
            self._build(cls, groups, kwargs)
            self._spikes = SpikeCheck(engine, skip_spikes) if skip_spikes else None
            self._finite = self._new_check()
            self._check_others(half, step_in_backward)
        except Exception as mistake:  # all ranks raise it, or the others would hang in the next collective
            error = mistake
        try:
            self._agree(error, "Optimizer()")
            self._prepare_placing()
        except BaseException:
            for one in self._by_unit:
                one.detach()
            raise
        self.state = StateOfUnits(dict, self.state)
        self._agree_on_kernels(cls)
        self._policy: UpdatePolicy = self._new_policy()
        engine.update_by(self._policy, self)

    def _agree_on_kernels(self, cls: type[torch.optim.Optimizer]) -> None:
        """Collective; on stages of a pipeline, also where only another stage has parameters of a class beside."""
        agree_on_kernel(self._engine, self._by_unit, cls)
        if self._rest is not None or (self._whole is not None and self._engine.comms.pp.size > 1):
            rests = [one.rest for one in map(whole, self._by_unit) if one.rest]
            agree_on_kernel(self._engine, rests, self._rest.cls if self._rest is not None else cls)

    def _check_others(self, half: bool, in_backward: bool) -> None:
        """Raises if this Optimizer cannot stand beside those that the model has for other parameters."""
        mine = self.indices
        others = [other for other in self._engine.optimizers if not other.indices & mine]
        backward = in_backward or not self._engine.updates.keeps_gradients
        if others and (half or backward or self._engine.tied.names):
            what = "fp16" if half else "step_in_backward=True" if backward else "a pipeline with tied parameters"
            raise OptimizerError(
                f"{what} needs one Optimizer for all parameters, and this model has another for other parameters; give "
                f"one Optimizer several groups="
            )

    def _new_check(self) -> FiniteCheck:
        return FiniteCheck(self._engine, self._by_unit, self._scaler, self._on_nonfinite, self._clipping, self._spikes)

    def _new_policy(self) -> UpdatePolicy:
        engine = self._engine
        if self._whole is not None:
            by_unit, ownership = [whole(one) for one in self._by_unit], self._whole.ownership
            if self._in_backward:
                return UpdateWholeInBackward(engine, by_unit, self.param_groups, ownership)
            return UpdateWhole(engine, by_unit, ownership)
        on_host = engine.watch.active or any(unit.updated_on_host for unit in engine.units)
        host = HostUpdates(engine, self._by_unit) if on_host else None
        if self._in_backward:
            return UpdateInBackward(engine, self._by_unit, self.param_groups, host)
        if host is not None:
            return UpdateOnHost(engine, self._by_unit, host, self.param_groups)
        return UpdateAtStep(engine, self._by_unit)

    @property
    def precision(self) -> Precision:
        """The dtypes that were decided for this model; print it for a table."""
        return self._engine.resolved.precision.with_state(self._form.name)

    @property
    def state_form(self) -> str:
        """The form of the optimizer state: "fp32", "bf16" or "8bit"."""
        return self._form.name

    @property
    def stepped(self) -> bool:
        """True if the last `step` updated the parameters, False if it was skipped. Waits for a CUDA device that was to
        skip by itself."""
        if self._stepped:
            self._finite.read_last_step()
        return self._stepped and not self._finite.taken_back

    @property
    def skipped(self) -> int:
        """The number of steps that were skipped: gradients were not finite, or the step was a spike. Waits for a CUDA
        device that was to skip the last one by itself."""
        self._finite.read_last_step()
        return self._finite.skipped

    @property
    def spikes(self) -> int:
        """The number of steps that were skipped since the Optimizer was made or loaded, without overflows of fp16.
        Waits as `skipped` does."""
        self._finite.read_last_step()
        return self._finite.spikes

    @property
    def why_skipped(self) -> str:
        """Why the last of the skipped steps was; empty if none was since the Optimizer was made or loaded. Waits as
        `skipped` does."""
        self._finite.read_last_step()
        return self._finite.why

    @property
    def steps(self) -> int:
        """The number of steps taken, with those before the checkpoint that was loaded."""
        return self._tried - self.skipped

    @property
    def loss_scale(self) -> float:
        """The number by which `backward` multiplies the loss: 1 unless the precision is fp16. On a CUDA device it waits
        until the last step's gradients were checked, not for the update behind that."""
        if self._scaler:
            self._finite.read_last_step()
        return self._scaler.scale if self._scaler else 1.0

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run loss.backward(), with the loss multiplied by the loss scale in fp16. With `skip_spikes` the losses of a
        step's micro-batches, each divided by their number, are compared with those of the steps before."""
        scale = self.loss_scale
        if self._spikes:
            self._spikes.add_loss(loss)
        with scaled_backward(scale):
            (loss.float() * scale if self._scaler else loss).backward(**kwargs)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; a step whose gradients are not finite may raise or be skipped. Collective.

        `closure`, if given, runs forward and backward; it is called once, before the update, and what it returns is
        returned."""
        result = None
        if closure is not None:
            if not callable(closure):
                raise OptimizerError(f"step() wants a closure that runs forward and backward, found {closure!r}")
            with torch.enable_grad():
                result = closure()
        self._step()
        return result

    @spanned("step", "optimizer", "the model")
    @torch.no_grad()
    def _step(self) -> None:
        self._check_hyperparameters()
        engine = self._engine
        self._refuse_if_replaced(Call.STEP)
        if self._spikes and self._clipping.norms is None:
            self.clip_grad_norm(math.inf)
        engine.check(Call.STEP)
        engine.check_parameters()
        if self._hooks:
            self._complete(Call.STEP)
        engine.complete_gradients(Call.STEP)
        if self._written:
            engine.schedule.drain()
            share_writes(engine)
            self._written = False
        engine.step_begins()
        engine.unsharding.reshard_all()
        self._finite.read_last_step()
        self._placing.at_step()
        flag = self._finite.flag_on_device()
        bad = self._finite.bad() if flag is None else None
        self._stepped = bad is None
        self._tried += 1
        if bad is not None:
            self.forget_clipping()
            engine.comm.meter.cut()
            self._finite.skip(bad)
            return
        engine.quiesce(host=False)
        self._policy.step(StepInputs(self.param_groups, self._clipping.factor, 1.0 / engine.scale.value, flag))
        if self._scaler and flag is None:
            self._scaler.good()
        self.forget_clipping()
        engine.after_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, accumulated ones too; set_to_none=False sets them to zero instead. Where the model has
        several Optimizers, gradients of the others' parameters stay."""
        self._refuse_if_replaced(Call.ZERO_GRAD)
        self._engine.drop_gradients_of(self, keep_as_zeros=not set_to_none)

    def replaced(self, index: int) -> None:
        """A newer Optimizer was made for this parameter: the state of this one is freed."""
        self._replaced, self._by_unit = self._engine.names[index], []

    def follow_units(self) -> UpdatePolicy:
        """Called when parameters that were frozen train, in units of their own: keeps the state of all other units."""
        engine, known = self._engine, {id(one.unit): one for one in self._by_unit}
        self._examine_units()
        self._finite.read_last_step()
        self._by_unit = [known[id(unit)] if id(unit) in known else self._unit_optimizer(unit) for unit in engine.units]
        skipped, self._clipping.norms = self._finite.skipped, None
        self._finite = self._new_check()
        self._finite.reset(skipped)
        self._policy = self._new_policy()
        return self._policy

    def follow_placement(self, moved: Sequence[int]) -> None:
        """Called when the optimizer state of these units has moved to other tiers."""
        for index in moved:
            self._by_unit[index].follow_unit()
        self._finite.follow_placement()
        self._policy.follow_placement(moved)

    def make_room(self) -> None:
        """Called when the device has run out of memory."""
        self._placing.make_room()

    def adopt(self, taken: frozenset[int]) -> None:
        """Called when parameters have been unfrozen: they join a param group if this Optimizer was made for all that
        train. Those with the ids `taken` have a group, or are about to."""
        added = [param for param in self._engine.params if param.requires_grad and id(param) not in taken]
        if not self._all or not added:
            return
        for number, group in enumerate(self.param_groups):
            if joining := [param for param in added if self._group_to_join(param) == number]:
                group["params"] += joining
                self._add_params(number, joining)
        if self._whole is not None:
            self._whole.assign_owners(self._by_unit)
        self._see_groups()

    def _group_to_join(self, param: nn.Parameter) -> int:
        """The param group of a parameter that is unfrozen."""
        return 0

    def unsharded(self) -> None:
        """Called when the model is plain again: the state is freed."""
        self._by_unit, self._policy, self._clipping.norms = [], NoUpdates(), None
        self._finite = self._new_check()

    @property
    def clipped(self) -> bool:
        """True if gradients of this step are to be clipped when step() reads them."""
        return self._clipping.norms is not None and self._engine.resolved.precision.narrow

    def gradients_change(self) -> None:
        """Called when another backward of the same step begins: norms that clip_grad_norm found no longer hold."""
        self._clipping.norms, self._hooked = None, False

    def forget_clipping(self) -> None:
        """Called when the gradients that were clipped are dropped."""
        self._clipping.forget()
        self._hooked = False
        if self._spikes:
            self._spikes.forget_losses()

    @property
    def pending_clip(self) -> float | Tensor:
        """What step() will multiply 16-bit gradients by: the clipping factor."""
        return self._clipping.factor

    def _names_of_others(self) -> set[str]:
        return {self._engine.names[index] for index in self._engine.optimizers.of_others(self)}

    def _complete(self, call: Call) -> None:
        """Completes the gradients of the step, and shows each once to the hooks. Collective."""
        complete(self._engine, call)
        self.run_gradient_hooks()

    def run_gradient_hooks(self) -> None:
        """Shows each gradient to the hooks, once per step. All are complete."""
        if self._hooks and not self._hooked:
            self._hooked = self._written = True
            for name, piece in pieces(self._engine, self._names_of_others()):
                for hook in list(self._hooks.values()):
                    hook(name, piece)

    @torch.no_grad()
    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's pieces of the reduced gradients: the names of parameters, and flat tensors to read or change in
        place. Call it between backward and step, on every rank. Collective.

        Each element of a gradient is in one rank's piece, at every stage, so that sums over pieces and ranks count it
        once. (Along the mesh axes "replica" and "tp" ranks may have the same elements: of replicas the first one's
        count; along "tp" write the same.) What is written there is what `step` uses. After `clip_grad_norm` gradients
        are clipped, and `step` no longer asks whether the norm was finite; in fp16 they are multiplied by `loss_scale`.

        >>> import torch, onefold
        >>> onefold.init()
        >>> model = onefold.shard(torch.nn.Linear(4, 4), stage=2)
        >>> optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=1.0)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> for name, piece in optimizer.gradients():
        ...     _ = piece.clamp_(-0.5, 0.5)
        >>> optimizer.step()
        """
        self._refuse_if_replaced(Call.GRADIENTS)
        self._complete(Call.GRADIENTS)
        self._written = True
        self._clipping.apply(self._names_of_others())
        return pieces(self._engine, self._names_of_others())

    def register_gradient_hook(self, hook: Callable[[str, Tensor], object]) -> RemovableHandle:
        """Call `hook(name, piece)` for each piece that `gradients` would yield, once per step, when the gradients of
        the step are complete: before they are clipped or used. Returns a handle with `remove()`.

        >>> import torch, onefold
        >>> onefold.init()
        >>> model = onefold.shard(torch.nn.Linear(4, 4), stage=2)
        >>> optimizer = onefold.Optimizer(model, torch.optim.SGD, lr=1.0)
        >>> handle = optimizer.register_gradient_hook(lambda name, piece: piece.clamp_(-0.5, 0.5))
        """
        self._engine.check(Call.GRADIENTS)
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    @spanned("clip", "gradients", "the model")
    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most `max_norm`; return the norm as it was
        before. Collective.

        Each rank combines the norms of its units in a fixed order into one number, and the numbers of all ranks are
        combined in rank order, so the norm has the same bits on every rank and at every stage. Gradients that are
        replicated along the mesh axis "tp" count once. Parameters that another Optimizer has are left out.
        """
        self._refuse_if_replaced(Call.CLIP)
        check_norm(max_norm, norm_type)
        self._complete(Call.CLIP)
        return self._clipping.clip(max_norm, norm_type, self._names_of_others())

    def _identity(self) -> dict[str, Any]:
        world = self._engine.comms.world
        of_rank = {"format": FORMAT, "rank": world.rank, "ranks": world.size, "layout": self._engine.resolved.digest}
        return of_rank | ({"state": self._form.name} if self._form.small else {})

    def state_dict(self) -> dict[str, Any]:
        """The optimizer state of this rank's shards; only the same rank at the same number of ranks and stage can load
        it. `onefold.save` writes state that any number of ranks can load."""
        self._check_state()
        self._finite.read_last_step()
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        slices = [row for unit in self._by_unit for row in unit.state_dict()]
        scale = self._scaler.state() if self._scaler else None
        return {
            "onefold": self._identity(), "param_groups": groups, "names": self._names(), "slices": slices,
            "tried": self._tried, "skipped": self.skipped, "loss_scale": scale, **self._spike_notes(),
        }  # fmt: skip

    def _spike_notes(self) -> dict[str, Any]:
        return {"spikes": self._spikes.state()} if self._spikes else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() returned on this rank; state of another rank, number of ranks or stage raises. With
        Offload(optimizer="auto") collective before the first step."""
        self._check_state()
        found, wanted = state_dict.get("onefold"), self._identity()
        if found != wanted:
            raise StateError(
                f"this optimizer state belongs to {found}, this rank is {wanted}; optimizer.state_dict() is one rank's "
                f"shard and loads into the same rank, number of ranks, model and stage only: use onefold.save and load"
            )
        if state_dict["names"] != self._names():
            raise StateError("the saved param groups hold other parameters; build the optimizer with the same groups")
        self.before_load()
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)  # the same objects: schedulers hold them
        self._finite.reset(state_dict["skipped"])
        self._tried = state_dict["tried"]
        if self._scaler:
            self._scaler.load(state_dict["loss_scale"])
        if self._spikes:
            self._spikes.load(state_dict.get("spikes"))
        for unit in self._by_unit:
            unit.load([row for row in state_dict["slices"] if row["unit"] == unit.unit.name])

    def before_load(self) -> None:
        """Optimizer state is about to be loaded. With Offload(optimizer="auto") it must have a place before the first
        step shows what activations take; that step may move it. Collective."""
        self._placing.by_formula(final=False)

    def notes(self) -> dict[str, Any]:
        """What a checkpoint records of the optimizer beside the state of parameters; equal on all ranks."""
        rows = [
            {"names": names, "settings": {key: value for key, value in group.items() if key not in NOT_SETTINGS}}
            for names, group in zip(self._names(), self.param_groups, strict=True)
        ]
        steps = self.steps  # reads what the last step found, which may change the loss scale
        scale = self._scaler.state() if self._scaler else None
        found = {"class": self._name, "steps": steps, "skipped": self.skipped, "loss_scale": scale, "groups": rows}
        return {**found, **self._spike_notes()}

    def load_notes(self, notes: dict[str, Any], settings: list[dict[str, Any] | None]) -> None:
        """Loads the `notes` of the optimizer that wrote a checkpoint. `settings` has the settings of each of this
        optimizer's param groups; None keeps what a group has."""
        for group, saved in zip(self.param_groups, settings, strict=True):
            group.update(saved or {})  # the same objects: schedulers hold them
        self._finite.reset(notes["skipped"])
        self._tried = notes["steps"] + notes["skipped"]
        if self._scaler and notes["loss_scale"]:
            self._scaler.load(notes["loss_scale"])
        if self._spikes:
            self._spikes.load(notes.get("spikes"))

    def __getstate__(self) -> NoReturn:
        raise StateError(
            "an Optimizer of a sharded model cannot be copied or pickled: it works on this rank's shards of it; "
            "save optimizer.state_dict() instead"
        )

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        # torch.amp.GradScaler.step reads this first; its found-inf check sees one rank only
        raise StateError(
            "torch.amp.GradScaler sees the gradients of one rank only; with precision='fp16' call "
            "optimizer.backward(loss), which scales by itself"
        )
