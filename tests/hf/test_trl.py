"""TRL's trainers through sharded(), on two ranks: SFT, DPO with a reference model, GRPO with one that follows."""

from __future__ import annotations

from typing import Any

import pytest

import onefold
import onefold.hf
from tests.harness import run_ranks
from tests.hf.runs import STAGES, VOCABULARY, Run, same, tiny, trained

pytest.importorskip("trl")


def tokenizer() -> Any:
    """Words w0 to w60, and special tokens."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {name: number for number, name in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}
    words |= {f"w{number}": 4 + number for number in range(VOCABULARY - 4)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def words(start: int, count: int) -> str:
    return " ".join(f"w{(start * 7 + number * 3) % 60}" for number in range(count))


def settings(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": 2, "max_steps": 3, "learning_rate": 1e-2, "seed": 1,
        "logging_steps": 1, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "use_cpu": True,
        "bf16": False, "max_length": 16,
    }  # fmt: skip


def of(cls: Any, stage: int | None) -> tuple[Any, dict[str, Any]]:
    return (cls, {}) if stage is None else (onefold.hf.sharded(cls), {"zero": onefold.Zero(stage=stage)})


def sft(stage: int | None, folder: str) -> Run:
    import datasets
    import trl

    cls, zero = of(trl.SFTTrainer, stage)
    data = datasets.Dataset.from_dict({"text": [words(number, 8 + number % 5) for number in range(32)]})
    args = trl.SFTConfig(**settings(folder))
    return trained(cls(model=tiny(), args=args, train_dataset=data, processing_class=tokenizer(), **zero))


def dpo(stage: int | None, folder: str) -> Run:
    import datasets
    import trl

    cls, zero = of(trl.DPOTrainer, stage)
    data = datasets.Dataset.from_dict(
        {
            "prompt": [words(number, 4) for number in range(32)],
            "chosen": [" " + words(number + 1, 5) for number in range(32)],
            "rejected": [" " + words(number + 2, 3 + number % 4) for number in range(32)],
        }
    )
    args = trl.DPOConfig(**settings(folder))
    one = cls(model=tiny(), ref_model=tiny(), args=args, train_dataset=data, processing_class=tokenizer(), **zero)
    return trained(one)


def lengths(completions: list[str], **_: Any) -> list[float]:
    """A reward that samples differ in."""
    return [float(len(one) % 17) for one in completions]


def grpo(stage: int | None, folder: str) -> Run:
    import datasets
    import trl

    cls, zero = of(trl.GRPOTrainer, stage)
    data = datasets.Dataset.from_dict({"prompt": [words(number, 4) for number in range(32)]})
    own = {name: value for name, value in settings(folder).items() if name != "max_length"}
    args = trl.GRPOConfig(
        **own, num_generations=2, max_completion_length=6, beta=0.1, sync_ref_model=True, ref_model_sync_steps=1,
        ref_model_mixup_alpha=0.5,
    )  # fmt: skip
    source = f"{folder}/model"  # GRPO reads its reference model where its model was read
    one = cls(model=source, reward_funcs=lengths, args=args, train_dataset=data, processing_class=tokenizer(), **zero)
    return trained(one)


def of_stages(function: Any, folder: str) -> list[Run]:
    return [function(stage, folder) for stage in (None, *STAGES)]


@pytest.mark.parametrize("function", [sft, dpo, grpo])
def test_stages_equal_each_other_bitwise_and_ddp_to_1e6(function, tmp_path):
    if function is grpo:
        tiny().save_pretrained(tmp_path / "model")
    plain, *others = run_ranks(2, of_stages, function, str(tmp_path))[0]
    assert len(plain.losses) == 3
    assert same(others)
    assert others[0].losses == pytest.approx(plain.losses, abs=1e-6)
    assert others[0].norms == pytest.approx(plain.norms, abs=1e-4)
