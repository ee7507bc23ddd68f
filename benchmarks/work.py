"""What is trained: the model, its batches, the precision, where states may lie. The same for every system."""

from __future__ import annotations

import dataclasses
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.decoder import SHAPES, CausalDecoder
from benchmarks.gpt import GPT


@dataclass(frozen=True, kw_only=True)
class Away:
    """States that do not lie on the device: ours may choose; other systems put the optimizer into host memory."""

    optimizer: Literal["host", "disk", "auto"] = "host"
    parameters: Literal["host", "disk"] | None = None
    path: str | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None
    spare_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Work:
    name: str
    layers: int
    dim: int
    batch: int  # sequences per rank, in a micro-batch
    micro_batches: int = 1
    decoder: str | None = None
    """A shape of Qwen2.5 by its name in decoder.py; None: a GPT."""
    seq: int = 1024
    vocab: int = 50304
    precision: Literal["fp32", "bf16"] = "bf16"
    """What computes. With bf16, all but the floor update fp32 values."""
    recompute: bool = False
    """Blocks are computed again in backward."""
    device: Literal["cpu", "cuda"] = "cuda"
    ranks: int = 1
    """Processes."""
    rank_of: int = 1
    """More than one: the process is one rank of so many, and the others are not there. Values mean nothing then."""
    away: Away | None = None
    lr: float = 1e-4
    threads: int | None = None
    """Of each rank; None leaves it to torch."""

    @property
    def adamw(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}

    @property
    def target(self) -> torch.device:
        return torch.device(self.device, 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def compute(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    @property
    def world(self) -> int:
        return self.ranks * self.rank_of

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.micro_batches * self.seq * self.ranks

    def model(self) -> nn.Module:
        if self.decoder:
            return CausalDecoder(SHAPES[self.decoder])
        heads = max(1, self.dim // 64)
        return GPT(vocab=self.vocab, dim=self.dim, layers=self.layers, heads=heads, context=self.seq)

    def blank(self) -> nn.Module:
        """The model without memory, for those who can give it theirs."""
        with torch.device("meta"):
            return self.model()

    def tokens(self, rank: int, step: int) -> Tensor:
        """The micro-batches of one rank in one step, one behind the other, and the token after each sequence."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"tokens/{rank}/{step}".encode()))
        shape = self.batch * self.micro_batches, self.seq + 1
        return torch.randint(0, self.vocab, shape, generator=generator).to(self.target)

    def quick(self) -> Work:
        """The same kind of work at a size that any machine does in an instant."""
        small = dataclasses.replace(self, layers=2, dim=64, batch=1, seq=16, vocab=64)
        return dataclasses.replace(small, decoder=self.decoder and "tiny", micro_batches=min(2, self.micro_batches))

    @classmethod
    def read(cls, fields: dict[str, Any]) -> Work:
        return cls(**{**fields, "away": Away(**fields["away"]) if fields["away"] else None})


def one_gpu() -> dict[str, Work]:
    """The works for one GPU, by name. The names give the number of parameters."""
    small: dict[str, Any] = {"layers": 48, "dim": 1600, "batch": 8}
    large: dict[str, Any] = {"layers": 24, "dim": 4096, "batch": 8}
    away: dict[str, Any] = {"layers": 32, "batch": 16, "recompute": True, "away": Away()}
    works = (
        Work(name="1.64b", **small),
        Work(name="5.25b", **large),
        Work(name="rank8-1.64b", rank_of=8, **small),
        Work(name="rank8-5.25b", rank_of=8, **large),
        Work(name="rank64-129b", rank_of=64, layers=159, dim=8192, batch=1),
        Work(name="offload-2.78b", dim=2560, **away),
        Work(name="offload-6.86b", dim=4096, **away),
        *(qwen(name) for name in ("1.5b", "7b")),
        *(qwen(name, Away(optimizer="auto")) for name in ("14b", "20b", "32b")),
    )
    return {work.name: work for work in works}


def qwen(shape: str, away: Away | None = None) -> Work:
    """Fine-tuning of all parameters of a shape of Qwen2.5, with 524,288 tokens a step."""
    sizes = SHAPES[shape]
    return Work(
        name=f"qwen2.5-{shape}", decoder=shape, layers=sizes.layers, dim=sizes.hidden, vocab=sizes.vocab, batch=16,
        micro_batches=32, recompute=away is not None, away=away, lr=1e-5,
    )  # fmt: skip


def shared_gpu() -> dict[str, Work]:
    """The works for ranks that share one GPU over NCCL, by name."""
    shape: dict[str, Any] = {"vocab": 32768, "ranks": 2}
    works = (
        Work(name="nccl-0.37b", layers=24, dim=1024, batch=8, **shape),
        Work(name="nccl-0.74b", layers=12, dim=2048, batch=16, **shape),
        Work(name="nccl-1.64b", layers=48, dim=1600, batch=8, **shape),
    )
    return {work.name: work for work in works}


def two_ranks() -> dict[str, Work]:
    """The works for a CPU: mostly compute, and mostly communication."""
    shape: dict[str, Any] = {"layers": 8, "dim": 512, "vocab": 8192, "precision": "fp32", "lr": 1e-3}
    place: dict[str, Any] = {"device": "cpu", "ranks": 2, "threads": 1}
    works = (
        Work(name="2x128", batch=2, seq=128, **shape, **place),
        Work(name="1x32", batch=1, seq=32, **shape, **place),
    )
    return {work.name: work for work in works}
