"""onefold.hf.tile_loss: causal models train as before, without logits; evaluation that asks for logits gets them."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import onefold
import onefold.hf
from tests.harness import run_ranks
from tests.hf.runs import STAGES, VOCABULARY, Run, arguments, same, tiny, trained, trainer

pytest.importorskip("accelerate")
pytest.importorskip("peft")

EACH = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}
FLAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of TrainingArguments, of the model
    "tied": ({}, {}),
    "untied, accumulated, checkpointed": (
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, **EACH}, {"tie_word_embeddings": False},
    ),
    "bf16": ({"bf16": True}, {}),
    "fp16": ({"fp16": True}, {"tie_word_embeddings": False}),
}  # fmt: skip


def model(kind: str = "", **settings: Any) -> Any:
    """A tiny Llama; with `kind`, one with LoRA adapters whose head is frozen, or trained beside them."""
    made = tiny(**settings)
    if not kind:
        return made
    from peft import LoraConfig, get_peft_model

    saved = {"modules_to_save": ["lm_head"]} if kind == "head saved" else {}
    torch.manual_seed(1)
    return get_peft_model(
        made, LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **saved)
    )


def run(stage: int, folder: str, tokens: int | None, flags: dict[str, Any], build: Any) -> Run:
    return trained(trainer(stage, folder, {"max_steps": 2, **flags}, model=build(), tile_loss=tokens))


def compared(folder: str) -> list[str]:
    """On a rank: which stages differ, and what is far from the run with logits."""
    builds = {name: (flags, partial(model, **settings)) for name, (flags, settings) in FLAGS.items()}
    builds |= {kind: ({}, partial(model, kind, tie_word_embeddings=False)) for kind in ("head frozen", "head saved")}
    found = []
    for name, (flags, build) in builds.items():
        stages = STAGES if name == "tied" else (0, 3)
        plain, tiles = run(2, folder, None, flags, build), [run(stage, folder, 7, flags, build) for stage in stages]
        close = 2e-2 if name in ("bf16", "fp16") else 2e-6
        found += [] if same(tiles) else [f"{name}: stages differ"]
        for what in ("losses", "norms"):
            one, other = getattr(tiles[-1], what), getattr(plain, what)
            found += [] if one == pytest.approx(other, abs=close, rel=close) else [f"{name}: {what} {one}, not {other}"]
    return found


def test_stages_train_to_the_same_bits_and_as_with_logits(tmp_path: Any) -> None:
    assert run_ranks(2, compared, str(tmp_path)) == [[], []]


WIDE = 96  # a vocabulary as wide as nothing else in the model


class Logits(TorchDispatchMode):
    """Notes the most elements of a tensor that is as wide as the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dim() > 1 and result.shape[-1] == WIDE:
            self.numel = max(self.numel, result.numel())
        return result


def evaluated(folder: str) -> None:
    """On a rank: where logits are made, and what evaluation finds."""
    flags = {"max_steps": 1, "per_device_eval_batch_size": 5}
    build = partial(model, vocab_size=WIDE, tie_word_embeddings=False)
    tiles, usual = trainer(3, folder, flags, model=build(), tile_loss=4), trainer(3, folder, flags, model=build())
    for turn in (tiles.train, tiles.evaluate):
        with Logits() as made:
            turn()
        assert 0 < made.numel <= 32 * WIDE, "a tile, or the transposed head; of all tokens: 32 and 80"
    usual.train()
    assert tiles.evaluate()["eval_loss"] == pytest.approx(usual.evaluate()["eval_loss"], abs=1e-6)
    predicted = [torch.tensor(one.predict(one.eval_dataset).predictions) for one in (tiles, usual)]
    assert predicted[0].shape == (10, 16, WIDE)
    torch.testing.assert_close(predicted[0], predicted[1])


def test_logits_exist_in_evaluation_that_uses_them_and_nowhere_else(tmp_path: Any) -> None:
    run_ranks(1, evaluated, str(tmp_path))


def gemma() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attn_implementation": "eager", "pad_token_id": 0}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **heads, final_logit_softcapping=1.0))


def cohere() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "logit_scale": 0.25}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.CohereForCausalLM(transformers.CohereConfig(**sizes, **ids))


def called() -> None:
    """On a rank: models that cap or scale their logits, and every way of calling them."""
    for build in (gemma, cohere, partial(model, "head saved", tie_word_embeddings=False)):
        plain, tiles = build().train(), onefold.hf.tile_loss(onefold.hf.tile_loss(build(), tokens=3), tokens=5).train()
        tiles = copy.deepcopy(tiles)
        assert inspect.signature(tiles.forward) == inspect.signature(plain.forward)
        tokens = torch.arange(18).view(2, 9) * 7 % 64
        labels = torch.where(tokens % 5 == 0, -100, tokens)
        shifted = torch.roll(labels, -1, 1)
        for way in ({}, {"num_items_in_batch": torch.tensor(7)}, {"return_dict": False}, {"shift_labels": shifted}):
            losses = [one(input_ids=tokens, labels=labels, **way)[0] for one in (plain, tiles)]
            torch.testing.assert_close(losses[1], losses[0], rtol=2e-6, atol=2e-6)
            for loss in losses:
                loss.backward()
            for one, other in zip(tiles.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)
        assert tiles(input_ids=tokens).logits is not None
        assert tiles(input_ids=tokens, labels=labels).logits is None
        assert tiles.eval()(input_ids=tokens, labels=labels).logits is not None


