"""The built-in GPT under Hugging Face's names for GPT-2: the same numbers, in another order.

transformers keeps the matrices of linear layers transposed, and queries, keys and values one after the other, where the
built-in GPT has them head by head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.weights import Weights, open_weights
from onefold.cost.layout import Span
from onefold.cost.shapes import Shape
from onefold.errors import ConfigError

PREFIX = "transformer."
BLOCK = {  # ours -> theirs
    "norm1": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj", "norm2": "ln_2",
    "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip


class Named(NamedTuple):
    """One parameter of the built-in GPT as Hugging Face has it."""

    name: str
    heads: int  # of queries, keys and values that lie together; 0 if they do not
    transposed: bool

    def to_ours(self, theirs: Tensor) -> Tensor:
        turned = theirs.t() if self.transposed else theirs
        return _swapped(turned, 3, self.heads) if self.heads else turned

    def to_theirs(self, ours: Tensor) -> Tensor:
        parted = _swapped(ours, self.heads, 3) if self.heads else ours
        return (parted.t() if self.transposed else parted).contiguous()


def _swapped(rows: Tensor, outer: int, inner: int) -> Tensor:
    """Rows counted by (outer, inner, element), in the order of (inner, outer, element)."""
    return rows.unflatten(0, (outer, inner, -1)).transpose(0, 1).flatten(0, 2)


def names(shape: Shape) -> dict[str, Named]:
    """By our names.

    >>> names(Shape(layers=1, hidden=8, heads=2))["blocks.0.mlp.up.weight"].name
    'transformer.h.0.mlp.c_fc.weight'
    """
    found = {f"{one}.weight": Named(f"{PREFIX}{one}.weight", 0, False) for one in ("wte", "wpe")}
    for layer in range(shape.layers):
        for ours, theirs in BLOCK.items():
            for kind in ("weight", "bias"):
                heads = shape.heads if ours == "attention.qkv" else 0
                matrix = kind == "weight" and not ours.startswith("norm")
                found[f"blocks.{layer}.{ours}.{kind}"] = Named(f"{PREFIX}h.{layer}.{theirs}.{kind}", heads, matrix)
    return found | {f"norm.{kind}": Named(f"{PREFIX}ln_f.{kind}", 0, False) for kind in ("weight", "bias")}


def config(shape: Shape, dtype: str) -> dict[str, Any]:
    """The config.json of a model that was trained from random values."""
    return {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": shape.layers, "n_embd": shape.hidden,
        "n_head": shape.heads, "n_positions": shape.positions or shape.seq, "vocab_size": shape.vocab, "n_inner": None,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "dtype": dtype,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


class Gpt2Values(Mapping[str, Tensor]):
    """The values of a GPT-2 in safetensors files, by the names of the built-in GPT, each read when it is asked for."""

    def __init__(self, folder: Path, shape: Shape) -> None:
        found = open_weights(Storage(), folder)
        if found is None:
            raise ConfigError(f"--weights {folder} holds checkpoints; export the run first: onefold export")
        self._weights: Weights = found
        bare = f"{PREFIX}wte.weight" not in found.records  # as the model without its head is saved
        self._names = {
            ours: named._replace(name=named.name.removeprefix(PREFIX)) if bare else named
            for ours, named in names(shape).items()
        }
        missing = [named.name for named in self._names.values() if named.name not in found.records]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ConfigError(f"--weights {folder} has no tensor {missing[0]}{more}; is the download complete?")

    def __getitem__(self, name: str) -> Tensor:
        named = self._names[name]
        record = self._weights.records[named.name]
        return named.to_ours(self._read(named.name, Span(0, record.numel)).view(tuple(record.shape)))

    def read_range(self, name: str, shape: torch.Size, span: Span) -> Tensor | None:
        """These elements of a parameter; None if they lie in another order in the files."""
        named = self._names[name]
        if named.heads or named.transposed or tuple(self._weights.records[named.name].shape) != tuple(shape):
            return None
        return self._read(named.name, span)

    def _read(self, name: str, span: Span) -> Tensor:
        out = torch.empty(span.numel, dtype=self._weights.records[name].dtype())
        self._weights.read(name, span, out)
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
