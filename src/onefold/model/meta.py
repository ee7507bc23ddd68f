"""Give a model that was built on the meta device its values, one module at a time.

Nothing here holds the whole model: a module's parameters become real, are filled, and go into their unit, which keeps
one shard of them. They are filled from a state dict or safetensors file, one tensor at a time, or by the module's own
`reset_parameters`, or by a function of the user's. Random numbers are seeded by (seed, module name), and a DTensor is
filled whole before it is cut, so the values are the same on every rank, at every number of ranks, every stage and
every "tp". What nobody filled is an error that names it.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from onefold.errors import ConfigError, ModelError
from onefold.model.dtensor_shards import cut, is_dtensor, replace_in_place
from onefold.settings.zero import Source


class Builder:
    """Makes parameters real on demand."""

    def __init__(self, model: nn.Module, device: torch.device, source: Source, seed: int) -> None:
        self._device, self._seed = device, seed
        self._init = source if callable(source) else None
        self._values: Mapping[str, Tensor] | None = source if isinstance(source, Mapping) else None
        if isinstance(source, str | Path):
            self._values = Safetensors(source)
        self._owner: dict[int, tuple[str, nn.Module]] = {}  # of each parameter: the first module that has it
        self._modules = dict(model.named_modules())
        for prefix, module in self._modules.items():
            for param in module._parameters.values():
                if param is not None:
                    self._owner.setdefault(id(param), (prefix, module))
        self._built: set[str] = set()
        self._aliases: dict[int, list[str]] = {}  # all names of a parameter
        for name, param in model.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(param), []).append(name)

    def build(self, params: Iterable[nn.Parameter]) -> None:
        """Make the modules that own these parameters real."""
        for param in params:
            self._build_module(*self._owner[id(param)])

    def finish(self) -> None:
        """Modules with buffers only, and those whose parameters all belong to others."""
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
                real = torch.full_like(whole, _unset(tensor.dtype), device=self._device)
                if not isinstance(tensor, nn.Parameter):
                    module._buffers[name] = real
                elif name in split:  # a whole one stands in for it until it is filled
                    module._parameters[name] = nn.Parameter(real, requires_grad=tensor.requires_grad)
                    self._aliases[id(module._parameters[name])] = self._aliases[id(tensor)]
                else:
                    replace_in_place(tensor, real)
        empty = {name: (tensor, tensor._version) for name, tensor in _own(module) if name in fresh}
        if self._values is not None:
            self._fill_from_values(prefix, module, list(fresh))
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _spared(prefix, module, set(fresh)):
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
                f"its reset_parameters nor `init` fills it; give shard(init=…) a function that does, or a state dict"
            )
        with torch.no_grad():
            for name, tensor in split.items():
                part = cut(tensor, dict(_own(module))[name].detach())
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
                raise ModelError(f"{full} is not in the state that init= names; it holds {len(self._values)} tensors")
            value = self._values[known[0]]
            if value.shape != own[name].shape:
                raise ModelError(f"{full} has shape {tuple(own[name].shape)}, in the state it is {tuple(value.shape)}")
            with torch.no_grad():
                own[name].copy_(value)


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
def _spared(prefix: str, module: nn.Module, fresh: set[str]) -> Iterator[None]:
    """While a module fills itself, parameters it shares with a module built before stand aside; and so do those of the
    modules below it, which fill themselves: a write to them would be lost, so it is an error."""
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
                    f"filling {prefix or 'the model'} wrote {name}.{key}, which belongs to a module below it and is "
                    f"filled on its own; let each module's reset_parameters, or `init`, fill its own parameters only"
                )


@contextmanager
def _without_weak_references(module: nn.Module) -> Iterator[None]:
    """nn.LSTM and its kin hold weak references to their parameters, which keep them from being swapped."""
    own: dict[str, Any] = module.__dict__
    weak = "_flat_weight_refs" in own
    if weak:
        own["_flat_weight_refs"] = []
    yield
    if weak:
        own["_flat_weight_refs"] = [weakref.ref(w) if w is not None else None for w in own["_flat_weights"]]


def _unset(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min


def _is_unset(tensor: Tensor, before: Tensor, version: int) -> bool:
    """NaN somewhere; of other numbers, which have no mark of their own: as they were, and never written."""
    if tensor.numel() == 0:
        return False
    mark = _unset(tensor.dtype)
    if mark != mark:
        return bool(torch.isnan(tensor).any())
    return tensor is before and tensor._version == version and bool((tensor == mark).all())