def test_capped_and_scaled_logits_and_all_ways_of_calling_give_the_loss_with_logits() -> None:
    run_ranks(1, called)


def compiled() -> None:
    """On a rank: torch.compile makes one graph of the model, and the loss runs behind it."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain, tiles = tiny(), onefold.hf.tile_loss(tiny(), tokens=5)
    tokens = torch.arange(18).view(2, 9)
    output = torch.compile(tiles, backend="eager")(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(output.loss, plain(input_ids=tokens, labels=tokens).loss)
    assert output.logits is None
    assert counters["stats"]["unique_graphs"] == 1


def test_a_model_with_a_tiled_loss_is_compiled() -> None:
    run_ranks(1, compiled)


def with_lora_on_the_head() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny(tie_word_embeddings=False), LoraConfig(target_modules=["lm_head"]))


def with_another_loss() -> Any:
    made = tiny()
    made.loss_function = lambda logits, labels, vocab_size: logits.sum()
    return onefold.hf.tile_loss(made)


def refused(folder: str) -> None:
    """On a rank."""
    import transformers

    encoder = transformers.BertConfig(num_hidden_layers=1, hidden_size=24, vocab_size=9)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: onefold.hf.tile_loss(tiny(), tokens=0), onefold.ConfigError, "a tile has at least one token"),
        (lambda: trainer(0, folder, tile_loss=-1), onefold.ConfigError, "a tile has at least one token"),
        (lambda: onefold.hf.tile_loss(nn.Linear(2, 2)), onefold.ModelError, "and Linear is none"),
        (lambda: onefold.hf.tile_loss(transformers.BertModel(encoder)), onefold.ModelError, "is an nn.Linear, but"),
        (
            lambda: onefold.hf.tile_loss(with_lora_on_the_head()),
            onefold.ModelError,
            "is an nn.Linear, but that of LlamaForCausalLM",
        ),
        (with_another_loss, onefold.ModelError, "is <lambda>; leave tile_loss out"),
        (
            lambda: trainer(0, folder, {"label_smoothing_factor": 0.1}, tile_loss=8),
            onefold.ConfigError,
            "label_smoothing",
        ),
        (lambda: trainer(0, folder, tile_loss=8, compute_loss_func=print), onefold.ConfigError, "compute_loss_func"),
    ]
    for call, error, said in cases:
        with pytest.raises(error, match=said):
            call()
    # what is known only when the model runs
    tokens = torch.ones(1, 4, dtype=torch.long)
    uses = {
        r"logits\[…\]": lambda logits: logits[:, -1],
        "torch's relu": torch.relu,
        ".view": lambda logits: logits.view(4),
    }
    for said, use in uses.items():
        made = onefold.hf.tile_loss(tiny())
        made.lm_head.register_forward_hook(lambda _, args, output, use=use: use(output))
        with pytest.raises(onefold.ModelError, match=said):
            made(input_ids=tokens, labels=tokens)
    made = onefold.hf.tile_loss(tiny())
    made.lm_head.register_forward_hook(lambda *_: torch.ones(1, 4, VOCABULARY))
    with pytest.raises(onefold.ModelError, match="the loss of LlamaForCausalLM is not tiled"):
        made(input_ids=tokens, labels=tokens)


def test_what_cannot_be_tiled_is_refused_by_name(tmp_path: Any) -> None:
    run_ranks(1, refused, str(tmp_path))


def asked(folder: str) -> None:
    """On a rank."""
    import transformers

    from onefold.hf.launch_settings import parse

    script = Path(folder) / "script.py"
    script.touch()
    assert parse(["--tile-loss", "512", str(script)]).tile_loss == 512
    assert parse([str(script)]).tile_loss is None
    with pytest.raises(onefold.ConfigError, match="at least one token"):
        parse(["--tile-loss", "0", str(script)])
    cls = onefold.hf.sharded(transformers.Trainer, tile_loss=True)
    one = cls(model_init=lambda: tiny(), args=arguments(folder))
    tokens = torch.ones(1, 4, dtype=torch.long)
    assert one.model(input_ids=tokens, labels=tokens).logits is None
    assert onefold.hf.sharded(onefold.hf.sharded(cls, onefold.Zero(stage=1))).default_tile_loss is True


def test_the_command_line_and_trainer_classes_take_tiles(tmp_path: Any) -> None:
    run_ranks(1, asked, str(tmp_path))
