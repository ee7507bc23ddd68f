"""A model trained with cut sequences on a mesh, and with whole ones by one process: what the tests here compare."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import onefold
from tests.harness import device
from tests.models import LongLanguage

VOCAB, IGNORED = 19, -100
SGD = {"lr": 0.3, "momentum": 0.9}


@dataclass(frozen=True)
class Run:
    """`batch` names one of the batches below; sizes of axes are those of onefold.mesh."""

    batch: str = "plain"
    axes: tuple[tuple[str, int], ...] = (("sequence", 2),)
    stage: int = 0
    heads: int = 4
    key_heads: int = 4
    causal: bool = True
    window: int | None = None
    balanced: bool = False
    micro: int = 1
    steps: int = 2
    fields: tuple[tuple[str, Any], ...] = ()

    def at(self, stage: int) -> Run:
        return dataclasses.replace(self, stage=stage)

    @property
    def streams(self) -> int:
        sizes = dict(self.axes)
        return sizes.get("shard", 1) * sizes.get("replica", 1)


class Trained(NamedTuple):
    params: dict[str, Tensor]  # on rank 0
    losses: list[float]
    sent: dict[str, int]


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, *, causal: bool = True, window: int | None = None
) -> Tensor:
    """One process, by torch, with a mask of tokens × tokens."""
    at = torch.arange(q.shape[2])
    apart = at[:, None] - at
    seen = apart >= 0 if causal else torch.ones_like(apart, dtype=torch.bool)
    if window is not None:
        seen = seen & (apart.abs() < window)
    if documents is not None:
        seen = seen & ((documents[:, :, None] == documents[:, None]) & (documents >= 0)[:, :, None])[:, None]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return out if documents is None else torch.where((documents >= 0)[:, None, :, None], out, 0)


def batch_of(name: str, step: int, stream: int) -> dict[str, Tensor]:
    """Whole sequences, with labels that are ignored in very different numbers from place to place."""
    generator = torch.Generator().manual_seed(100 * step + stream)
    rows, tokens = (1, 21) if name == "lengths" else (2, 13 if name == "odd" else 16)
    ids = torch.randint(0, VOCAB, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[torch.rand(rows, tokens, generator=generator) < 0.2 + 0.3 * stream] = IGNORED
    labels[:, : 5 * (1 + stream)] = IGNORED  # some ranks have no label at all
    batch = {"input_ids": ids, "labels": labels}
    if name == "packed":
        batch["position_ids"] = torch.tensor([[*range(3), *range(9), *range(4)], [*range(10), *range(1), *range(5)]])
    if name == "lengths":
        batch["cu_seqlens"] = torch.tensor([0, 7, 8, 17, 21])
    if name == "padded":
        batch["attention_mask"] = torch.ones(rows, tokens, dtype=torch.long)
        batch["attention_mask"][0, 11:], batch["attention_mask"][1, :3] = 0, 0
        labels[batch["attention_mask"] == 0] = IGNORED
    return batch


def by_hand(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a model of one process is given for a batch, without a word of onefold's."""
    ids, labels = batch["input_ids"], batch["labels"]
    rows, tokens = ids.shape
    ignored = torch.full((rows, 1), IGNORED)
    ready = {"input_ids": ids, "shift_labels": torch.cat([labels[:, 1:], ignored], dim=1)}
    ready["position_ids"] = batch.get("position_ids", torch.arange(tokens).repeat(rows, 1))
    if name == "packed":
        ready["documents"] = (batch["position_ids"] == 0).cumsum(1)
    if name == "lengths":
        ready["documents"] = torch.tensor([[0] * 7 + [1] + [2] * 9 + [3] * 4])
    if name == "padded":
        ready["documents"] = torch.where(batch["attention_mask"] == 1, 0, -1)
    return ready


def fresh(run: Run, attend: Any) -> LongLanguage:
    torch.manual_seed(0)
    return LongLanguage(attend, run.heads, run.key_heads)


def stream_of(mesh: DeviceMesh) -> int:
    """The number of the data that this rank reads: ranks of one sequence read the same."""
    names, coordinate = mesh.mesh_dim_names or (), mesh.get_coordinate()
    number = 0
    for name, at, size in zip(names, coordinate or (), mesh.shape, strict=True):
        number = number * size + at if name in ("replica", "shard") else number
    return number


def alone(run: Run) -> Trained:
    """One process, plain PyTorch: the mean over all tokens that count, of all streams."""
    model = fresh(run, partial(masked_attention, causal=run.causal, window=run.window))
    optimizer = torch.optim.SGD(model.parameters(), **SGD)
    losses = []
    for step in range(run.steps):
        for micro in range(run.micro):
            batches = [batch_of(run.batch, run.micro * step + micro, stream) for stream in range(run.streams)]
            whole = [by_hand(run.batch, batch) for batch in batches]
            count = sum(int((batch["shift_labels"] != IGNORED).sum()) for batch in whole)
            loss = sum((model(**batch) for batch in whole), torch.zeros(())) / count
            (loss / run.micro).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained({name: value.clone() for name, value in model.state_dict().items()}, losses, {})


def attention_over(mesh: DeviceMesh, run: Run) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        return onefold.sequence_attention(
            q, k, v, mesh, causal=run.causal, window=run.window, documents=documents, tile=5, balanced=run.balanced
        )

    return attend


def built(run: Run, mesh: DeviceMesh) -> tuple[LongLanguage, onefold.Optimizer]:
    model = fresh(run, attention_over(mesh, run)).to(device())
    onefold.shard(model, stage=run.stage, mesh=mesh, bucket_bytes=1 << 20, **dict(run.fields))
    return model, onefold.Optimizer(model, torch.optim.SGD, **SGD)


def turn(run: Run, model: LongLanguage, optimizer: onefold.Optimizer, mesh: DeviceMesh, step: int) -> list[float]:
    losses = []
    for micro in range(run.micro):
        whole = batch_of(run.batch, run.micro * step + micro, stream_of(mesh))
        cut = onefold.cut_sequence(whole, mesh, causal=run.causal, balanced=run.balanced)
        mine = {name: one.to(device()) for name, one in cut.items()}
        with nullcontext() if micro == run.micro - 1 else onefold.accumulate(model, "each"):
            loss = onefold.token_mean(model(**mine), (mine["shift_labels"] != IGNORED).sum(), mesh)
            optimizer.backward(loss / run.micro)
        losses.append(loss.item())
    optimizer.step()
    optimizer.zero_grad()
    return losses


def train(run: Run, mesh: DeviceMesh) -> Trained:
    model, optimizer = built(run, mesh)
    losses = [loss for step in range(run.steps) for loss in turn(run, model, optimizer, mesh, step)]
    return Trained(onefold.full_state_dict(model), losses, onefold.traffic(model).by_purpose)


def train_all(runs: list[Run]) -> list[Trained]:
    """On every rank: all of them, one after the other; meshes are shared."""
    torch.set_num_threads(1)
    meshes = cache(lambda axes: onefold.mesh(**{"shard": 1, **dict(axes)}, device=device()))
    return [train(run, meshes(run.axes)) for run in runs]
