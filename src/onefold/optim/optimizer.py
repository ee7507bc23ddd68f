"""onefold.Optimizer: a torch.optim.Optimizer over the model's parameters, which runs a wrapped class on shards.

The wrapped class never sees the model's parameters, only the elements of each unit that this rank updates; or, if it
needs whole tensors, copies of those that this rank owns.

A step: 1 complete the gradients: the ranks agree on which parameters were used, and reduce what is left  2 if gradients
are not finite, skip or raise, on every rank alike  3 the update policy updates the units, and all-gathers parameters
that are replicated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onefold.comm.spans import spanned
from onefold.errors import OptimizerError, StateError
from onefold.optim.arguments import check_policies, ids_of, listed
from onefold.optim.choose_policy import check_beside_others, choose_policy
from onefold.optim.clipping import Clipping, check_norm
from onefold.optim.foreign_checkpoints import StateOfUnits
from onefold.optim.gradient_hooks import GradientHooks
from onefold.optim.loss_scale import LossScale, Scaler
from onefold.optim.param_groups import GroupedOptimizer
from onefold.optim.preflight import agree_on_kernel
from onefold.optim.reduced_gradients import pieces
from onefold.optim.small_state import form_of
from onefold.optim.spikes import SpikeCheck, Spikes
from onefold.optim.steps import Steps
from onefold.optim.unit_optimizer import NOT_LOADED
from onefold.optim.whole_tensors import whole
from onefold.runtime.engine import engine_of
from onefold.runtime.refusals import Call
from onefold.runtime.scaled import scaled_backward
from onefold.runtime.seen_inputs import Growth
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
        self._clipping = Clipping(engine)
        self._hooks = GradientHooks(engine)
        self._by_unit = []
        error: Exception | None = None
        try:
            half = engine.resolved.precision.compute is torch.float16
            check_policies(half, loss_scale, on_nonfinite, step_in_backward, skip_spikes)
            self._all = groups is None or self._chooses_groups
            self._in_backward = step_in_backward
            self._form = form_of(state, state_seed)
            self._build(cls, groups, kwargs)
            self._steps = Steps(
                engine, self._by_unit, scaler=Scaler(loss_scale or LossScale()) if half else None,
                spikes=SpikeCheck(engine, skip_spikes) if skip_spikes else None, on_nonfinite=on_nonfinite,
                clipping=self._clipping,
            )  # fmt: skip
            check_beside_others(engine, self.indices, half=half, in_backward=step_in_backward)
        except Exception as mistake:  # all ranks raise it, or the others would hang in the next collective
            error = mistake
        try:
            self._agree(error, "Optimizer()")
            self._prepare_placing()
        except BaseException:
            for one in self._by_unit:
                with suppress(Exception):  # the first error says what is wrong
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

    def _new_policy(self) -> UpdatePolicy:
        return choose_policy(
            self._engine, self._by_unit, self.param_groups, self._whole, in_backward=self._in_backward
        )  # fmt: skip

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
        return self._steps.stepped

    @property
    def skipped(self) -> int:
        """The number of steps that were skipped: gradients were not finite, or the step was a spike. Waits for a CUDA
        device that was to skip the last one by itself."""
        return self._steps.skipped

    @property
    def spikes(self) -> int:
        """The number of steps that were skipped since the Optimizer was made or loaded, without overflows of fp16.
        Waits as `skipped` does."""
        self._steps.check.read_last_step()
        return self._steps.check.spikes

    @property
    def why_skipped(self) -> str:
        """Why the last of the skipped steps was; empty if none was since the Optimizer was made or loaded. Waits as
        `skipped` does."""
        self._steps.check.read_last_step()
        return self._steps.check.why

    @property
    def steps(self) -> int:
        """The number of steps taken, with those before the checkpoint that was loaded."""
        return self._steps.taken

    @property
    def tried(self) -> int:
        """The number of steps, taken or skipped, with those before the checkpoint that was loaded. Never waits."""
        return self._steps.tried

    @property
    def loss_scale(self) -> float:
        """The number by which `backward` multiplies the loss: 1 unless the precision is fp16. On a CUDA device it waits
        until the last step's gradients were checked, not for the update behind that."""
        return self._steps.loss_scale

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run loss.backward(), with the loss multiplied by the loss scale in fp16. With `skip_spikes` the losses of a
        step's micro-batches, each divided by their number, are compared with those of the steps before."""
        steps, scale = self._steps, self.loss_scale
        if steps.spikes:
            steps.spikes.add_loss(loss)
        with scaled_backward(scale):
            (loss.float() * scale if steps.scaler else loss).backward(**kwargs)

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
        engine, steps = self._engine, self._steps
        self._refuse_if_replaced(Call.STEP)
        if steps.spikes and self._clipping.norms is None:
            self.clip_grad_norm(math.inf)
        engine.check(Call.STEP)
        engine.check_parameters()
        if self._hooks:
            self._hooks.complete(Call.STEP, self._names_of_others())
        engine.complete_gradients(Call.STEP)
        self._hooks.share_writes()
        engine.step_begins()
        engine.unsharding.reshard_all()
        steps.check.read_last_step()
        self._placing.at_step(self._one_pass)
        flag = steps.check.flag_on_device()
        bad = steps.check.bad() if flag is None else None
        if bad is not None:
            self.forget_clipping()
            engine.comm.meter.cut()
            steps.skip(bad)
            return
        steps.take()
        engine.quiesce(host=False)
        self._policy.step(StepInputs(self.param_groups, self._clipping.factor, 1.0 / engine.scale.value, flag))
        if steps.scaler and flag is None:
            steps.scaler.good()
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
        self._steps.check.read_last_step()
        self._by_unit = [known[id(unit)] if id(unit) in known else self._unit_optimizer(unit) for unit in engine.units]
        self._clipping.norms = None
        self._steps.follow_units(self._by_unit)
        self._policy = self._new_policy()
        return self._policy

    def follow_placement(self, moved: Sequence[int]) -> None:
        """Called when the optimizer state of these units has moved to other tiers."""
        for index in moved:
            self._by_unit[index].follow_unit()
        self._steps.check.follow_placement()
        self._policy.follow_placement(moved)

    def make_room(self) -> None:
        """Called when the device has run out of memory."""
        self._placing.make_room()

    def make_way(self, growth: Growth) -> None:
        """Called when a forward begins that may take more memory than any before."""
        self._placing.make_way(growth)

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
        self._steps.check_units(self._by_unit)

    @property
    def clipped(self) -> bool:
        """True if gradients of this step are to be clipped when step() reads them."""
        return self._clipping.norms is not None and self._engine.resolved.precision.narrow

    def gradients_change(self) -> None:
        """Called when another backward of the same step begins: norms that clip_grad_norm found no longer hold."""
        self._clipping.norms = None
        self._hooks.forget()

    def forget_clipping(self) -> None:
        """Called when the gradients that were clipped are dropped."""
        self._clipping.forget()
        self._hooks.forget()
        if self._steps.spikes:
            self._steps.spikes.forget_losses()

    @property
    def pending_clip(self) -> float | Tensor:
        """What step() will multiply 16-bit gradients by: the clipping factor."""
        return self._clipping.factor

    def _names_of_others(self) -> set[str]:
        return {self._engine.names[index] for index in self._engine.optimizers.of_others(self)}

    def run_gradient_hooks(self) -> None:
        """Shows each gradient to the hooks, once per step. All are complete."""
        self._hooks.run(self._names_of_others())

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
        self._hooks.complete(Call.GRADIENTS, self._names_of_others())
        self._hooks.pieces_given_out()
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
        return self._hooks.register(hook)

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
        self._hooks.complete(Call.CLIP, self._names_of_others())
        return self._clipping.clip(max_norm, norm_type, self._names_of_others())

    def _identity(self) -> dict[str, Any]:
        world = self._engine.comms.world
        of_rank = {"format": FORMAT, "rank": world.rank, "ranks": world.size, "layout": self._engine.resolved.digest}
        return of_rank | ({"state": self._form.name} if self._form.small else {})

    def state_dict(self) -> dict[str, Any]:
        """The optimizer state of this rank's shards; only the same rank at the same number of ranks and stage can load
        it. `onefold.save` writes state that any number of ranks can load."""
        self._check_state()
        counts = self._steps.counts()  # first: the last step may be taken back
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups]
        slices = [row for unit in self._by_unit for row in unit.state_dict()]
        return {
            "onefold": self._identity(), "param_groups": groups, "names": self._names(), "slices": slices,
            **counts,
        }  # fmt: skip

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
            _update(group, saved)
        self._steps.load(state_dict, state_dict["tried"])
        for unit in self._by_unit:
            unit.load([row for row in state_dict["slices"] if row["unit"] == unit.unit.name])

    def before_load(self) -> None:
        """Optimizer state is about to be loaded. With Offload(optimizer="auto") it must have a place before the first
        step shows what activations take; that step may move it. Collective."""
        self._placing.before_load()

    def notes(self) -> dict[str, Any]:
        """What a checkpoint records of the optimizer beside the state of parameters; equal on all ranks."""
        rows = [
            {
                "names": names,
                "settings": {key: value for key, value in group.items() if key not in NOT_LOADED},
                "class": self.class_of(number),
            }
            for number, (names, group) in enumerate(zip(self._names(), self.param_groups, strict=True))
        ]
        return {"class": self._name, "steps": self.steps, "groups": rows, **self._steps.outcome()}

    def load_notes(self, notes: dict[str, Any], settings: list[dict[str, Any] | None]) -> None:
        """Loads the `notes` of the optimizer that wrote a checkpoint. `settings` has the settings of each of this
        optimizer's param groups; None keeps what a group has."""
        for group, saved in zip(self.param_groups, settings, strict=True):
            _update(group, saved or {})
        self._steps.load(notes, notes["steps"] + notes["skipped"])

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


def _update(group: dict[str, Any], saved: dict[str, Any]) -> None:
    """In place: schedulers hold the group."""
    group.update((key, value) for key, value in saved.items() if key not in NOT_LOADED)
