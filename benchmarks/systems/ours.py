"""Onefold: a stage and what may be asked of it. Built on the meta device, as a user with a large model would."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import onefold
from benchmarks.fill import filler
from benchmarks.systems.loop import Ready, compile_blocks, numel
from benchmarks.work import Work
from onefold.comm.mesh import simulated_axes
from onefold.sharding import shard_over

OFFLOADED_BYTES = 128 << 20  # as docs/offload.md advises for a GPU


def ours(
    work: Work, *, stage: int = 3, inside: bool = False, clip: float | None = None, compiled: bool = False,
    muon: bool = False, products: str | None = None, state: str = "fp32", accumulate: str = "fp32",
    tile: int | None = None, **fields: Any,
) -> Ready:  # fmt: skip
    """`inside` updates in backward, `clip` is the limit of the norm, `muon` updates matrices by Muon with `products` in
    this dtype (bf16 on a GPU, else fp32), `state` and `accumulate` are the forms of optimizer state and of sums over
    micro-batches, `tile` has tokens of the loss computed together; other fields are those of shard()."""
    model: Any = work.blank()
    count = numel(model)
    precision = (
        onefold.Precision(compute=work.precision, accumulate=accumulate) if accumulate != "fp32" else work.precision
    )
    fields |= {"stage": stage, "precision": precision, "init": filler(model, work.target), "device": work.device}
    if work.recompute:
        fields = {"activations": "checkpoint"} | fields
    if tile is not None:
        model.tile = tile
    if away := work.away:
        fields["offload"] = onefold.Offload(**dataclasses.asdict(away))
        fields["bucket_bytes"] = OFFLOADED_BYTES
    if work.rank_of > 1:
        plays = "nccl" if work.device == "cuda" else "gloo"
        axes = simulated_axes(work.rank_of, plays=plays, values=False)  # messages cost nothing, as in the fake group
        shard_over(axes, model, None, fields)
    else:
        onefold.shard(model, **fields)
    if compiled:
        compile_blocks(model)
    optimizer = (
        onefold.Muon(
            model, adjust_lr_fn="match_rms_adamw", lr=work.lr, weight_decay=0.1, adamw=work.adamw,
            ns_dtype=products or ("bf16" if work.device == "cuda" else "fp32"), step_in_backward=inside,
        )
        if muon
        else onefold.Optimizer(model, torch.optim.AdamW, step_in_backward=inside, fused=True, state=state, **work.adamw)
    )  # fmt: skip
    return Ready(_loop(model, optimizer, clip, work.micro_batches), count, lambda: _report(model))


def _report(model: Any) -> str:
    """What memory holds, and what the settings "auto" have decided."""
    return "\n".join(line for line in (str(onefold.memory(model)), onefold.placement(model).why) if line)


def _loop(
    model: Any, optimizer: onefold.Optimizer, clip: float | None, micro_batches: int
) -> Callable[[Tensor], Tensor]:
    def step(tokens: Tensor) -> Tensor:
        *first, last = tokens.chunk(micro_batches)
        total = torch.zeros((), device=tokens.device)
        for rows in first:
            with onefold.accumulate(model):
                total += part(rows)
        total += part(last)
        if clip is not None:
            optimizer.clip_grad_norm(clip)
        optimizer.step()
        optimizer.zero_grad()
        return total

    def part(rows: Tensor) -> Tensor:
        loss: Tensor = model(rows[:, :-1], rows[:, 1:]) / micro_batches
        loss.backward()
        return loss.detach()

    return step
