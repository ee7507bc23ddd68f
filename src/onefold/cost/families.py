"""Well-known language models by name, and Hugging Face configurations by their fields. Neither needs transformers."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

from onefold.cost.decoders import Decoder
from onefold.cost.shapes import SHAPES, Shape, named
from onefold.errors import ConfigError
from onefold.settings.limited import read_json

SEQ = 4096  # tokens of a sequence unless --seq is given: models are trained with less than they can read
COMMIT = 64  # characters of a commit's name, at most


Sizes: TypeAlias = "tuple[int, int, int, int, int]"  # layers, hidden, heads, heads of keys and values, intermediate


def _llama(sizes: Sizes, vocab: int, **more: Any) -> Decoder:
    layers, hidden, heads, kv_heads, intermediate = sizes
    return Decoder(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, intermediate=intermediate, vocab=vocab, seq=SEQ,
        **more,
    )  # fmt: skip


def _qwen2(sizes: Sizes, *, tied: bool = False) -> Decoder:
    return _llama(sizes, 151936 if tied else 152064, qkv_bias=True, tied=tied)


def _qwen3(sizes: Sizes, **more: Any) -> Decoder:
    return _llama(sizes, 151936, head_dim=128, qk_norm=True, **more)


def _gemma(sizes: Sizes, *, head_dim: int = 256, norms: int = 2) -> Decoder:
    return _llama(sizes, 256000, head_dim=head_dim, norms=norms, tied=True)


FAMILIES: dict[str, Decoder] = {
    "llama-2-7b": _llama((32, 4096, 32, 32, 11008), 32000),
    "llama-2-13b": _llama((40, 5120, 40, 40, 13824), 32000),
    "llama-2-70b": _llama((80, 8192, 64, 8, 28672), 32000),
    "llama-3-8b": _llama((32, 4096, 32, 8, 14336), 128256),
    "llama-3-70b": _llama((80, 8192, 64, 8, 28672), 128256),
    "llama-3.1-405b": _llama((126, 16384, 128, 8, 53248), 128256),
    "llama-3.2-1b": _llama((16, 2048, 32, 8, 8192), 128256, tied=True),
    "llama-3.2-3b": _llama((28, 3072, 24, 8, 8192), 128256, tied=True),
    "qwen2.5-0.5b": _qwen2((24, 896, 14, 2, 4864), tied=True),
    "qwen2.5-1.5b": _qwen2((28, 1536, 12, 2, 8960), tied=True),
    "qwen2.5-3b": _qwen2((36, 2048, 16, 2, 11008), tied=True),
    "qwen2.5-7b": _qwen2((28, 3584, 28, 4, 18944)),
    "qwen2.5-14b": _qwen2((48, 5120, 40, 8, 13824)),
    "qwen2.5-32b": _qwen2((64, 5120, 40, 8, 27648)),
    "qwen2.5-72b": _qwen2((80, 8192, 64, 8, 29568)),
    "qwen3-0.6b": _qwen3((28, 1024, 16, 8, 3072), tied=True),
    "qwen3-1.7b": _qwen3((28, 2048, 16, 8, 6144), tied=True),
    "qwen3-4b": _qwen3((36, 2560, 32, 8, 9728), tied=True),
    "qwen3-8b": _qwen3((36, 4096, 32, 8, 12288)),
    "qwen3-14b": _qwen3((40, 5120, 40, 8, 17408)),
    "qwen3-32b": _qwen3((64, 5120, 64, 8, 25600)),
    "qwen3-30b-a3b": _qwen3((48, 2048, 32, 4, 768), experts=128, active=8),
    "qwen3-235b-a22b": _qwen3((94, 4096, 64, 4, 1536), experts=128, active=8),
    "mistral-7b": _llama((32, 4096, 32, 8, 14336), 32000),
    "mixtral-8x7b": _llama((32, 4096, 32, 8, 14336), 32000, experts=8, active=2),
    "mixtral-8x22b": _llama((56, 6144, 48, 8, 16384), 32768, experts=8, active=2),
    "gemma-2b": _gemma((18, 2048, 8, 1, 16384)),
    "gemma-7b": _gemma((28, 3072, 16, 16, 24576)),
    "gemma-2-2b": _gemma((26, 2304, 8, 4, 9216), norms=4),
    "gemma-2-9b": _gemma((42, 3584, 16, 8, 14336), norms=4),
    "gemma-2-27b": _gemma((46, 4608, 32, 16, 36864), head_dim=128, norms=4),
    "deepseek-moe-16b": _llama(
        (28, 2048, 16, 16, 1408), 102400, experts=64, active=6, shared_intermediate=2816, dense_layers=1,
        dense_intermediate=10944,
    ),
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {  # model_type -> what its configuration does not say
    "llama": {}, "mistral": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}, "mixtral": {},
    "qwen3_moe": {"qk_norm": True}, "gemma": {"tied": True}, "gemma2": {"tied": True, "norms": 4}, "deepseek": {},
}  # fmt: skip


def model_shape(name: str) -> Shape:
    """A shape by the name of a GPT or of a well-known model, or by the path of a config.json or its folder.

    >>> round(model_shape("Llama-3-8B").numel / 1e9, 2)
    8.03
    """
    path = Path(name)
    if path.suffix == ".json" or "/" in name or path.is_dir():
        return from_config(path)
    found = FAMILIES.get(name.lower())
    if found is not None:
        return found
    try:
        return named(name)
    except ConfigError:
        known = [*SHAPES, *FAMILIES]
        near = get_close_matches(name.lower(), known, n=1, cutoff=0.7)
        meant = f"did you mean {near[0]}? Or " if near else ""
        raise ConfigError(
            f"model {name!r} is unknown; {meant}use a config.json, its folder, or one of {', '.join(known)}"
        ) from None


def config_file(path: Path) -> Path:
    """The config.json that a path means: itself, the one in a folder, or in a model's folder in the cache of the
    Hugging Face hub (models--ORG--NAME) the one that was downloaded last."""
    if not path.is_dir():
        return path
    last = path / "refs" / "main"
    if not (path / "config.json").is_file() and last.is_file():
        with last.open(encoding="utf-8", errors="replace") as file:
            return path / "snapshots" / file.read(COMMIT).strip() / "config.json"
    return path / "config.json"


def from_config(path: Path) -> Shape:
    """The shape that a Hugging Face config.json, or the one in a folder, describes."""
    file = config_file(path)
    if not file.is_file():
        raise ConfigError(f"{file} is not there; give a config.json, the folder that holds it, or the name of a model")
    fields = read_json(file)
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"{file} names no model_type; is it a Hugging Face config.json?")
    try:
        if kind == "gpt2":
            return Shape(
                layers=fields["n_layer"], hidden=fields["n_embd"], heads=fields["n_head"],
                seq=fields.get("n_positions", 1024), vocab=fields["vocab_size"],
            )  # fmt: skip
        if kind not in CONFIGS:
            raise ConfigError(
                f"{file}: model_type {kind!r} has no formula here ({', '.join(['gpt2', *CONFIGS])} have); give "
                f"--config {path}, which rehearses it with transformers"
            )
        return _decoder(kind, fields)
    except KeyError as error:
        raise ConfigError(f"{file} has no {error.args[0]!r}, which model_type {kind!r} needs") from None
    except (ConfigError, TypeError) as error:
        raise ConfigError(str(error) if str(file) in str(error) else f"{file}: {error}") from None


def _decoder(kind: str, fields: dict[str, Any]) -> Decoder:
    more: dict[str, Any] = {"tied": bool(fields.get("tie_word_embeddings")), **CONFIGS[kind]}
    if fields.get("attention_bias"):
        if kind != "qwen3":
            raise ConfigError("attention_bias is not known to the formula; give --config, which rehearses the model")
        more["qkv_bias"] = True
    width = fields["intermediate_size"]
    if experts := fields.get("num_local_experts", fields.get("num_experts", fields.get("n_routed_experts"))):
        more |= {"experts": experts, "active": fields["num_experts_per_tok"]}
        if kind == "deepseek":
            more["shared_intermediate"] = fields.get("n_shared_experts", 0) * fields["moe_intermediate_size"]
            more |= {"dense_layers": fields.get("first_k_dense_replace", 0), "dense_intermediate": width}
        width = fields.get("moe_intermediate_size", width)
    return Decoder(
        layers=fields["num_hidden_layers"], hidden=fields["hidden_size"], heads=fields["num_attention_heads"],
        kv_heads=fields.get("num_key_value_heads") or fields["num_attention_heads"],
        head_dim=fields.get("head_dim") or 0, intermediate=width, vocab=fields["vocab_size"],
        seq=min(SEQ, fields.get("max_position_embeddings", SEQ)), **more,
    )  # fmt: skip
