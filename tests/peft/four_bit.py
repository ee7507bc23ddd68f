"""The tiny Llama with 4-bit weights of bitsandbytes, and adapters over it."""

from __future__ import annotations

from typing import Any

import bitsandbytes as bnb
import torch
from peft import prepare_model_for_kbit_training
from torch import nn

from tests.peft.adapters import adapted, base


def quantized(*, double: bool = True, kind: str = "nf4", storage: torch.dtype = torch.uint8) -> Any:
    """All linear layers but the head in 4 bits, the rest in bf16, as from_pretrained(quantization_config=…) has it."""
    model = base().to(torch.bfloat16)
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and name != "lm_head":
            packed = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16,
                compress_statistics=double, quant_type=kind, quant_storage=storage,
            )  # fmt: skip
            packed.load_state_dict(layer.state_dict())
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, packed.to("cpu"))
    model.is_loaded_in_4bit = True
    return model.requires_grad_(False)


def prepared(**how: Any) -> Any:
    """What PEFT's users do with a quantized model before they add adapters: norms and head in fp32, recomputation."""
    model = prepare_model_for_kbit_training(quantized(**how), gradient_checkpointing_kwargs={"use_reentrant": False})
    return adapted(model=model)


def q_lora(**how: Any) -> Any:
    return adapted(model=quantized(**how))


def q_dora(**how: Any) -> Any:
    return adapted(model=quantized(**how), use_dora=True)
