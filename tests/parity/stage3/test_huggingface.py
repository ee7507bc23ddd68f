"""Hugging Face models, built from tiny configurations, train at stage 3 to the bits of stage 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parity.stage3.compare import Case, assert_equal, differences

VOCAB = 64
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
}


def build(name: str) -> nn.Module:
    import transformers

    if name == "gpt2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **SMALL)
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **SMALL))
    if name == "mixtral":
        config = transformers.MixtralConfig(
            num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, **LLAMA, **SMALL
        )
        return transformers.MixtralForCausalLM(config)
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, **SMALL
    )
    return transformers.T5ForConditionalGeneration(config)


def speak(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    tokens = torch.randint(3, VOCAB, (2, 9), generator=generator)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss


def of_hugging_face(name: str, checkpointing: bool = False) -> list[str]:
    def prepared() -> nn.Module:
        model = build(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    return differences(Case(prepared, speak, {"bucket_bytes": 8 << 10}))


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "mixtral"])
def test_a_hugging_face_model_trains_to_the_same_bits(name: str) -> None:
    assert_equal(2, of_hugging_face, name)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_hugging_face_model_may_checkpoint_its_activations(name: str) -> None:
    assert_equal(2, of_hugging_face, name, True)
