"""GPT-like models by their shape: the parameters on each rank of a tensor- and pipeline-parallel grid.

The sizes are GPT-2's: a token and a position embedding, blocks of attention and MLP with biases and two norms, a last
norm, and an output layer tied to the token embedding, or one of its own. Tensor parallelism splits the large matrices
(and the vocabulary) `tp` ways and replicates norms and the biases after an all-reduce; pipeline parallelism gives each
of `pp` stages its share of the blocks, and the first one the embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from onefold.errors import ConfigError

VOCAB = 50257
MOST_LAYERS, MOST = 10_000, 10**8  # beyond any model, and still quick to count


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A GPT's shape.

    >>> Shape(layers=48, hidden=1600, heads=16).numel // 10**6
    1557
    """

    layers: int
    hidden: int
    heads: int
    seq: int = 1024
    vocab: int = VOCAB
    positions: int | None = None  # rows of the position embedding; None: as many as seq
    tied: bool = True  # whether the output layer is the token embedding

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "seq", "vocab"):
            value = getattr(self, name)
            most = MOST_LAYERS if name == "layers" else MOST
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(f"{name}={value!r} is not a positive whole number up to {most:,}")
        if self.positions is not None and (type(self.positions) is not int or not self.seq <= self.positions <= MOST):
            raise ConfigError(f"seq={self.seq} is longer than the {self.positions!r} positions that the model has")
        self._check_heads()

    def _check_heads(self) -> None:
        if self.hidden % self.heads:
            raise ConfigError(f"heads={self.heads} does not divide hidden={self.hidden}; choose a divisor of it")

    @property
    def is_tied(self) -> bool:
        """Whether the output layer is the token embedding."""
        return self.tied

    @property
    def attention_numel(self) -> int:
        """Elements of one token that attention computes with: those of all heads."""
        return self.hidden

    @property
    def head_numel(self) -> int:
        """Elements of one token in one head."""
        return self.hidden // self.heads

    @property
    def key_numel(self) -> int:
        """Elements of one token's keys, and of its values."""
        return self.hidden

    @property
    def block_numel(self) -> tuple[int, int]:
        """Elements per token that a block keeps for backward: what norms read and write, which tensor parallelism does
        not split, and the rest."""
        return 4 * self.hidden, 12 * self.hidden

    @property
    def mlp_numel(self) -> int:
        """Of what a block keeps, the elements per token that its MLP saves for backward."""
        return 8 * self.hidden

    @property
    def widest_numel(self) -> int:
        """Elements per token of the largest activation inside a block."""
        return 4 * self.hidden

    @property
    def matmul_numel(self) -> int:
        """Elements of the matrices that a token is multiplied with, of the output layer too."""
        return 12 * self.layers * self.hidden**2 + self.vocab * self.hidden

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.parts())

    def parts(self, tp: int = 1, pp: int = 1) -> Iterator[Part]:
        """The parameters on one rank of the fullest pipeline stage: the first, with the embeddings.

        The position embedding has as many rows as the model has positions.
        """
        self.check(tp, pp)
        h = self.hidden
        yield Part("wte.weight", -(-self.vocab // tp) * h)
        yield Part("wpe.weight", (self.positions or self.seq) * h)
        for layer in range(-(-self.layers // pp)):
            at = f"blocks.{layer}"
            for name, numel in (
                ("norm1.weight", h), ("norm1.bias", h),
                ("attention.qkv.weight", 3 * h * h // tp), ("attention.qkv.bias", 3 * h // tp),
                ("attention.out.weight", h * h // tp), ("attention.out.bias", h),
                ("norm2.weight", h), ("norm2.bias", h),
                ("mlp.up.weight", 4 * h * h // tp), ("mlp.up.bias", 4 * h // tp),
                ("mlp.down.weight", 4 * h * h // tp), ("mlp.down.bias", h),
            ):  # fmt: skip
                yield Part(f"{at}.{name}", numel, at)
        yield Part("norm.weight", h)
        yield Part("norm.bias", h)
        if not self.tied:
            yield Part("head.weight", -(-self.vocab // tp) * h)

    def products(self, tp: int = 1) -> list[tuple[int, int, float]]:
        """The linear layers of all blocks on one rank: inputs, outputs, and how many there are, each for all tokens."""
        h = self.hidden
        return [(h, 3 * h // tp, self.layers), (h // tp, h, self.layers), *self.mlp_products(tp)]

    def mlp_products(self, tp: int = 1) -> list[tuple[int, int, float]]:
        """The linear layers of all MLPs on one rank: inputs, outputs, and how many there are."""
        h = self.hidden
        return [(h, 4 * h // tp, self.layers), (4 * h // tp, h, self.layers)]

    def matrices(self) -> dict[str, tuple[int, int]]:
        """The matrices of the blocks, which Muon updates, by name: rows and columns."""
        h = self.hidden
        of_block = {
            "attention.qkv.weight": (3 * h, h), "attention.out.weight": (h, h),
            "mlp.up.weight": (4 * h, h), "mlp.down.weight": (h, 4 * h),
        }  # fmt: skip
        return {f"blocks.{layer}.{name}": size for layer in range(self.layers) for name, size in of_block.items()}

    def check(self, tp: int, pp: int) -> None:
        """Raises unless tp and pp divide this model."""
        for name, size in (("heads", self.heads), ("hidden", self.hidden)):
            if size % tp:
                raise ConfigError(f"{name}={size} cannot be cut over tp={tp} ranks; use a tp that divides it")
        if pp > self.layers:
            raise ConfigError(f"pp={pp} stages for {self.layers} layers leaves some empty; use at most {self.layers}")


class Part(NamedTuple):
    """One parameter."""

    name: str
    numel: int
    block: str = ""


WIDE_INPUT = ("out.weight", "down.weight", "o_proj.weight", "down_proj.weight")  # the hidden size is their output


def adapters(part: Part, hidden: int, rank: int) -> Iterator[tuple[str, int]]:
    """Names and sizes of the two matrices of LoRA on a linear layer of a block; none for other parameters. One side of
    each of these layers is as wide as the hidden size.

    >>> list(adapters(Part("mlp.up.weight", 4 * 64 * 64, "blocks.0"), 64, 8))
    [('mlp.up.lora_A.weight', 512), ('mlp.up.lora_B.weight', 2048)]
    """
    layer, dot, kind = part.name.rpartition(".")
    if not rank or not part.block or kind != "weight" or part.numel % hidden or part.numel == hidden:
        return
    if layer.endswith((".mlp.gate", "norm")):
        return
    other = part.numel // hidden
    inputs, outputs = (other, hidden) if part.name.endswith(WIDE_INPUT) else (hidden, other)
    yield f"{layer}.lora_A{dot}weight", rank * inputs
    yield f"{layer}.lora_B{dot}weight", rank * outputs


class Run(NamedTuple):
    """A model of the ZeRO paper's evaluation, as it was trained there: V100s of 32 GB, 16 to a node."""

    shape: Shape
    ranks: int
    tp: int
    batch: int  # per replica
    zero: bool = True  # else the baseline: model and data parallelism without ZeRO


def _run(layers: int, hidden: int, heads: int, ranks: int, tp: int, batch: int, zero: bool = True) -> Run:
    return Run(Shape(layers=layers, hidden=hidden, heads=heads), ranks, tp, batch, zero)


# Sizes that appear with two shapes have two names; "-dp" was trained without model parallelism on 128 devices, "-wide"
# is the shape whose speed-up with the number of devices was measured, "-mp" the baseline.
PAPER: dict[str, Run] = {
    "1.5b": _run(48, 1600, 16, 400, 1, 24),
    "8b": _run(72, 3072, 24, 400, 4, 64),
    "40b": _run(88, 6144, 32, 400, 4, 12),
    "60b": _run(132, 6144, 32, 400, 16, 64),
    "80b": _run(100, 8192, 64, 400, 16, 32),
    "100b": _run(125, 8192, 64, 400, 16, 32),
    "120b": _run(150, 8192, 64, 400, 16, 24),
    "140b": _run(175, 8192, 64, 400, 16, 16),
    "170b": _run(212, 8192, 64, 400, 16, 12),
    "1.5b-mp": _run(48, 1600, 16, 400, 2, 16, False),
    "8b-mp": _run(72, 3072, 24, 400, 8, 8, False),
    "40b-mp": _run(88, 6144, 64, 384, 32, 4, False),
    "60b-mp": _run(132, 6144, 64, 384, 64, 4, False),
    "80b-mp": _run(100, 8192, 128, 384, 128, 4, False),
    "100b-mp": _run(125, 8192, 128, 384, 128, 4, False),
    "120b-mp": _run(150, 8192, 128, 384, 128, 2, False),
    "140b-mp": _run(175, 8192, 128, 384, 128, 2, False),
    "170b-mp": _run(212, 8192, 256, 256, 256, 2, False),
    "60b-wide-64": _run(75, 8192, 32, 64, 16, 16),
    "60b-wide-128": _run(75, 8192, 32, 128, 16, 48),
    "60b-wide-256": _run(75, 8192, 32, 256, 16, 48),
    "60b-wide": _run(75, 8192, 32, 400, 16, 64),
    "1.5b-dp": _run(34, 1920, 16, 128, 1, 24),
    "2.5b-dp": _run(54, 1920, 16, 128, 1, 24),
    "4b-dp": _run(64, 2304, 24, 128, 1, 16),
    "6b-dp": _run(52, 3072, 24, 128, 1, 12),
    "8b-dp": _run(72, 3072, 24, 128, 1, 8),
    "10b-dp": _run(50, 4096, 32, 128, 1, 6),
    "11b-dp": _run(54, 4096, 32, 128, 1, 4),
    "12b-dp": _run(58, 4096, 32, 128, 1, 4),
    "13b-dp": _run(62, 4096, 32, 128, 1, 2),
    "1.16b-ddp": _run(24, 1920, 16, 128, 1, 8, False),
    "1.38b-ddp": _run(40, 1536, 16, 128, 1, 1, False),  # the paper's name; the shape gives 1.21B
}

SHAPES: dict[str, Shape] = {
    **{name: run.shape for name, run in PAPER.items()},
    "gpt2-1.5b": PAPER["1.5b"].shape,
    "128b": Shape(layers=159, hidden=8192, heads=64),  # no text gives shapes for these two
    "1t": Shape(layers=128, hidden=25600, heads=128),
    "gpt-tiny": Shape(layers=4, hidden=128, heads=4, seq=128, vocab=256),
    "gpt-small": Shape(layers=8, hidden=512, heads=8, seq=256, vocab=256),
    "gpt2": Shape(layers=12, hidden=768, heads=12),
    "gpt2-medium": Shape(layers=24, hidden=1024, heads=16),
    "gpt2-large": Shape(layers=36, hidden=1280, heads=20),
}


def named(name: str) -> Shape:
    """A shape by name, however it is written.

    >>> named("GPT2-1.5B").layers
    48
    """
    found = SHAPES.get(name.lower()) or SHAPES.get(name.lower().removeprefix("gpt2-"))
    if found is None:
        raise ConfigError(f"model {name!r} is unknown; use one of {', '.join(SHAPES)}")
    return found
