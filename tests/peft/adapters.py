"""Tiny models of transformers with adapters of PEFT, built alike on every rank, and their training."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import onefold
from tests.harness.device import device

VOCABULARY, WIDTH, STAGES = 64, 64, (0, 1, 2, 3)
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}


def base(kind: str = "llama") -> nn.Module:
    """Without a cache, which a block that is computed again would fill twice."""
    torch.manual_seed(0)
    if kind == "llama":
        sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "use_cache": False}
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **sizes, **heads))
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
                  "use_cache": False}  # fmt: skip
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=32, **no_dropout)
    )


def config(kind: str = "llama", **options: Any) -> LoraConfig:
    usual = {"r": 4, "target_modules": TARGETS[kind], "init_lora_weights": False, "fan_in_fan_out": kind == "gpt2"}
    return LoraConfig(**(usual | options))


def adapted(kind: str = "llama", model: nn.Module | None = None, **options: Any) -> Any:
    """A model with adapters that do something from the start; of PEFT's class, whose methods tests call."""
    model = base(kind) if model is None else model
    torch.manual_seed(1)
    return get_peft_model(model, config(kind, **options))


def tokens(step: int) -> Tensor:
    """This rank's batch of a step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(0, VOCABULARY, (2, 8), generator=generator).to(device())


def sharded(model: Any, stage: int, **fields: Any) -> tuple[Any, onefold.Optimizer]:
    model = onefold.shard(model.to(device()), stage=stage, bucket_bytes=1 << 14, timeout_s=30.0, **fields)
    return model, onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        batch = tokens(step)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens(9)).logits
    return found


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The adapters, unsharded, on every rank."""
    return onefold.full_state_dict(model, every_rank=True, only="trainable")


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def trained(build: Callable[[], Any], stage: int, fields: dict[str, Any]) -> dict[str, Tensor]:
    """Losses, adapters and logits after three steps."""
    model, optimizer = sharded(build(), stage, **fields)
    before = weights(model)
    losses = train(model, optimizer, range(3))
    found = weights(model)
    assert len(differing(before, found)) == len(found), "an adapter was not trained"
    return {f"loss {step}": loss for step, loss in enumerate(losses)} | found | {"logits": logits(model)}


def unlike_stage_0(build: Callable[[], Any], fields: dict[str, Any]) -> dict[int, list[str]]:
    """On a rank: by stage, what does not have the bits of stage 0."""
    first = trained(build, 0, fields)
    found = {stage: differing(trained(build, stage, fields), first) for stage in STAGES[1:]}
    return {stage: names for stage, names in found.items() if names}
