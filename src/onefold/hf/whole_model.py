"""Methods of a Hugging Face model that concern the whole model: generate() and save_pretrained()."""

from __future__ import annotations

import inspect
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onefold import full_parameters
from onefold.hf.adapters import modules_named_by


def whole_model_methods(model: nn.Module) -> None:
    """Lets generate() and save_pretrained() of a sharded model, if there are such methods, do what users expect."""
    if hasattr(model, "generate"):
        model.__dict__["generate"] = _generate(model, model.generate)
    if hasattr(model, "save_pretrained"):
        model.__dict__["save_pretrained"] = _save_pretrained(model, model.save_pretrained)


def _generate(model: nn.Module, plain: Any) -> Any:
    """generate() with parameters that are unsharded once, for all its forwards: ranks may generate sequences of
    different lengths. Every rank calls it."""

    @wraps(plain)
    def generate(*args: Any, **kwargs: Any) -> Any:
        with full_parameters(model):
            return plain(*args, **kwargs)

    return generate


def _save_pretrained(model: nn.Module, plain: Any) -> Any:
    """save_pretrained() whose config.json names the dtype of the state dict that it is given: where 16 bits compute,
    that has the fp32 masters, and from_pretrained() would round them to the dtype of the parameters."""
    signature = inspect.signature(plain)

    @wraps(plain)
    def save_pretrained(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        state = given.get("state_dict") or given.get("kwargs", {}).get("state_dict") or {}
        dtypes = [value.dtype for value in state.values() if isinstance(value, Tensor) and value.is_floating_point()]
        with modules_named_by(model, state):
            result = plain(*args, **kwargs)  # which empties the state dict
        file = Path(given["save_directory"]) / "config.json"
        if dtypes and given.get("is_main_process", True) and file.is_file():
            _name_dtype(model, file.parent, dtypes[0])
        return result

    return save_pretrained


def _name_dtype(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Writes config.json with a dtype, and leaves the model's own config as it was."""
    before = model.config.dtype
    try:
        model.config.dtype = dtype
        model.config.save_pretrained(folder)
    finally:
        model.config.dtype = before
