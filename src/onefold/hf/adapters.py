"""Models with PEFT's adapters: what is saved are the adapters, and the frozen base stays where it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from onefold import full_parameters, full_state_dict


def has_adapters(model: nn.Module) -> bool:
    """True for a PeftModel, and for a model of transformers with add_adapter()."""
    return bool(getattr(model, "peft_config", None))


def has_prompts(model: Any) -> bool:
    """True if PEFT runs modules of the model to save it: prompts that are trained."""
    return any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values())


def adapters_state_dict(model: Any) -> dict[str, Any]:
    """The parameters that PEFT may save, in rank 0's memory: those that train, those of all adapters, and the
    embeddings, which PEFT saves if the vocabulary was resized. Collective."""
    embeddings = [find() for find in (model.get_input_embeddings, model.get_output_embeddings)]
    ids = {id(param) for one in embeddings if one is not None for param in one.parameters()}
    adapters = set(model.peft_config)
    names = {
        name
        for name, param in model.named_parameters(remove_duplicate=False)
        if param.requires_grad or id(param) in ids or not adapters.isdisjoint(name.split("."))
    }
    return full_state_dict(model, only=names)


def load_adapters(folder: Path, model: Any) -> None:
    """Loads what PEFT saved of the active adapter into a sharded model, as load_adapter() would. Collective."""
    from peft import load_peft_weights, set_peft_model_state_dict

    active = model.active_adapters() if callable(model.active_adapters) else model.active_adapters
    where = folder if any(folder.glob("adapter_model.*")) else folder / active[0]
    with full_parameters(model, write=True):
        set_peft_model_state_dict(model, load_peft_weights(str(where), device="cpu"), adapter_name=active[0])


@contextmanager
def modules_named_by(model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the modules of `modules_to_save` take their state dicts from `state`: PEFT asks them for the names, also
    where it is given the values (peft 0.21), and a sharded module has no state dict."""
    changed = []
    for name, module in model.named_modules():
        kept = getattr(module, "modules_to_save", None)
        for adapter, one in kept.items() if isinstance(kept, nn.ModuleDict) else ():
            prefix = f"{name}.modules_to_save.{adapter}."
            found = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
            one.__dict__["state_dict"] = lambda found=found: found
            changed.append(one)
    try:
        yield
    finally:
        for one in changed:
            one.__dict__.pop("state_dict", None)
