"""The life of one sharded model: what happens between a backward and the next step.

1 A backward opens (the root's output, or the first gradient, says so) and gradients arrive, unit by unit.
2 Unless the local sums are to be kept (`accumulate(reduce="once")`), complete units are reduced at once; when backward
  closes, the rest. The gradient attribute of each parameter then shows what it is: the reduced gradient where the
  optimizer holds it whole, a placeholder that raises where it is spread over ranks.
3 `settle` comes once per step, before clipping or updating: the ranks tell each other which parameters they used and
  which units hold gradients that no round has taken, and run those rounds. After it, all ranks know the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from onefold.comm import Comm, Label, Pending
from onefold.config import Zero, check_reduce
from onefold.errors import ModelError, StateError
from onefold.memory import Pool, storage_key
from onefold.placement import Placement, Scope
from onefold.schedule import ReduceSchedule
from onefold.unit import Unit

ATTRIBUTE = "_onefold"


class Owner(NamedTuple):
    """Where a parameter hangs in the module tree."""

    module: nn.Module
    attribute: str
    param: nn.Parameter
    name: str


class Engine:
    def __init__(
        self,
        *,
        model: nn.Module,
        zero: Zero,
        placement: Placement,
        comm: Comm,
        pool: Pool,
        units: Sequence[Unit],
        frozen: Sequence[tuple[str, nn.Parameter]],
        owners: Sequence[Owner],
        digest: str,
    ) -> None:
        self.model, self.zero, self.placement, self.comm, self.pool = model, zero, placement, comm, pool
        self.units, self.frozen, self.owners, self.digest = list(units), list(frozen), list(owners), digest
        self.device = pool.device
        self.optimizer: Any = None  # the Optimizer that was made for this model
        self.names = [slot.name for unit in self.units for slot in unit.layout.slots]
        self.params = [param for unit in self.units for param in unit.params]
        self.first_param = [0]  # of each unit, in the two lists above
        for unit in self.units:
            self.first_param.append(self.first_param[-1] + len(unit.params))
        self.schedule = ReduceSchedule(self.units, self._reduced)
        self.used = bytearray(len(self.params))  # by this rank, since gradients were last dropped
        self.used_by_any = bytearray(len(self.params))  # known after settle
        self._accumulating: str | None = None
        self._open = False  # a backward is running
        self._settled = False
        self._order_agreed = False
        self._shown: dict[int, Tensor] = {}  # parameter -> what we put into its .grad
        self._gathers: list[Pending] = []
        self._ungathered: set[int] = set()  # units reduced but not yet made whole
        self._unit_index = {id(unit): index for index, unit in enumerate(self.units)}
        self._whole_gradients = placement.optimizer is Scope.WHOLE

    # -- backward --------------------------------------------------------------------------------------------------

    @property
    def reducing(self) -> bool:
        return self._accumulating != "once"

    def open_backward(self) -> None:
        """Called inside backward, before the first gradient where we can; the end of this backward closes it."""
        if self._open:
            return
        self._open = True
        self._settled = False
        self._hide_gradients()
        if self.reducing:
            self.schedule.begin()
        torch.autograd.Variable._execution_engine.queue_callback(self._close_backward)

    def gradient_arrived(self, unit_index: int, slot_index: int) -> None:
        """A parameter's .grad has been made by autograd: take it."""
        unit = self.units[unit_index]
        param = unit.params[slot_index]
        index = self.first_param[unit_index] + slot_index
        grad = param.grad
        if index in self._shown and grad is self._shown[index]:
            raise StateError(
                f"{self.names[index]} got a second gradient that did not pass through the model's forward; call "
                f"optimizer.zero_grad() first, or run the forward of the model that was given to shard()"
            )
        self.open_backward()
        if grad is None:
            return
        param.grad = None
        with torch.no_grad():
            unit.add_gradient(slot_index, grad)
            self.used[index] = 1
            if self.reducing:
                self.schedule.arrived(unit_index)

    def _close_backward(self) -> None:
        if not self._open:  # cut short by an error and tidied since
            return
        with torch.no_grad():
            if self.reducing:
                self.schedule.flush()
            self._open = False
            if self._accumulating is None:
                if self._whole_gradients:
                    self.settle()
                self._show_gradients()

    def _reduced(self, unit: Unit) -> None:
        if self._whole_gradients:
            self._ungathered.add(self._unit_index[id(unit)])
            if self._accumulating is None:
                self._gather_gradient(self._unit_index[id(unit)])

    def _gather_gradient(self, index: int) -> None:
        self._gathers.append(self.units[index].gather_gradient())
        self._ungathered.discard(index)

    def tidy_after_error(self) -> None:
        """A backward that raised left rounds half done: complete the order, so that all ranks stay in step."""
        if self._open and torch._C._current_graph_task_id() == -1:
            if self.reducing:
                self.schedule.flush()
            self._open = False

    # -- between backward and step ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """Agree on what was used and reduce what is left. Collective; once per step."""
        if self._settled:
            return
        self.tidy_after_error()
        if not any(self.used):
            raise StateError("no gradients: call loss.backward() before optimizer.step() or clip_grad_norm()")
        params, units = len(self.params), len(self.units)
        message = bytes(self.used) + bytes(unit.waiting for unit in self.units)
        if not self._order_agreed:
            message += b"".join(index.to_bytes(4, "big") for index in self.schedule.order_seen())
        rows = self.comm.gather_bytes(message, Label("used-flags", "step"))
        self.used_by_any = bytearray(map(max, zip(*(row[:params] for row in rows), strict=True)))
        late = [i for i in range(units) if any(row[params + i] for row in rows)]
        if not self._order_agreed:
            agreed = rows[0][params + units :]
            self.schedule.order = [int.from_bytes(agreed[i : i + 4], "big") for i in range(0, len(agreed), 4)]
            self._order_agreed = True
        for index in self.schedule.order:
            if index in late:
                self.schedule.extra_round(index)
        if self._whole_gradients:
            self.schedule.drain()
            for index in sorted(self._ungathered):
                self._gather_gradient(index)
            for pending in self._gathers:
                pending.wait()
            self._gathers.clear()
        self._settled = True

    def finish(self, index: int) -> Unit:
        """A unit whose gradient is complete."""
        self.schedule.finish(index)
        return self.units[index]

    def kept(self) -> bytearray:
        """Which parameters to update: used by some rank, and their .grad not set to None by the user since."""
        kept = bytearray(self.used_by_any)
        for index, shown in self._shown.items():
            grad = self.params[index].grad
            if grad is None:
                kept[index] = 0
            elif grad is not shown:
                raise StateError(
                    f"{self.names[index]}.grad was replaced after backward; the optimizer reads the reduced gradient: "
                    f"change it in place (stage 0), or set it to None to leave the parameter alone"
                )
        return kept

    def after_step(self, updated: bytearray) -> None:
        """Tell autograd that values changed, so that a stale graph raises instead of using new values."""
        torch.autograd.graph.increment_version([p for p, was in zip(self.params, updated, strict=True) if was])
        self.comm.meter.cut()

    def drop_gradients(self, *, keep_as_zeros: bool = False) -> None:
        self.tidy_after_error()
        self.schedule.drain()
        for pending in self._gathers:
            pending.wait()
        self._gathers.clear()
        self._ungathered.clear()
        for unit in self.units:
            unit.zero_gradient() if keep_as_zeros else unit.drop_gradient()
        self._settled = False
        if not keep_as_zeros:
            self._hide_gradients()
            self.used = bytearray(len(self.params))

    @contextmanager
    def accumulate(self, reduce: str | None) -> Iterator[None]:
        check_reduce(reduce)
        if self._accumulating is not None:
            raise StateError("accumulate() is already on for this model; leave the outer one first")
        self._accumulating = reduce or ("once" if self.placement.gradients is Scope.WHOLE else "each")
        try:
            yield
        finally:
            self._accumulating = None

    # -- what users see --------------------------------------------------------------------------------------------

    def _show_gradients(self) -> None:
        flags = self.used_by_any if self._whole_gradients else self.used
        for unit, first in zip(self.units, self.first_param, strict=False):
            for slot, param in enumerate(unit.params):
                index = first + slot
                if flags[index]:
                    shown = unit.whole_gradient_view(slot) if self._whole_gradients else ShardedGradient(param)
                    self._shown[index] = shown
                    param.grad = shown

    def _hide_gradients(self) -> None:
        for index, shown in self._shown.items():
            if self.params[index].grad is shown:
                self.params[index].grad = None
        self._shown.clear()

    def check_parameters(self) -> None:
        """Every parameter is still the one that was sharded, still a view of its unit."""
        for owner in self.owners:
            if owner.module._parameters.get(owner.attribute) is not owner.param:
                raise StateError(
                    f"{owner.name} was replaced or removed after shard(); change values in place "
                    f"(param.data.copy_), or change the model before shard()"
                )
        for unit in self.units:
            for param, pointer, slot in zip(unit.params, unit.pointers, unit.layout.slots, strict=True):
                if param.data_ptr() != pointer and param.numel():
                    raise StateError(
                        f"{slot.name} left the flat buffer it shares with its unit (.to(), .half(), assigning .data or "
                        f"load_state_dict(assign=True) after shard()); do that before shard(), or copy values in place"
                    )
        for name, param in self.frozen:
            if param.requires_grad:
                raise StateError(f"{name} was frozen when shard() was called and is not now; unfreeze before shard()")

    def held(self) -> dict[str, list[Tensor]]:
        """All training state this rank holds, by category."""
        return {
            "buffers": list(self.model.buffers()),
            "communication": self.pool.buffers(),
            "gradients": [tensor for unit in self.units for tensor in unit.gradient_tensors()],
            "optimizer": self.optimizer.state_tensors() if self.optimizer is not None else [],
            "parameters": [unit.whole for unit in self.units] + [param for _, param in self.frozen],
        }

    def storages(self) -> dict[int, tuple[str, Tensor]]:
        """Storage -> its category and a tensor of it. A borrowed buffer that holds a local sum counts as gradients."""
        return {storage_key(tensor): (category, tensor) for category, held in self.held().items() for tensor in held}

    def refuse_copy(self, *_: Any) -> NoReturn:
        raise StateError(
            "a sharded model cannot be copied or pickled: its parameters are views of buffers shared with other ranks; "
            "copy the model before shard(), or save model.state_dict()"
        )

    __deepcopy__ = __copy__ = __reduce_ex__ = refuse_copy


class ShardedGradient(Tensor):
    """Stands in a parameter's .grad when the gradient is spread over ranks: right shape, no values, raises if used."""

    @staticmethod
    def __new__(cls, param: Tensor) -> ShardedGradient:
        return Tensor._make_wrapper_subclass(
            cls, param.size(), strides=param.stride(), dtype=param.dtype, device=param.device
        )

    def __init__(self, param: Tensor) -> None:
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGradient({tuple(self.shape)}, {self.dtype}: each rank holds a part of it)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise StateError(
            f"{func} was called on a gradient that is spread over ranks: use optimizer.clip_grad_norm() instead of "
            f"torch's clip_grad_norm_, no GradScaler, and optimizer.zero_grad() before a backward that does not pass "
            f"through the sharded model's forward; stage=0 keeps gradients whole"
        )


def engine_of(model: nn.Module) -> Engine:
    engine = model.__dict__.get(ATTRIBUTE) if isinstance(model, nn.Module) else None
    if engine is None:
        raise ModelError(f"{type(model).__name__} has not been sharded; call onefold.shard(model, ...) first")
    return engine
