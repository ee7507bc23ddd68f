"""The dtypes of compute, of reductions, of kept gradients and of what the optimizer updates.

With 16 bits the optimizer updates fp32 master parameters, and forward and backward use a 16-bit copy that is rounded
from them after every update. 16-bit gradients are summed over ranks in fp32 and rounded once. Parameters that stay in
fp32 need no copy: they are their own master.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from onefold.errors import ConfigError
from onefold.settings.values import MASTER_BYTES, MASTERS
from onefold.settings.widths import Widths, check_master

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
Dtype: TypeAlias = "torch.dtype | str | None"
Modules: TypeAlias = "type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool] | None"


class Dtypes(NamedTuple):
    """The dtypes of one unit."""

    compute: torch.dtype
    wire: torch.dtype
    grad: torch.dtype
    master: Literal["fp32", "split"] | None = None  # None: the parameters themselves are updated
    accumulate: torch.dtype = torch.float32  # sums of micro-batches, where 16 bits compute

    @property
    def narrow(self) -> bool:
        return self.master is not None

    @property
    def widths(self) -> Widths:
        """Bytes per element of each."""
        sizes = self.compute.itemsize, self.wire.itemsize, self.grad.itemsize
        return Widths(*sizes, MASTER_BYTES[self.master], self.accumulate.itemsize)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Which dtype computes, travels, holds the gradients and is updated by the optimizer.

    Fields that are None are decided by `shard`, for the backend and the device; print `optimizer.precision` to see what
    was decided.

    >>> import onefold
    >>> print(onefold.Precision(compute="bf16", wire="bf16", grad="bf16", master="fp32"))
    what                dtype   why
    compute             bf16    forward and backward
    gradients travel    bf16    summed over ranks in fp32, rounded once
    gradients kept      bf16    fp32 once accumulate() is used
    master              fp32    what the optimizer updates
    optimizer state     fp32    as the master
    """

    compute: Dtype = "fp32"
    """The dtype of parameters and gradients in forward and backward: "fp32", "bf16" or "fp16"."""

    wire: Dtype = None
    """The dtype in which gradients travel. None: `compute` where Onefold sums over ranks, in fp32; fp32 where NCCL
    does, which sums in the dtype that travels: `placement()` says who does."""

    grad: Dtype = None
    """The dtype of the reduced gradient that `step` reads. None: `compute`, and fp32 once gradients are accumulated."""

    master: Literal["fp32", "split"] | None = None
    """What the optimizer updates where 16 bits compute. "fp32": an fp32 copy of each parameter. "split" (bf16 only):
    the bf16 parameter itself and the 16 bits by which fp32 is longer; 2 bytes less per parameter, and the same bits.
    None: "split" on CUDA, "fp32" on a CPU."""

    accumulate: Literal["fp32", "bf16"] = "fp32"
    """The dtype in which gradients of several micro-batches add up, where 16 bits compute. "bf16" (with compute="bf16")
    takes 2 bytes less per parameter; sums are then rounded stochastically, so that small gradients are not lost."""

    keep_fp32: Modules = None
    """Modules that stay in fp32 (norms, routers): a module class, a tuple of classes, or a callable
    (name, module) -> bool."""

    cast_inputs: bool | tuple[str | int, ...] = True
    """Which floating inputs are cast to `compute`. True: all inputs of the model, and the first input of each block and
    of each layer outside blocks. A tuple of names and positions: of the model's inputs only these, such as ("x",) to
    leave timesteps or labels as they are. False: none at all, as FSDP2's cast_forward_inputs=False."""

    _state: ClassVar[str] = "fp32"  # what the table says of the optimizer state: see with_state

    def __post_init__(self) -> None:
        for field in ("compute", "wire", "grad"):
            object.__setattr__(self, field, _dtype(field, getattr(self, field)))
        if self.master is not None and self.master not in MASTERS:
            raise ConfigError(f"master={self.master!r} is unknown; use one of 'fp32', 'split'")
        check_master(NAMES[self.compute], self.master)  # type: ignore[index]
        if self.accumulate not in ("fp32", "bf16"):
            raise ConfigError(f"accumulate={self.accumulate!r} is unknown; use 'fp32' or 'bf16'")
        if self.accumulate == "bf16" and (self.compute is not torch.bfloat16 or self.grad is torch.float32):
            found = f"compute={NAMES[self.compute]!r}" if self.compute is not torch.bfloat16 else "grad='fp32'"  # type: ignore[index]
            raise ConfigError(f"accumulate='bf16' is for compute='bf16' with gradients in bf16, found {found}")
        if not self.narrow and (
            self.wire or self.grad or self.master or self.keep_fp32 or self.cast_inputs is not True
        ):
            raise ConfigError(
                "with compute='fp32' everything is fp32: leave wire, grad, master, keep_fp32 and cast_inputs out"
            )
        chosen_inputs = () if isinstance(self.cast_inputs, bool) else self.cast_inputs
        if not isinstance(chosen_inputs, tuple) or not all(
            isinstance(one, str) or (type(one) is int and one >= 0) for one in chosen_inputs
        ):
            raise ConfigError(
                f"cast_inputs={self.cast_inputs!r} is neither True, False nor a tuple of names and positions of inputs"
            )
        for field in ("wire", "grad"):
            chosen = getattr(self, field)
            if chosen not in (None, torch.float32, self.compute):
                names = NAMES[chosen], NAMES[self.compute]  # type: ignore[index]
                raise ConfigError("{}={!r} is neither fp32 nor compute={!r}".format(field, *names))
        classes = self.keep_fp32 if isinstance(self.keep_fp32, tuple) else (self.keep_fp32,)
        by_class = all(isinstance(c, type) and issubclass(c, nn.Module) for c in classes)
        by_call = callable(self.keep_fp32) and not isinstance(self.keep_fp32, type | nn.Module)
        if not (self.keep_fp32 is None or by_class or by_call):
            raise ConfigError(f"keep_fp32={self.keep_fp32!r} is neither module classes nor a callable")

    @classmethod
    def of(cls, value: Any) -> Precision:
        """From the setting of `shard`: a name, or a Precision."""
        if isinstance(value, Precision):
            return value
        if not (isinstance(value, str) and value in DTYPES) and not (isinstance(value, torch.dtype) and value in NAMES):
            raise ConfigError(f"precision={value!r} is unknown; use 'fp32', 'bf16', 'fp16' or a Precision object")
        return cls(compute=value)

    @property
    def narrow(self) -> bool:
        """Whether forward and backward run in 16 bits."""
        return self.compute is not torch.float32

    def with_state(self, form: str) -> Precision:
        """This precision beside optimizer state in another form, for its table."""
        if form == "fp32":
            return self
        made = dataclasses.replace(self)
        object.__setattr__(made, "_state", form)
        return made

    def decided(self, *, own_sum: bool, cuda: bool) -> Precision:
        """This precision with every field chosen for the backend (`own_sum`: Onefold sums, as on gloo) and device."""
        if not self.narrow:
            return self
        return dataclasses.replace(
            self,
            wire=self.wire or (self.compute if own_sum else torch.float32),
            grad=self.grad or self.compute,
            master=self.master or ("split" if cuda and self.compute is torch.bfloat16 else "fp32"),
        )

    def dtypes(self, dtype: torch.dtype) -> Dtypes:
        """The dtypes of a unit that computes in `dtype`; every field must have been decided."""
        if dtype is self.compute and self.narrow:
            assert isinstance(self.wire, torch.dtype) and isinstance(self.grad, torch.dtype)
            return Dtypes(dtype, self.wire, self.grad, self.master, DTYPES[self.accumulate])
        return Dtypes(dtype, dtype, dtype)

    def kept(self, model: nn.Module) -> list[str]:
        """Names of the outermost modules that stay in fp32: those asked for, and BatchNorm, whose buffers are fp32."""
        if not self.narrow:
            return []
        chosen: list[str] = []
        inside: set[int] = set()
        asked = False
        for name, module in model.named_modules():
            wanted = self._keeps(name, module)
            asked = asked or wanted
            if (wanted or isinstance(module, _BatchNorm)) and id(module) not in inside:
                chosen.append(name)
                inside.update(id(child) for child in module.modules())
        if self.keep_fp32 is not None and not asked:
            raise ConfigError(f"keep_fp32={self.keep_fp32!r} matches no module of the model")
        return chosen

    def _keeps(self, name: str, module: nn.Module) -> bool:
        if self.keep_fp32 is None or isinstance(self.keep_fp32, type | tuple):
            return isinstance(module, self.keep_fp32 or ())
        return bool(self.keep_fp32(name, module))

    def __str__(self) -> str:
        def name(dtype: Any) -> str:
            return NAMES.get(dtype, "auto")

        if not self.narrow:
            rows = [("everything", "fp32", "no copies: parameters are their own master")]
        else:
            split = "a bf16 copy and a 16-bit remainder" if self.master == "split" else "what the optimizer updates"
            in_bf16 = self.accumulate == "bf16"
            sums = "sums of micro-batches too, rounded at random" if in_bf16 else "fp32 once accumulate() is used"
            rows = [
                ("compute", name(self.compute), "forward and backward"),
                ("gradients travel", name(self.wire), "summed over ranks in fp32, rounded once"),
                ("gradients kept", name(self.grad), sums),
                ("master", "auto" if self.master is None else "fp32", split),
                ("optimizer state", "fp32", "as the master"),
            ]
        if self._state != "fp32":
            kept = [row for row in rows if row[0] != "optimizer state"]
            rows = [*kept, ("optimizer state", self._state, "rounded at random, from state_seed")]
        if self.keep_fp32 is not None:
            rows.append(("kept modules", "fp32", "their own master"))
        if self.cast_inputs is not True:
            cast = ", ".join(map(str, self.cast_inputs)) if self.cast_inputs else "none"
            rows.append(("cast inputs", name(self.compute), cast))
        return "\n".join(f"{what:<20}{dtype:<8}{why}" for what, dtype, why in [("what", "dtype", "why"), *rows])


def _dtype(field: str, value: Any) -> torch.dtype | None:
    if value is None and field != "compute":
        return None
    dtype = DTYPES.get(value) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or dtype not in NAMES:
        raise ConfigError(f"{field}={value!r} is not a precision; use 'fp32', 'bf16' or 'fp16'")
    return dtype
