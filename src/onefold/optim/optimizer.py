"""onefold.Optimizer: a torch.optim.Optimizer over the model's parameters, which runs a wrapped class on shards.

The wrapped class never sees the model's parameters, only the elements of each unit that this rank updates.

A step: 1 complete the gradients: the ranks agree on which parameters were used, and reduce what is left  2 if gradients
are not finite, skip or raise, on every rank alike  3 the update policy updates the units, and all-gathers parameters
that are replicated.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onefold.comm.agreement import agree, together
from onefold.comm.spans import spanned
from onefold.errors import ConfigError, OnefoldError, OptimizerError, StateError
from onefold.optim.clipping import Clipping, check_norm
from onefold.optim.elementwise import examine
from onefold.optim.finite import FiniteCheck
from onefold.optim.foreign_checkpoints import StateOfUnits
from onefold.optim.host_update import HostUpdates, UpdateOnHost
from onefold.optim.loss_scale import LossScale, Scaler
from onefold.optim.preflight import agree_on_kernel, reserve, updated_dtype
from onefold.optim.reduced_gradients import complete, pieces, share_writes
from onefold.optim.unit_optimizer import NOT_SETTINGS, UnitOptimizer
from onefold.optim.update_at_step import UpdateAtStep
from onefold.optim.update_in_backward import UpdateInBackward
from onefold.runtime.engine import engine_of
from onefold.runtime.refusals import Call, Situation, refuse
from onefold.runtime.scaled import scaled_backward
from onefold.runtime.update_policy import NoUpdates, StepInputs, UpdatePolicy
from onefold.settings.precision import Precision

FORMAT = 1  # of state_dict()


class Optimizer(torch.optim.Optimizer):
    """A torch.optim.Optimizer for a sharded model: it runs an element-wise torch optimizer on this rank's shards.

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

    def __init__(
        self,
        model: nn.Module,
        cls: type[torch.optim.Optimizer],
        *,
        groups: list[Any] | None = None,
        loss_scale: LossScale | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        step_in_backward: bool = False,
        **kwargs: Any,
    ) -> None:
        """`cls` and `kwargs` are the torch class and its settings, `groups` are param groups of the model's parameters.
        `loss_scale` is for fp16. `on_nonfinite` says whether a step raises or is skipped if clip_grad_norm found a norm
        that is not finite. With `step_in_backward` each unit is updated as soon as its gradient is reduced, and no
        gradients are kept: for runs without clipping, accumulation and fp16."""
        engine = self._engine = engine_of(model)
        engine.check(Call.OPTIMIZER)
        groups = None if groups is None else [_listed(group) for group in groups]
        engine.unfreezing.follow(_ids_of(groups or []))
        engine.freezing.train_again()
        self._stepped = False  # the last step() was not skipped by the host
        self._tried = 0  # steps, taken or skipped
        self._clipping = Clipping(engine)
        self._agreed = False
        self._hooks: OrderedDict[int, Callable[[str, Tensor], object]] = OrderedDict()
        self._hooked = False  # the gradients of this step have been shown to the hooks
        self._written = False  # pieces of gradients were given out, and may have been changed
        self._replaced = ""  # a parameter that a newer Optimizer has
        self._by_unit: list[UnitOptimizer] = []
        error: Exception | None = None
        try:
            half = engine.resolved.precision.compute is torch.float16
            _check_policies(half, loss_scale, on_nonfinite, step_in_backward)
            self._scaler = Scaler(loss_scale or LossScale()) if half else None
            self._all, self._on_nonfinite, self._in_backward = groups is None, on_nonfinite, step_in_backward
            self._build(cls, groups, kwargs)
            self._finite = FiniteCheck(engine, self._by_unit, self._scaler, on_nonfinite, self._clipping)
            self._check_others(half, step_in_backward)
        except Exception as mistake:  # all ranks raise it, or the others would hang in the next collective
            error = mistake
        try:
            self._agree(error, "Optimizer()")
        except BaseException:
            for one in self._by_unit:
                one.detach()
            raise
        self.state = StateOfUnits(dict, self.state)
        agree_on_kernel(engine, self._by_unit, cls)
        self._policy: UpdatePolicy = self._new_policy()
        engine.update_by(self._policy, self)

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

    def _new_policy(self) -> UpdatePolicy:
        engine = self._engine
        host = HostUpdates(engine, self._by_unit) if any(unit.updated_on_host for unit in engine.units) else None
        if self._in_backward:
            return UpdateInBackward(engine, self._by_unit, self.param_groups, host)
        return UpdateAtStep(engine, self._by_unit) if host is None else UpdateOnHost(engine, self._by_unit, host)

    @property
    def precision(self) -> Precision:
        """The dtypes that were decided for this model; print it for a table."""
        return self._engine.resolved.precision

    @property
    def stepped(self) -> bool:
        """True if the last `step` updated the parameters, False if it was skipped. Waits for a CUDA device that was to
        skip by itself."""
        if self._stepped:
            self._finite.read_last_step()
        return self._stepped and not self._finite.taken_back

    @property
    def skipped(self) -> int:
        """The number of steps that were skipped because gradients were not finite. Waits for a CUDA device that was to
        skip the last one by itself."""
        self._finite.read_last_step()
        return self._finite.skipped

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
        """Run loss.backward(), with the loss multiplied by the loss scale in fp16."""
        scale = self.loss_scale
        with scaled_backward(scale):
            (loss.float() * scale if self._scaler else loss).backward(**kwargs)

    def _agree(self, error: Exception | None, where: str) -> None:
        """Raises on every rank if one rank has an `error`, or if param groups or their settings differ. Collective."""
        comms, lines = self._engine.comms, self._describe() if error is None else []
        if comms.pp.size == 1:
            agree(comms.world, lines, error, where=where)
        else:  # pipeline stages have different parameters
            agree(comms.world, [], error, where=where)
            for near in (comms.everyone, comms.tp):
                together(comms, partial(agree, near, lines, where=where), where=where)
        self._engine.comm.meter.cut()
        self._agreed = True
        self._see_groups()

    def _see_groups(self) -> None:
        self._seen_groups = [(group, group["params"], len(group["params"])) for group in self.param_groups]

    def _build(self, cls: type[torch.optim.Optimizer], groups: list[Any] | None, kwargs: dict[str, Any]) -> None:
        engine = self._engine
        if not engine.params:
            raise OptimizerError(
                "the model has no parameter that requires grad, so there is nothing to update; set requires_grad first"
            )
        _check_finite(kwargs, "the settings")
        self._cls, self._settings = cls, kwargs
        defaults = self._examine_units()
        self._name = cls.__name__
        self._by_unit = [UnitOptimizer(unit, cls, kwargs) for unit in engine.units]
        with _as_optimizer_errors():
            super().__init__([{"params": list(engine.params)}] if groups is None else groups, defaults)
        self._check_hyperparameters()

    def _examine_units(self) -> dict[str, Any]:
        """Raises unless the class can update the model's units, and its state fits. Its default settings."""
        engine, defaults = self._engine, dict[str, Any]()
        self._index = {id(p): index for index, p in enumerate(engine.params)}
        self._costs = {}
        for dtype in dict.fromkeys(updated_dtype(unit) for unit in engine.units):
            defaults, self._costs[dtype] = examine(self._cls, self._settings, engine.units[0].pool.device, dtype)
        reserve(engine, self._costs)
        return defaults

    def _describe(self) -> list[str]:
        """Lines that must be equal on all ranks: the class, the param groups, their settings and parameters."""
        lines = [f"optimizer {self._name}"]
        for number, (group, names) in enumerate(zip(self.param_groups, self._names(), strict=True)):
            settings = {key: value for key, value in sorted(group.items()) if key not in NOT_SETTINGS}
            lines += [f"param group {number}: {settings}", f"param group {number}: {names}"]
        return lines

    def _names(self) -> list[list[str]]:
        return [[self._engine.names[self._index[id(p)]] for p in group["params"]] for group in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model to the optimizer, with settings of their own: any that require grad, also those
        that were frozen when shard() was called. Collective."""
        error: Exception | None = None
        param_group = _listed(param_group)
        if self._agreed:
            self._check_state()
            self._engine.unfreezing.follow(_ids_of([param_group]))
        try:
            self._add_group(param_group)
        except Exception as mistake:
            error = mistake
        if self._agreed:
            self._agree(error, "add_param_group()")
        elif error is not None:
            raise error

    def _add_group(self, param_group: dict[str, Any]) -> None:
        self._engine.updates.wait()  # host updates must finish with the groups of their step
        with _as_optimizer_errors():
            given = param_group["params"]
            params = [given] if isinstance(given, Tensor) else given if isinstance(given, set) else list(given)
            for param in params:
                bare = param[1] if isinstance(param, tuple) else param
                index = self._index.get(id(bare))
                if index is not None and any(bare is other for group in self.param_groups for other in group["params"]):
                    raise OptimizerError(
                        f"{self._engine.names[index]} is in another param group already; name it in one"
                    )
            super().add_param_group({**param_group, "params": params})
        try:
            by_unit = self._by_unit_slots(self.param_groups[-1])
        except OptimizerError:
            self.param_groups.pop()
            raise
        for unit_index, slots in by_unit.items():
            self._by_unit[unit_index].add_group(len(self.param_groups) - 1, slots)

    def _by_unit_slots(self, group: dict[str, Any]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for param in group["params"]:
            index = self._index.get(id(param))
            if index is None:
                raise OptimizerError(
                    f"a parameter of shape {tuple(param.shape)} in groups is not a trained parameter of the sharded "
                    f"model; give parameters of that model that require grad"
                )
            place = self._engine.places[index]
            if place.slot in found.setdefault(place.unit, []):
                raise OptimizerError(f"{self._engine.names[index]} is twice in one param group; name it once")
            found[place.unit].append(place.slot)
        return found

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
        flag = self._finite.flag_on_device()
        bad = self._finite.bad_unit() if flag is None else None
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

    def _check_state(self) -> None:
        self._refuse_if_replaced(Call.OPTIMIZER_STATE)
        self._engine.check(Call.OPTIMIZER_STATE)

    def _refuse_if_replaced(self, call: Call) -> None:
        if self._replaced:
            refuse(call, Situation.REPLACED, name=self._replaced)

    @property
    def indices(self) -> frozenset[int]:
        """The model's trained parameters, by number, that are in a param group."""
        return frozenset(self._index[id(param)] for group in self.param_groups for param in group["params"])

    def replaced(self, index: int) -> None:
        """A newer Optimizer was made for this parameter: the state of this one is freed."""
        self._replaced, self._by_unit = self._engine.names[index], []

    def follow_units(self) -> UpdatePolicy:
        """Called when parameters that were frozen train, in units of their own: keeps the state of all other units."""
        engine, known = self._engine, {id(one.unit): one for one in self._by_unit}
        self._examine_units()
        self._finite.read_last_step()
        self._by_unit = [
            known[id(unit)] if id(unit) in known else UnitOptimizer(unit, self._cls, self._settings)
            for unit in engine.units
        ]
        skipped, self._clipping.norms = self._finite.skipped, None
        self._finite = FiniteCheck(engine, self._by_unit, self._scaler, self._on_nonfinite, self._clipping)
        self._finite.reset(skipped)
        self._policy = self._new_policy()
        return self._policy

    def adopt(self, taken: frozenset[int]) -> None:
        """Called when parameters have been unfrozen: they join the first param group if this Optimizer was made without
        groups=, for all that train. Those with the ids `taken` have a group, or are about to."""
        added = [param for param in self._engine.params if param.requires_grad and id(param) not in taken]
        if not self._all or not added:
            return
        self.param_groups[0]["params"] += added
        self._see_groups()
        for unit_index, slots in self._by_unit_slots({"params": added}).items():
            self._by_unit[unit_index].add_group(0, slots)

    def unsharded(self) -> None:
        """Called when the model is plain again: the state is freed."""
        self._by_unit, self._policy, self._clipping.norms = [], NoUpdates(), None
        self._finite = FiniteCheck(self._engine, [], self._scaler, self._on_nonfinite, self._clipping)

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

    def _check_hyperparameters(self) -> None:
        if self._agreed:
            now = [(group, group["params"], len(group["params"])) for group in self.param_groups]
            alike = len(now) == len(self._seen_groups) and all(
                a is b and c is d and m == n for (a, c, m), (b, d, n) in zip(now, self._seen_groups, strict=True)
            )
            if not alike:
                raise OptimizerError(
                    "param_groups was reordered, replaced or edited; change settings inside a group "
                    "(group['lr'] = ...), and add parameters with add_param_group()"
                )
        for index, group in enumerate(self.param_groups):
            _check_finite(group, f"param group {index}")

    # -- state -------------------------------------------------------------------------------------------------------

    def state_tensors(self) -> list[Tensor]:
        return [tensor for unit in self._by_unit for tensor in unit.state_tensors()]

    def planned_state(self, index: int) -> tuple[int, int]:
        """Bytes of a unit's optimizer state by formula: of its vectors, and of its step counts."""
        unit = self._by_unit[index]
        return unit.planned_state(self._costs[updated_dtype(unit.unit)])

    def _identity(self) -> dict[str, Any]:
        world = self._engine.comms.world
        return {"format": FORMAT, "rank": world.rank, "ranks": world.size, "layout": self._engine.resolved.digest}

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
            "tried": self._tried, "skipped": self.skipped, "loss_scale": scale,
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what state_dict() returned on this rank; state of another rank, number of ranks or stage raises."""
        self._check_state()
        found, wanted = state_dict.get("onefold"), self._identity()
        if found != wanted:
            raise StateError(
                f"this optimizer state belongs to {found}, this rank is {wanted}; optimizer.state_dict() is one rank's "
                f"shard and loads into the same rank, number of ranks, model and stage only: use onefold.save and load"
            )
        if state_dict["names"] != self._names():
            raise StateError("the saved param groups hold other parameters; build the optimizer with the same groups")
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)  # the same objects: schedulers hold them
        self._finite.reset(state_dict["skipped"])
        self._tried = state_dict["tried"]
        if self._scaler:
            self._scaler.load(state_dict["loss_scale"])
        for unit in self._by_unit:
            unit.load([row for row in state_dict["slices"] if row["unit"] == unit.unit.name])

    @property
    def by_unit(self) -> list[UnitOptimizer]:
        """The unit optimizers, in the order of the engine's units."""
        return self._by_unit

    def notes(self) -> dict[str, Any]:
        """What a checkpoint records of the optimizer beside the state of parameters; equal on all ranks."""
        rows = [
            {"names": names, "settings": {key: value for key, value in group.items() if key not in NOT_SETTINGS}}
            for names, group in zip(self._names(), self.param_groups, strict=True)
        ]
        steps = self.steps  # reads what the last step found, which may change the loss scale
        scale = self._scaler.state() if self._scaler else None
        return {"class": self._name, "steps": steps, "skipped": self.skipped, "loss_scale": scale, "groups": rows}

    def load_notes(self, notes: dict[str, Any], settings: list[dict[str, Any] | None]) -> None:
        """Loads the `notes` of the optimizer that wrote a checkpoint. `settings` has the settings of each of this
        optimizer's param groups; None keeps what a group has."""
        for group, saved in zip(self.param_groups, settings, strict=True):
            group.update(saved or {})  # the same objects: schedulers hold them
        self._finite.reset(notes["skipped"])
        self._tried = notes["steps"] + notes["skipped"]
        if self._scaler and notes["loss_scale"]:
            self._scaler.load(notes["loss_scale"])

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


def _check_policies(half: bool, loss_scale: Any, on_nonfinite: Any, step_in_backward: Any) -> None:
    if on_nonfinite not in ("raise", "skip"):
        raise ConfigError(f"on_nonfinite={on_nonfinite!r} is unknown; use 'raise' or 'skip'")
    if loss_scale is not None and not (half and isinstance(loss_scale, LossScale)):
        raise ConfigError(f"loss_scale={loss_scale!r}: give a LossScale, and only with precision='fp16'")
    if type(step_in_backward) is not bool:
        raise ConfigError(f"step_in_backward={step_in_backward!r} is neither True nor False")
    if step_in_backward and half:
        raise ConfigError("step_in_backward=True cannot skip a step, which fp16 needs; train in bf16")
    if step_in_backward and on_nonfinite == "skip":
        raise ConfigError("step_in_backward=True cannot skip a step: it looks at no norm before it updates")


def _check_finite(settings: dict[str, Any], where: str) -> None:
    lr = settings.get("lr")
    readable = isinstance(lr, int | float) or (isinstance(lr, Tensor) and lr.device.type == "cpu")
    if readable and not math.isfinite(lr or 0.0):
        raise OptimizerError(f"lr={lr} in {where} is not finite: look at the LR schedule")


def _listed(group: Any) -> Any:
    """A param group whose parameters are no generator, which could be read once."""
    if not isinstance(group, dict) or not hasattr(group.get("params"), "__next__"):
        return group
    return {**group, "params": list(group["params"])}


def _ids_of(groups: list[Any]) -> frozenset[int]:
    """The ids of all parameters of param groups, which are given as parameters or as pairs of names and parameters."""
    found = []
    for group in groups:
        given = group.get("params") if isinstance(group, dict) else group
        found += [given] if isinstance(given, Tensor | None) else list(given)
    return frozenset(id(one[1] if isinstance(one, tuple) and len(one) == 2 else one) for one in found)


@contextmanager
def _as_optimizer_errors() -> Iterator[None]:
    """Raises torch's own errors about param groups as OptimizerError, with a remedy."""
    try:
        yield
    except OnefoldError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise OptimizerError(
            f"the param groups cannot be used: {error}; give groups=[{{'params': [parameters of the model], ...}}], "
            f"each parameter in one group"
        ) from error
