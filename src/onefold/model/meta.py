"""Initialises a model that was built on the meta device, one module at a time.

The full model is never in memory: a module's parameters are allocated, initialised, and copied into their unit, which
keeps one shard of them. They are initialised from a state dict or safetensors file, one tensor at a time, or by the
module's own `reset_parameters`, or by a function of the user. Random numbers are seeded by (seed, module name), and a
DTensor is initialised as a full tensor before it is split, so the values are the same on every rank, at every number of
ranks, every stage and every "tp". A parameter that stays uninitialised raises an error that names it. Of values that
can be read by ranges a rank reads only the elements that it will keep.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import safe_open
from torch import Tensor, nn

from onefold.cost.layout import Span
from onefold.errors import ConfigError, ModelError
from onefold.model.dtensor_shards import distribute_like, is_dtensor, replace_in_place
from onefold.settings.zero import Source


@runtime_checkable
class ReadsRanges(Protocol):
    """Values by name, of which a part can be read."""

    def read_range(self, name: str, shape: torch.Size, span: Span) -> Tensor | None:
        """These elements of a tensor of this shape, in row-major order; None if they cannot be read on their own."""


class Builder:
    """Allocates and initialises parameters, module by module, when they are needed. `kept` has, by the names of
    parameters, the elements that this rank will keep; it keeps all of the others."""

    def __init__(
        self, model: nn.Module, device: torch.device, source: Source, seed: int, kept: Mapping[str, Span]
    ) -> None:
        self._device, self._seed, self._kept = device, seed, kept
        self._init = source if callable(source) else None
        self._values: Mapping[str, Tensor] | None = source if isinstance(source, Mapping) else None
        if isinstance(source, str | Path):
            self._values = Safetensors(source)
        self._owner: dict[int, tuple[str, nn.Module]] = {}  # id of a parameter -> the first module that has it
        self._modules = dict(model.named_modules())
        for prefix, module in self._modules.items():
            for param in module._parameters.values():
                if param is not None:
                    self._owner.setdefault(id(param), (prefix, module))
        self._built: set[str] = set()
        self._aliases: dict[int, list[str]] = {}  # id of a parameter -> all its names
        for name, param in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(param), []).append(name)

    def build(self, params: Iterable[nn.Parameter]) -> None:
        """Initialises the modules that own these parameters."""
        for param in params:
            self._build_module(*self._owner[id(param)])

    def finish(self) -> None:
        """Initialises the remaining modules: those with buffers only, or whose parameters all belong to others."""
        for prefix, module in self._modules.items():
            self._build_module(prefix, module)

    def _build_module(self, prefix: str, module: nn.Module) -> None:
        if prefix in self._built:
            return
        self._built.add(prefix)
        fresh = {n: t for n, t in _own(module) if t.device.type == "meta"}
        if not fresh:
            return
        split = {name: tensor for name, tensor in fresh.items() if is_dtensor(tensor)}
        with _without_weak_references(module):
            for name, tensor in fresh.items():
                whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if name in split else tensor
                real = torch.full_like(whole, _unset_value(tensor.dtype), device=self._device)
                if not isinstance(tensor, nn.Parameter):
                    module._buffers[name] = real
                elif name in split:  # a full tensor takes its place until it is initialised
                    module._parameters[name] = nn.Parameter(real, requires_grad=tensor.requires_grad)
                    self._aliases[id(module._parameters[name])] = self._aliases[id(tensor)]
                else:
                    replace_in_place(tensor, real)
        empty = {name: (tensor, tensor._version) for name, tensor in _own(module) if name in fresh}
        if self._values is not None:
            self._fill_from_values(prefix, module, list(fresh))
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _only_own_parameters(prefix, module, set(fresh)):
            torch.manual_seed(zlib.crc32(f"{self._seed}/{prefix}".encode()))
            reset: Any = getattr(module, "reset_parameters", None)
            if self._values is None and reset is not None:
                reset()
            if self._init is not None:
                self._init(module)
        left = [f"{prefix}.{n}" if prefix else n for n, t in _own(module) if n in fresh and _is_unset(t, *empty[n])]
        if left:
            raise ModelError(
                f"{', '.join(left)} got no values: {type(module).__name__} was built on the meta device, and neither "
                f"its reset_parameters nor `init` initialises it; give shard(init=…) a function that does, or a state "
                f"dict"
            )
        with torch.no_grad():
            for name, tensor in split.items():
                part = distribute_like(tensor, dict(_own(module))[name].detach())
                if isinstance(tensor, nn.Parameter):
                    replace_in_place(tensor, part)
                    module._parameters[name] = tensor
                else:
                    module._buffers[name] = part

    def _fill_from_values(self, prefix: str, module: nn.Module, names: list[str]) -> None:
        assert self._values is not None
        own = dict(_own(module))
        for name in names:
            full = f"{prefix}.{name}" if prefix else name
            known = [alias for alias in self._aliases.get(id(own[name]), [full]) if alias in self._values]
            if not known:
                if name in module._non_persistent_buffers_set:
                    continue
                raise ModelError(
                    f"{full} is not in the state dict of shard(init=…), which has {len(self._values)} other tensors; "
                    f"give one of this model"
                )
            if self._fill_range(known[0], own[name]):
                continue
            value = self._values[known[0]]
            if value.shape != own[name].shape:
                raise ModelError(
                    f"{full} has shape {tuple(own[name].shape)}, but {tuple(value.shape)} in the state dict of "
                    f"shard(init=…); give one of this model"
                )
            with torch.no_grad():
                own[name].copy_(value)

    def _fill_range(self, name: str, param: Tensor) -> bool:
        """Reads what this rank keeps of a parameter, and sets the rest to zero. False if all of it must be read."""
        span = next((self._kept[alias] for alias in self._aliases.get(id(param), []) if alias in self._kept), None)
        values: object = self._values
        if span is None or not isinstance(values, ReadsRanges) or not param.is_contiguous():
            return False
        part = values.read_range(name, param.shape, span)
        if part is None:
            return False
        with torch.no_grad():
            param.zero_().view(-1)[span.start : span.stop] = part.to(param.device)
        return True


class Safetensors(Mapping[str, Tensor]):
    """A safetensors file, read one tensor at a time."""

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise ConfigError(f"init={str(path)!r} is not a file; give a .safetensors file, a state dict or a function")
        self._file = safe_open(str(path), framework="pt", device="cpu")
        self._keys = dict.fromkeys(self._file.keys())

    def __contains__(self, name: object) -> bool:
        return name in self._keys

    def __getitem__(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(n, t) for d in (module._parameters, module._buffers) for n, t in d.items() if t is not None]


@contextmanager
def _only_own_parameters(prefix: str, module: nn.Module, fresh: set[str]) -> Iterator[None]:
    """Inside, the module's other parameters are blanks: those it shares with a module that is initialised already, and
    those of its submodules, which are initialised with them. A write to those would be lost, so it raises."""
    below = [
        (f"{prefix}.{name}" if prefix else name, child) for name, child in module.named_modules() if child is not module
    ]
    aside: list[tuple[dict[str, Any], dict[str, nn.Parameter]]] = []
    for _, owner in [("", module), *below]:
        skip = fresh if owner is module else set()
        aside.append(
            (owner._parameters, {n: p for n, p in owner._parameters.items() if p is not None and n not in skip})
        )
    blanks: dict[int, nn.Parameter] = {}
    for params, known in aside:
        for name, param in known.items():
            device = torch.device("cpu") if params is module._parameters else torch.device("meta")
            blank = torch.zeros(param.shape, dtype=param.dtype, device=device)
            params[name] = blanks.setdefault(id(param), nn.Parameter(blank, requires_grad=False))
    try:
        yield
    finally:
        for params, known in aside:
            params.update(known)
    for name, child in below:
        for key, param in child._parameters.items():
            if param is not None and id(param) in blanks and blanks[id(param)].is_meta and blanks[id(param)]._version:
                raise ModelError(
                    f"initialising {prefix or 'the model'} wrote {name}.{key}, which belongs to a submodule and is "
                    f"initialised with it; let each module's reset_parameters, or `init`, write its own parameters only"
                )


@contextmanager
def _without_weak_references(module: nn.Module) -> Iterator[None]:
    """Inside, nn.LSTM and similar modules have no weak references to their parameters, which could not be swapped."""
    own: dict[str, Any] = module.__dict__
    weak = "_flat_weight_refs" in own
    if weak:
        own["_flat_weight_refs"] = []
    yield
    if weak:
        own["_flat_weight_refs"] = [weakref.ref(w) if w is not None else None for w in own["_flat_weights"]]


def _unset_value(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(tensor: Tensor, before: Tensor, version: int) -> bool:
    """Whether a tensor has not been initialised: it has a NaN, or, if its dtype has none, was never written."""
    if tensor.numel() == 0:
        return False
    unset = _unset_value(tensor.dtype)
    if unset != unset:
        return bool(torch.isnan(tensor).any())
    return tensor is before and tensor._version == version and bool((tensor == unset).all())
