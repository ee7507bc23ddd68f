"""Families of language models beside GPT-2 by their shape: rotary positions, RMS norms, gated MLPs, experts.

Llama, Qwen, Mistral, Mixtral, Gemma and DeepSeek-MoE are one class with different fields. Parameters are counted as
transformers has them, to the last one. Activations are those of kernels that keep each tensor once, in 16 bits: a norm
in fp32, as transformers writes it out, keeps more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onefold.cost.shapes import MOST, Part, Shape
from onefold.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Decoder(Shape):
    """The shape of a decoder with rotary positions.

    >>> Decoder(layers=32, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocab=128256).numel
    8030261248
    """

    kv_heads: int
    head_dim: int = 0  # 0: hidden / heads
    intermediate: int  # of the MLP, or of each expert
    tied: bool = False  # whether the output layer is the token embedding
    qkv_bias: bool = False
    qk_norm: bool = False
    norms: int = 2  # of a block
    experts: int = 0
    active: int = 0  # experts that each token uses
    shared_intermediate: int = 0  # of the MLP that every token uses beside its experts
    dense_layers: int = 0  # the first blocks, which have an MLP of `dense_intermediate` instead of experts
    dense_intermediate: int = 0

    def __post_init__(self) -> None:
        if not self.head_dim and type(self.hidden) is int and type(self.heads) is int and self.heads > 0:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)
        super().__post_init__()
        for name in ("kv_heads", "head_dim", "intermediate"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MOST:
                raise ConfigError(f"{name}={value!r} is not a positive whole number up to {MOST:,}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads={self.kv_heads} does not divide heads={self.heads}; choose a divisor of it")

    def _check_heads(self) -> None:
        """Heads have a size of their own."""

    @property
    def attention_numel(self) -> int:
        return self.heads * self.head_dim

    @property
    def head_numel(self) -> int:
        return self.head_dim

    @property
    def key_numel(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def block_numel(self) -> tuple[int, int]:
        queries = self.attention_numel + 2 * self.kv_heads * self.head_dim
        return 4 * self.hidden, queries + self.attention_numel + self.mlp_numel

    @property
    def mlp_numel(self) -> int:
        return 4 * self._active_width + self.active * self.hidden

    @property
    def widest_numel(self) -> int:
        return max(self._active_width, self.attention_numel)

    @property
    def matmul_numel(self) -> int:
        dense = min(self.dense_layers, self.layers)
        mixed = self._attention() + 3 * self.hidden * self._active_width + self.hidden * self.experts
        plain = self._attention() + 3 * self.hidden * self.dense_intermediate
        return dense * plain + (self.layers - dense) * mixed + self.vocab * self.hidden

    @property
    def _active_width(self) -> int:
        """The width of the MLPs that one token passes through in a block."""
        return self.intermediate * (self.active if self.experts else 1) + self.shared_intermediate

    def _attention(self, tp: int = 1) -> int:
        return sum(numel for name, numel in self._of_attention(tp) if name.endswith("proj.weight"))

    def _of_attention(self, tp: int) -> Iterator[tuple[str, int]]:
        queries, keys = self.attention_numel // tp, -(-self.kv_heads // tp) * self.head_dim
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            yield f"self_attn.{name}_proj.weight", width * self.hidden
            if self.qkv_bias:
                yield f"self_attn.{name}_proj.bias", width
        yield "self_attn.o_proj.weight", self.hidden * queries
        if self.qk_norm:
            yield from (("self_attn.q_norm.weight", self.head_dim), ("self_attn.k_norm.weight", self.head_dim))

    def _of_mlp(self, tp: int, *, dense: bool) -> Iterator[tuple[str, int]]:
        if self.experts and not dense:
            yield "mlp.gate.weight", self.experts * self.hidden
            yield "mlp.experts.gate_up_proj", self.experts * 2 * self.intermediate * self.hidden // tp
            yield "mlp.experts.down_proj", self.experts * self.intermediate * self.hidden // tp
        width = self.dense_intermediate if dense else self.shared_intermediate if self.experts else self.intermediate
        at = "mlp.shared_experts" if self.experts and not dense else "mlp"
        for name in ("gate", "up", "down") if width else ():
            yield f"{at}.{name}_proj.weight", width * self.hidden // tp

    def products(self, tp: int = 1) -> list[tuple[int, int, float]]:
        """As of a GPT. A token passes `active` of the experts, each of which has its share of the tokens."""
        h, dense = self.hidden, min(self.dense_layers, self.layers)
        queries, keys = self.attention_numel // tp, -(-self.kv_heads // tp) * self.head_dim
        found: list[tuple[int, int, float]] = [
            (h, queries, self.layers), (h, keys, 2 * self.layers), (queries, h, self.layers), *self.mlp_products(tp),
        ]  # fmt: skip
        return found + ([(h, self.experts, self.layers - dense)] if self.experts else [])

    def mlp_products(self, tp: int = 1) -> list[tuple[int, int, float]]:
        h, dense, found = self.hidden, min(self.dense_layers, self.layers), list[tuple[int, int, float]]()
        mlps = [(self.dense_intermediate, dense), (self.intermediate * (not self.experts), self.layers - dense)]
        mlps += [
            (self.shared_intermediate, self.layers - dense),
            (self.intermediate, self.active * (self.layers - dense)),
        ]
        for width, times in mlps:
            if width and times:
                found += [(h, width // tp, 2 * times), (width // tp, h, times)]
        return found

    def parts(self, tp: int = 1, pp: int = 1) -> Iterator[Part]:
        self.check(tp, pp)
        table = -(-self.vocab // tp) * self.hidden
        yield Part("embed_tokens.weight", table)
        for layer in range(-(-self.layers // pp)):
            at = f"layers.{layer}"
            for name, numel in (*self._of_attention(tp), *self._of_mlp(tp, dense=layer < self.dense_layers)):
                yield Part(f"{at}.{name}", numel, at)
            for number in range(self.norms):
                yield Part(f"{at}.norm{number + 1}.weight", self.hidden, at)
        yield Part("norm.weight", self.hidden)
        if not self.tied:
            yield Part("lm_head.weight", table)

    def check(self, tp: int, pp: int) -> None:
        super().check(tp, pp)
        for name, size in (("intermediate", self.intermediate), ("kv_heads", max(self.kv_heads, tp))):
            if size % tp:
                raise ConfigError(f"{name}={size} cannot be cut over tp={tp} ranks; use a tp that divides it")
