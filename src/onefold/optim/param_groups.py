"""Param groups of a sharded model: which unit optimizer updates which parameters, and by which class; all ranks have
the same groups with the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from onefold.comm.agreement import agree, on_all, together
from onefold.cost.layout import ALIGN
from onefold.cost.states import StateCost, check_form
from onefold.errors import OptimizerError
from onefold.optim.arguments import as_optimizer_errors, check_finite, ids_of, listed
from onefold.optim.elementwise import NotElementwise, examine
from onefold.optim.kernels.cpu import fits as fits_cpu
from onefold.optim.kernels.cuda import fits as fits_cuda
from onefold.optim.ownership import Ownership
from onefold.optim.placing import Placing, keep_off_disk
from onefold.optim.preflight import reserve, updated_dtype
from onefold.optim.small_state import StateForm, check_small
from onefold.optim.state_costs import StateCosts
from onefold.optim.unit_optimizer import NOT_SETTINGS, UnitOptimizer
from onefold.optim.whole_tensors import RestClass, WholeTensors, planned_traffic
from onefold.optim.whole_trial import examine_whole
from onefold.runtime.attached import Update
from onefold.runtime.engine import Engine
from onefold.runtime.refusals import Call, Situation, refuse
from onefold.state.unit import Unit


class GroupedOptimizer(torch.optim.Optimizer):
    """The param groups of onefold.Optimizer, and the unit optimizers behind them."""

    _engine: Engine
    _form: StateForm  # of the moments
    _in_backward: bool
    _agreed = False  # all ranks have made it, with the same groups
    _replaced = ""  # a parameter that a newer Optimizer has
    _whole: WholeTensors | None = None  # who updates which tensor, if the class needs whole ones
    _by_unit: list[UnitOptimizer]
    _placing: Placing  # where state is, if steps decide

    def _check_state(self) -> None:
        self._refuse_if_replaced(Call.OPTIMIZER_STATE)
        self._engine.check(Call.OPTIMIZER_STATE)

    def _refuse_if_replaced(self, call: Call) -> None:
        if self._replaced:
            refuse(call, Situation.REPLACED, name=self._replaced)

    def _build(self, cls: type[torch.optim.Optimizer], groups: list[Any] | None, kwargs: dict[str, Any]) -> None:
        engine = self._engine
        if not engine.params:
            raise OptimizerError(
                "the model has no parameter that requires grad, so there is nothing to update; set requires_grad first"
            )
        check_finite(kwargs, "the settings")
        if isinstance(cls, type) and issubclass(cls, GroupedOptimizer):
            raise OptimizerError(f"{cls.__name__} is an Optimizer itself; make it: onefold.{cls.__name__}(model, ...)")
        self._cls, self._settings = cls, kwargs
        self._rest = RestClass.of(groups or [])
        defaults = self._examine_units()
        self._name = cls.__name__ if self._rest is None else f"{cls.__name__} and {self._rest.cls.__name__}"
        self._by_unit = [self._unit_optimizer(unit) for unit in engine.units]
        with as_optimizer_errors():
            super().__init__([{"params": list(engine.params)}] if groups is None else groups, defaults)
        self._check_hyperparameters()

    def _unit_optimizer(self, unit: Unit) -> UnitOptimizer:
        if self._whole is not None:
            return self._whole.unit_optimizer(unit)
        return UnitOptimizer(unit, self._cls, self._settings, self._form)

    def _examine_units(self) -> dict[str, Any]:
        """Raises unless the class can update the model's units, and its state fits. Its default settings."""
        engine = self._engine
        if self._form.small:
            keep_off_disk(engine)
        self._index = {id(p): index for index, p in enumerate(engine.params)}
        self._costs = StateCosts(self._cls, self._settings, self._form.name)
        for dtype in dict.fromkeys(updated_dtype(unit) for unit in engine.units):
            given = self._cls, self._settings, engine.units[0].pool.device, dtype
            try:
                if self._whole is None:
                    found = examine(*given)
                    check_small(engine, self._form, self._cls, found[0])
                    self._costs.learn(dtype, found)
                    continue
            except NotElementwise:
                check_form(self._form.name, self._cls.__name__, known=not self._form.small)
                self._whole = WholeTensors(engine, self._cls, self._settings, self._rest, in_backward=self._in_backward)
            self._costs.learn(dtype, examine_whole(*given))
            if self._rest is not None:
                self._rest.examine(*given[2:])
        if self._rest is not None and self._whole is None:
            raise OptimizerError(
                f"a param group names cls={self._rest.cls.__name__}, which goes with classes that need whole tensors, "
                f"but {self._cls.__name__} is element-wise; make a second Optimizer for that group"
            )
        parks = self._whole is None or not self._in_backward
        self._placing = Placing(engine, ref(self), in_backward=self._in_backward, parks=parks)
        if not engine.watch.active:
            reserve(engine, self._costs.by_dtype)
        return self._costs.defaults

    def _one_pass(self) -> bool:
        """Whether kernels of ours support the settings of all param groups: where 16 bits compute, they update."""
        device = self._engine.device
        fits = fits_cuda if device.type == "cuda" else fits_cpu
        return self._whole is None and all(fits(self._cls, group, device) for group in self.param_groups)

    def _prepare_placing(self) -> None:
        """Offload(optimizer="auto"): says what the first step may move, and raises unless there is room. Collective."""
        engine = self._engine
        if not engine.watch.active:
            return
        if self._whole is not None and self._in_backward:
            self._placing.by_formula()  # a unit's tensors are updated as soon as its gradient is there
        else:
            self._placing.before_first_step()
        # On every rank of this machine, what has moved has its memory and files before any of them looks for room.
        on_all(engine.comms.world, self._follow_units, where="Optimizer()")
        on_all(
            engine.comms.world,
            lambda: reserve(engine, self._costs.by_dtype, in_backward=self._in_backward),
            where="Optimizer()",
        )

    def _follow_units(self) -> None:
        for one in self._by_unit:
            one.follow_unit()

    def _agree(self, error: Exception | None, where: str) -> None:
        """Raises on every rank if one rank has an `error`, or if param groups or their settings differ. Collective."""
        comms, lines = self._engine.comms, self._describe() if error is None else []
        if comms.pp.size == 1:
            agree(comms.world, lines, error, where=where)
        else:  # pipeline stages have different parameters
            agree(comms.world, [], error, where=where)
            for near in (comms.everyone, comms.tp):
                together(comms, partial(agree, near, lines, where=where), where=where)
        if self._whole is not None:
            self._whole.assign_owners(self._by_unit)
        self._engine.comm.meter.cut()
        self._agreed = True
        self._see_groups()

    def _see_groups(self) -> None:
        self._seen_groups = [(group, group["params"], len(group["params"])) for group in self.param_groups]

    def _describe(self) -> list[str]:
        """Lines that must be equal on all ranks: the class, the param groups, their settings and parameters."""
        lines = [f"optimizer {self._name}"]
        lines += [f"state {self._form.name}, state_seed {self._form.seed}"] if self._form.small else []
        for number, (group, names) in enumerate(zip(self.param_groups, self._names(), strict=True)):
            settings = {key: value for key, value in sorted(group.items()) if key not in NOT_SETTINGS}
            lines += [f"param group {number}: {settings}", f"param group {number}: {names}"]
        if self._whole is not None:
            lines.append(f"param groups with cls=: {sorted(self._whole.rest_groups)}")
        return lines

    def _names(self) -> list[list[str]]:
        return [[self._engine.names[self._index[id(p)]] for p in group["params"]] for group in self.param_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of the model to the optimizer, with settings of their own: any that require grad, also those
        that were frozen when shard() was called. Collective."""
        error: Exception | None = None
        param_group = listed(param_group)
        if self._agreed:
            self._check_state()
            self._engine.unfreezing.follow(ids_of([param_group]))
        try:
            self._add_group(param_group)
        except Exception as mistake:
            error = mistake
        if self._agreed:
            try:
                self._agree(error, "add_param_group()")
            except BaseException:
                if self._whole is not None:
                    self._whole.forget_added()
                raise
        elif error is not None:
            raise error

    def _add_group(self, param_group: dict[str, Any]) -> None:
        self._engine.updates.wait()  # host updates must finish with the groups of their step
        with as_optimizer_errors():
            given = param_group["params"]
            params = [given] if isinstance(given, Tensor) else given if isinstance(given, set) else list(given)
            for param in params:
                bare = param[1] if isinstance(param, tuple) else param
                index = self._index.get(id(bare))
                if index is not None and any(bare is other for group in self.param_groups for other in group["params"]):
                    raise OptimizerError(
                        f"{self._engine.names[index]} is in another param group already; name it in one"
                    )
            named, own = self._rest_of(param_group), set(param_group)
            filled = {**(named.costs.defaults if named else {}), **param_group, "params": params}
            filled.pop("cls", None)
            super().add_param_group(filled)
            if named and self._whole is not None:
                self._whole.rest_groups.add(len(self.param_groups) - 1)
                for key in self.defaults.keys() - named.costs.defaults.keys() - own:
                    del self.param_groups[-1][key]  # torch has added the defaults of the Optimizer's own class
        try:
            self._add_params(len(self.param_groups) - 1, self.param_groups[-1]["params"])
        except OptimizerError:
            self.param_groups.pop()
            if self._whole is not None:
                self._whole.rest_groups.discard(len(self.param_groups))
            raise

    def _rest_of(self, param_group: dict[str, Any]) -> RestClass | None:
        """The class of parameters that the Optimizer's own class does not update, if the group names one."""
        if "cls" not in param_group:
            return None
        if self._whole is None or self._rest is None:
            raise OptimizerError(
                "a param group names cls=, which none did when the Optimizer was made; make a second Optimizer for it"
            )
        self._rest.check(param_group["cls"])
        return self._rest

    def _add_params(self, number: int, params: Sequence[Tensor]) -> None:
        """Adds parameters to a param group, in the optimizers of their units."""
        by_unit = self._by_unit_slots(params)
        if self._whole is not None:
            self._whole.add(self._by_unit, by_unit, number, self.param_groups[number])
            return
        for index, slots in by_unit.items():
            self._by_unit[index].add_group(number, slots)

    def _by_unit_slots(self, params: Sequence[Tensor]) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for param in params:
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
            check_finite(group, f"param group {index}")

    def class_of(self, number: int) -> str:
        """The name of the class that updates a param group."""
        if self._whole is not None and self._rest is not None and number in self._whole.rest_groups:
            return self._rest.cls.__name__
        return self._cls.__name__

    @property
    def indices(self) -> frozenset[int]:
        """The model's trained parameters, by number, that are in a param group."""
        return frozenset(self._index[id(param)] for group in self.param_groups for param in group["params"])

    @property
    def by_unit(self) -> list[UnitOptimizer]:
        """The unit optimizers, in the order of the engine's units."""
        return self._by_unit

    def state_tensors(self) -> list[Tensor]:
        return [tensor for unit in self._by_unit for tensor in unit.state_tensors()]

    def planned_state(self, index: int, *, full: bool = False) -> tuple[int, int]:
        """Bytes of a unit's optimizer state by formula: of its vectors, and of its step counts. With `full`, of all of
        it, else of what has been updated."""
        if not self._by_unit:  # another Optimizer has replaced this one, or the model is plain again
            return 0, 0
        unit = self._by_unit[index]
        return unit.planned_state(partial(self._cost_in_group, updated_dtype(unit.unit)), full=full)

    def full_vectors(self) -> list[int]:
        """Bytes of each unit's optimizer state once all of it has been updated, without step counts."""
        cost_of = cache(self._cost_in_group)  # for this call: settings of param groups may change
        return [one.planned_state(partial(cost_of, updated_dtype(one.unit)), full=True)[0] for one in self._by_unit]

    def _cost_in_group(self, dtype: torch.dtype, number: int) -> StateCost:
        """What the state of elements of a param group costs; of a class that needs whole tensors, only in the groups
        that the class beside it updates."""
        beside = self._whole is not None and number in self._whole.rest_groups
        costs = self._rest.costs if beside and self._rest is not None else self._costs
        return costs.of_group(self.param_groups[number], dtype, self._engine.device)

    @property
    def state_cost(self) -> StateCost | None:
        """What the optimizer state costs with the class's own settings; None if it updates nothing."""
        return max(self._costs.by_dtype.values(), key=lambda cost: cost.per_element, default=None)

    @property
    def in_backward(self) -> bool:
        """Whether units are updated in backward."""
        return self._in_backward

    @property
    def state_bytes_per_element(self) -> int:
        """Bytes of optimizer state that an element of a parameter has once it was updated, at most."""
        groups = range(len(self.param_groups)) if self._whole is None else self._whole.rest_groups
        dtypes = self._costs.by_dtype
        costs = [*dtypes.values(), *(self._cost_in_group(dtype, number) for dtype in dtypes for number in groups)]
        return max((-(-cost.vectors(ALIGN) // ALIGN) for cost in costs), default=0)

    def planned_traffic(self) -> dict[str, int]:
        """Bytes that this rank sends in a step for the update itself, by purpose."""
        return planned_traffic(self._by_unit)

    @property
    def ownership(self) -> Ownership | None:
        """Which rank updates which tensor; None if the class is element-wise."""
        return self._whole.ownership if self._whole is not None else None

    def updates(self) -> list[Update]:
        """Which class updates each parameter, in the model's order; none if one element-wise class updates all."""
        if self._whole is None:
            return []
        rows: dict[int, Update] = {}
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                index = self._index[id(param)]
                name, place = self._engine.names[index], self._engine.places[index]
                cls, owner = self._whole.updater(self._by_unit[place.unit], name, number)
                rows[index] = Update(name, tuple(param.shape), cls.__name__, owner, self._reason(param))
        return [rows[index] for index in sorted(rows)]

    def _reason(self, param: nn.Parameter) -> str:
        """Why the class that updates a parameter was chosen for it."""
        return ""
