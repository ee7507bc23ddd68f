"""The weights that a run begins with: what a Hugging Face folder holds, and which model can hold it.

GPT-2 as it was published is the built-in GPT with other names (`gpt2`), so it needs no other package, and runs with
every mesh. All other families are trained as transformers' own classes.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

from onefold.cost.families import CONFIGS, from_config
from onefold.cost.shapes import Shape
from onefold.errors import ConfigError, OnefoldError
from onefold.settings.limited import JSON_BYTES_LIMIT, read_bytes, read_json
from onefold.train.run.folder import writing

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
BYTES_KEY = "onefold_tokenizer"  # in a config.json that `onefold export` wrote: the model reads bytes
GPT2 = "gpt2"
CODE_BESIDE = "deepseek"  # planned by its formula; its class is code in its folder, and transformers has none
TRAINED = [GPT2, *(kind for kind in CONFIGS if kind != CODE_BESIDE)]
BUILT_IN: dict[str, tuple[Any, ...]] = {  # what the built-in GPT computes; the first is what a missing field means
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
BESIDE = (  # small files that say how to use weights, and go wherever the weights go
    CONFIG, "generation_config.json", TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
    "merges.txt", "tokenizer.model", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


class Pretrained(NamedTuple):
    """A folder of weights."""

    folder: Path
    kind: str  # its model_type
    shape: Shape  # with the longest sequences that it reads, or that fit into most devices
    longest: int  # tokens in a sequence
    built_in: bool  # whether the built-in GPT computes the same
    tokenizer: str | None  # a tokenizers file, or "bytes"; None if the folder has none

    def shape_of(self, seq: int | None) -> Shape:
        """The shape for sequences of `seq` tokens, by default of as many as the folder's shape has."""
        length = seq or self.shape.seq
        if length > self.longest:
            raise ConfigError(f"--seq {length} is too long: the model in {self.folder} reads {self.longest} tokens")
        return dataclasses.replace(self.shape, seq=length, positions=self.longest if self.kind == GPT2 else None)


def open_pretrained(folder: Path) -> Pretrained:
    """What the folder of --weights holds; raises in one line if it cannot be trained. Reads its config.json alone."""
    file = folder / CONFIG
    try:
        if not folder.is_dir():
            raise ConfigError(f"--weights {folder} is no folder; give one with {CONFIG} and .safetensors files")
        if not file.is_file():
            raise ConfigError(f"--weights {folder} has no {CONFIG}; {_hint(folder)}")
        fields = read_json(file)
    except OSError as error:
        raise ConfigError(f"--weights {folder} cannot be read: {error.strerror}") from error
    except OnefoldError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"--weights: {error}") from error
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"--weights: {file} names no model_type; is it a Hugging Face folder?")
    if kind not in TRAINED:
        why = "whose class is code in its folder, which is not run" if kind == CODE_BESIDE else "which is unknown here"
        raise ConfigError(
            f"--weights {folder} is a {kind!r}, {why}; onefold train knows {', '.join(TRAINED)}; train others by a "
            f"script with onefold.hf.Trainer"
        )
    if "quantization_config" in fields:
        raise ConfigError(f"--weights {folder} is quantized; give the folder of the model before it was")
    _check_files(folder)
    shape = from_config(folder)
    longest = shape.seq if kind == GPT2 else fields.get("max_position_embeddings", shape.seq)
    given = str(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else None
    return Pretrained(folder, kind, shape, longest, _is_built_in(kind, fields), given or fields.get(BYTES_KEY))


def fine_tuned(folder: Path) -> dict[str, dict[str, Any]]:
    """The settings that are other than usual where a run begins with the weights of a folder, unless they are given."""
    return {
        "adam": {"lr": 1e-4, "min_lr": 1e-5},
        "data": {"tokenizer": open_pretrained(folder).tokenizer or str(folder / TOKENIZER)},
    }


def keep_beside(folder: Path, kept: Path) -> None:
    """Copies what stands beside the weights into the run, so that an export has it when the folder is gone."""
    with writing(kept):
        kept.mkdir(exist_ok=True)
        for name, content in beside(folder).items():
            draft = kept / f".{name}.writing"
            draft.write_bytes(content)
            os.replace(draft, kept / name)


def beside(folder: Path) -> dict[str, bytes]:
    """The small files beside weights that are there, by name."""
    there = [name for name in BESIDE if (folder / name).is_file()]
    return {name: read_bytes(folder / name, JSON_BYTES_LIMIT) for name in there}


def _check_files(folder: Path) -> None:
    names = [path.name for path in folder.iterdir()]
    if any(name.endswith(".safetensors") for name in names):
        return
    if pickled := [name for name in sorted(names) if name.endswith((".bin", ".pt", ".pth"))]:
        raise ConfigError(
            f"--weights {folder} has {pickled[0]} and no .safetensors file, and reading pickle may run code; write it "
            f"anew with transformers: AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
        )
    raise ConfigError(f"--weights {folder} has no .safetensors file; is the download complete?")


def _hint(folder: Path) -> str:
    if (folder / "facts.json").is_file():
        return f"it is a run: onefold export {folder} weights writes a folder for --weights"
    return "give a Hugging Face folder, or what onefold export made of a run"


def _is_built_in(kind: str, fields: dict[str, Any]) -> bool:
    plain = all(fields.get(name, known[0]) in known for name, known in BUILT_IN.items())
    return kind == GPT2 and plain and fields.get("n_inner") in (None, 4 * fields["n_embd"])
