"""A pretrained model that is larger than one device: built on the meta device, and each rank reads its part.

Inside `deferring()` transformers' from_pretrained builds the model as ever, but leaves the parameters that are in
safetensors files on the meta device, as `Deferred` parameters that know where their values are. What the files do not
have (a new head, buffers that are not saved) is initialised by from_pretrained as ever, with the same random numbers.
`shard(model, init=deferred_values(model))` reads the values, unit by unit, and each rank keeps its shard. Until then a
forward of the model, or a load_state_dict, reads all of it, and what else needs the values of a parameter reads these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onefold.cost.layout import Span
from onefold.errors import ConfigError
from onefold.integrations.transformers_recipes import Files, Recipe, recipes
from onefold.model.dtensor_shards import replace_in_place

META = torch.device("meta")
VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes of a tensor that give its values
QUIET = {
    "dim", "ndimension", "size", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
    "is_floating_point", "is_complex", "is_signed", "is_inference", "get_device", "data_ptr", "untyped_storage",
    "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "__hash__",
    "_has_compatible_shallow_copy_type",
}  # fmt: skip
"""Methods and functions that ask for no values."""


class Origin(NamedTuple):
    """Where the values of a parameter are, and the dtype that from_pretrained was asked for."""

    recipe: Recipe
    name: str
    dtype: torch.dtype

    def values(self) -> Tensor:
        return self.recipe.make(self.name, self.dtype)


class Deferred(nn.Parameter):
    """A parameter without memory whose values are in files. It answers for its shape and dtype, and `device` says where
    its values will be; whatever else is done with it reads the values first, and it is an nn.Parameter from then on."""

    origin: Origin
    home: torch.device
    """The device to which the model was moved."""

    @classmethod
    def of(cls, param: Tensor, requires_grad: bool, origin: Origin, home: torch.device) -> Deferred:
        with torch._C.DisableTorchFunctionSubclass():
            deferred = cls(param.detach(), requires_grad)
        deferred.__dict__.update(param.__dict__)
        deferred.origin, deferred.home = origin, home
        return deferred

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func.__name__
        name = func.__self__.__name__ if kind in ("__get__", "__set__") else kind
        if (kind, name) == ("__get__", "device"):
            return args[0].home
        if kind == "__set__":
            quiet = name != "data" or args[1].is_meta
        else:
            quiet = name not in VALUES if kind == "__get__" else name in QUIET
        if not quiet:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Deferred):
                    one.load()
        with torch._C.DisableTorchFunctionSubclass() if quiet else nullcontext():
            return func(*args, **(kwargs or {}))

    def load(self) -> None:
        replace_in_place(self, self.origin.values().to(device=self.home, dtype=self.dtype))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        self.home = device or self.home
        if dtype in (None, self.dtype):
            return self
        with torch._C.DisableTorchFunctionSubclass():
            converted = self.detach().to(dtype)
        return Deferred.of(converted, self.requires_grad, self.origin, self.home)

    def float(self, **_: Any) -> Any:
        return self.to(torch.float32)

    def bfloat16(self, **_: Any) -> Any:
        return self.to(torch.bfloat16)

    def half(self, **_: Any) -> Any:
        return self.to(torch.float16)

    def cuda(self, device: Any = None, *_: Any, **__: Any) -> Any:
        return self.to(torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device))

    def cpu(self, *_: Any, **__: Any) -> Any:
        return self.to(torch.device("cpu"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Deferred:
        if id(self) not in memo:
            memo[id(self)] = Deferred.of(self, self.requires_grad, self.origin, self.home)
            memo[id(self)].__dict__.update(self.__dict__)
        copied: Deferred = memo[id(self)]
        return copied


class DeferredValues(Mapping[str, Tensor]):
    """The values of a model's deferred parameters, by the names that these have now, each read when it is asked for."""

    def __init__(self, model: nn.Module) -> None:
        named = model.named_parameters(remove_duplicate=False)
        deferred = {name: param for name, param in named if isinstance(param, Deferred)}
        self._origins = {name: param.origin for name, param in deferred.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._origins[name].values()

    def read_range(self, name: str, shape: torch.Size, span: Span) -> Tensor | None:
        """These elements of a parameter, if it is one tensor of the files and still has the shape that it has there."""
        origin = self._origins[name]
        return origin.recipe.make_range(origin.dtype, shape, span)

    def __contains__(self, name: object) -> bool:
        return name in self._origins

    def __iter__(self) -> Iterator[str]:
        return iter(self._origins)

    def __len__(self) -> int:
        return len(self._origins)


def deferred_values(model: nn.Module) -> DeferredValues | None:
    """What fills the deferred parameters of a model, for shard(init=…); None if it has none. These become plain
    parameters on the meta device."""
    values = DeferredValues(model)
    for param in model.parameters():
        if isinstance(param, Deferred):
            with torch._C.DisableTorchFunctionSubclass():
                replace_in_place(param, param.detach())
    return values if values else None


def load_now(module: nn.Module) -> None:
    """Reads the values of all deferred parameters of a module, all of them on every rank."""
    for param in module.parameters():
        if isinstance(param, Deferred):
            param.load()


def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`cls.from_pretrained(…)` of a transformers model whose parameters stay on the meta device until it is sharded.

    Each rank then reads its part of the safetensors files: no rank ever holds the whole model.

    >>> import tempfile, onefold.hf
    >>> from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     GPT2LMHeadModel(config).save_pretrained(folder)
    ...     model = onefold.hf.from_pretrained(AutoModelForCausalLM, folder)
    >>> model.transformer.wte.weight.is_meta
    True
    """
    if not callable(getattr(cls, "from_pretrained", None)):
        raise ConfigError(f"{cls!r} has no from_pretrained; give a model class of transformers, and its arguments")
    with deferring():
        return cls.from_pretrained(*args, **kwargs)


@contextmanager
def deferring() -> Iterator[None]:
    """Inside, from_pretrained leaves parameters that are in safetensors files on the meta device."""
    from transformers import PreTrainedModel

    load = PreTrainedModel._load_pretrained_model

    def load_deferred(model: Any, state_dict: Any, files: Any, load_config: Any, *keys: Any) -> tuple[Any, Any]:
        """`keys` are the expected ones, from transformers 5.4 on."""
        if not _can_defer(state_dict, files, load_config):
            return load(model, state_dict, files, load_config, *keys)
        return _load_deferred(load, model, Files(files), load_config, keys)

    PreTrainedModel._load_pretrained_model = staticmethod(load_deferred)
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(load)


def _can_defer(state_dict: Any, files: Any, load_config: Any) -> bool:
    """Whether all values are in safetensors files, in the dtype they train in, for one device."""
    if state_dict is not None or not files or not all(str(file).endswith(".safetensors") for file in files):
        return False
    places = set((load_config.device_map or {}).values())
    return load_config.hf_quantizer is None and load_config.device_mesh is None and len(places) <= 1


def _load_deferred(
    load: Callable[..., tuple[Any, Any]], model: Any, files: Files, load_config: Any, keys: tuple[Any, ...]
) -> tuple[Any, Any]:
    """1 transformers loads tensors without values, so that dtypes, mismatches and what is missing are as ever
    2 each parameter that was loaded gets the recipe of its values  3 buffers of the files are small: they are read."""
    found = recipes(model, files, load_config.weight_mapping or [])
    on_meta = dataclasses.replace(load_config, device_map={"": META})
    result = load(model, {name: files.on_meta(name) for name in files}, None, on_meta, *keys)
    mismatched = {key if isinstance(key, str) else key[0] for key in result[0].mismatched_keys}
    for name, recipe in found.items():
        if name in mismatched or name in result[0].missing_keys:
            continue
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        tensor = getattr(module, own)
        if isinstance(tensor, nn.Parameter):
            origin = Origin(recipe, name, tensor.dtype)
            setattr(module, own, Deferred.of(tensor, tensor.requires_grad, origin, torch.device("cpu")))
        else:
            real = recipe.make(name, tensor.dtype)
            real.__dict__.update(tensor.__dict__)
            setattr(module, own, real)
    model.register_forward_pre_hook(_load_before)
    model.register_load_state_dict_pre_hook(_load_before)
    model.resize_token_embeddings = MethodType(_load_and_resize, model)
    return result


def _load_before(model: nn.Module, *_: Any) -> None:
    """A model that runs, or loads other values, before it is sharded, is read whole. A no-op for a sharded one."""
    load_now(model)


def _load_and_resize(model: Any, *args: Any, **kwargs: Any) -> Any:
    """resize_token_embeddings, which computes new rows from the old ones: these are read first."""
    for embeddings in (model.get_input_embeddings(), model.get_output_embeddings()):
        if embeddings is not None:
            load_now(embeddings)
    return type(model).resize_token_embeddings(model, *args, **kwargs)
