"""onefold.hf.cut_sequences: models of transformers train on cut sequences as one process trains them on whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onefold
import onefold.hf
from tests.harness import run_ranks

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama(**settings: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **{**GROUPED, **settings}))


def qwen() -> Any:
    """One block with a sliding window."""
    torch.manual_seed(0)
    settings = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, **GROUPED, **settings))


def one_head() -> Any:
    """Attended to by the ring, over balanced stretches."""
    return llama(num_attention_heads=1, num_key_value_heads=1)


def tokens(length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(32, (2, length), generator=torch.Generator().manual_seed(3))
    labels = torch.where(ids % 3 == 0, -100, ids)
    labels[:, :6] = -100
    return {"input_ids": ids, "labels": labels}


def packed() -> dict[str, torch.Tensor]:
    positions = torch.tensor([[*range(5), *range(7)], [*range(9), *range(3)]])
    return {**tokens(12), "position_ids": positions}


def padded() -> dict[str, torch.Tensor]:
    batch = tokens(12)
    batch["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
    batch["attention_mask"][0, 9:], batch["attention_mask"][1, :4] = 0, 0
    batch["labels"][batch["attention_mask"] == 0] = -100
    return batch


def masked() -> dict[str, torch.Tensor]:
    """Positions that start again beside a mask, by which transformers takes all tokens for one document."""
    return {**packed(), "attention_mask": torch.ones(2, 12, dtype=torch.long)}


CASES = {
    "grouped, odd length": (llama, tokens(11), {}),
    "window": (qwen, tokens(12), {}),
    "packed": (llama, packed(), {"activations": "checkpoint"}),
    "padded, tiled": (llama, padded(), {}),
    "positions and a mask": (llama, masked(), {}),
    "window, packed": (qwen, packed(), {}),
    "ring, packed": (one_head, packed(), {}),
}


def stepped(model: Any, batch: dict[str, torch.Tensor], optimizer: Any) -> tuple[float, Any]:
    output = model(**batch, use_cache=False)  # with a cache transformers does not see that sequences are packed
    output.loss.backward()
    optimizer.step()
    return output.loss.item(), output


def compare_cases() -> list[str]:
    """On a rank: what is far from one process."""
    mesh, wrong = onefold.mesh(sequence=2), list[str]()
    for name, (build, batch, fields) in CASES.items():
        plain = build()
        wanted, _ = stepped(plain, batch, torch.optim.SGD(plain.parameters(), lr=0.5))
        model = onefold.hf.cut_sequences(build(), mesh)
        if "tiled" in name:
            onefold.hf.tile_loss(model, tokens=4)
        onefold.shard(model, stage=3, mesh=mesh, **fields)
        loss, output = stepped(model, batch, onefold.Optimizer(model, torch.optim.SGD, lr=0.5))
        if loss != pytest.approx(wanted, rel=1e-5):
            wrong.append(f"{name}: loss {loss}, not {wanted}")
        if "tiled" not in name and output.logits.shape[1] != -(-batch["input_ids"].shape[1] // 2):
            wrong.append(f"{name}: logits {tuple(output.logits.shape)}")
        state = onefold.full_state_dict(model)
        for key, value in plain.state_dict().items() if state else ():
            if not torch.allclose(state[key], value, rtol=1e-4, atol=1e-5):
                wrong.append(f"{name}: {key}")
        model.eval()
        with torch.no_grad():
            evaluated = model(**batch).loss.item()
            if evaluated != pytest.approx(plain.eval()(**batch, use_cache=False).loss.item(), rel=1e-4):
                wrong.append(f"{name}: evaluated as {evaluated}")
        with torch.inference_mode():
            if model(**batch).loss.item() != evaluated:
                wrong.append(f"{name}: not as evaluated with no_grad()")
    return wrong + refused(mesh)


def refused(mesh: Any) -> list[str]:
    """What is not refused as it should be."""
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2))
    dropping, uncut = llama(attention_dropout=0.1), onefold.shard(llama(), mesh=mesh)
    onefold.hf.cut_sequences(dropping, mesh)
    cut = onefold.hf.cut_sequences(llama(), mesh)
    cached = transformers.DynamicCache(config=cut.config)
    tiny = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    bert, roberta = transformers.BertConfig(**tiny), transformers.RobertaConfig(**tiny, is_decoder=True)
    routed = {**tiny, "num_key_value_heads": 2, "num_local_experts": 2, "output_router_logits": True}
    mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**routed))
    classes = transformers.LlamaForTokenClassification(llama().config)
    tries = {
        "BertForMaskedLM has another loss": lambda: onefold.hf.cut_sequences(transformers.BertForMaskedLM(bert), mesh),
        "LlamaForTokenClassification has another loss": lambda: onefold.hf.cut_sequences(classes, mesh),
        "position_embeddings of RobertaForCausalLM": lambda: onefold.hf.cut_sequences(
            transformers.RobertaForCausalLM(roberta), mesh
        ),
        "MixtralForCausalLM adds a loss of its router": lambda: onefold.hf.cut_sequences(mixtral, mesh),
        r"the model \(BloomForCausalLM\) cannot be replaced: transformer.h.0.self_attention": lambda: (
            onefold.hf.cut_sequences(bloom, mesh)
        ),
        "LlamaAttention of layer 0 drops attention weights out": lambda: dropping(**tokens(8)),
        r"model.layers.0.self_attn \(LlamaAttention\) calls torch's scaled_dot": lambda: uncut(**tokens(8)),
        "keeps no cache of keys": lambda: cut(**tokens(8), past_key_values=cached),
        "LlamaForCausalLM was given to it before": lambda: onefold.hf.cut_sequences(cut, mesh),
        "Linear is none": lambda: onefold.hf.cut_sequences(torch.nn.Linear(2, 2), mesh),
    }
    wrong = []
    for message, call in tries.items():
        try:
            call()
            wrong.append(f"not refused: {message}")
        except onefold.OnefoldError as error:
            if not pytest.raises(type(error), match=message).matches(error):
                wrong.append(f"{message}: {error}")
    return wrong


def test_models_train_and_evaluate_on_cut_sequences_as_on_whole_ones_and_others_are_refused_by_name() -> None:
    assert [row for rank in run_ranks(2, compare_cases) for row in rank] == []
