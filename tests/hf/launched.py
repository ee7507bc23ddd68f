"""Scripts started as users start them: by torchrun or accelerate launch, alone or under `-m onefold.hf`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.harness.python import run_python

SCRIPTS = Path(__file__).parent / "scripts"
VOCABULARY = 64
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
ACCELERATE = (
    "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no",
)  # fmt: skip
FLAGS = (
    "--use_cpu", "true", "--max_steps", "3", "--logging_steps", "1", "--learning_rate", "1e-2", "--report_to", "none",
    "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2", "--save_strategy", "no",
    "--disable_tqdm", "true",
)  # fmt: skip


def save_models(folder: Path) -> None:
    """Tiny pretrained models and a tokenizer, as from_pretrained reads them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, **special,
        )
    ).save_pretrained(folder / "causal")  # fmt: skip
    T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
        )
    ).save_pretrained(folder / "seq2seq")  # fmt: skip
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder / "causal")


def start(words: Sequence[str], *, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs `python WORDS` to its end."""
    given = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1", **env}
    return run_python(*words, cwd=cwd, env=given)


def results(launcher: Sequence[str], models: Path, out: Path, cwd: Path) -> list[dict[str, Any]]:
    """What each of two ranks of scripts/main.py found, under a launcher and its options."""
    script = [*FLAGS, "--models", str(models), "--results", str(out), "--output_dir", str(out.parent / "trainer")]
    done = start([*launcher, *script], cwd=cwd)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in (0, 1)]
