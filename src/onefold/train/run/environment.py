"""The facts of a run: what was decided, what was planned for it, and where it runs."""

from __future__ import annotations

import dataclasses
import logging
import os
import platform
import time
from functools import partial
from typing import Any

import torch
from torch import nn

from onefold.cost.shapes import Shape
from onefold.errors import OnefoldError
from onefold.observe.passes import Cut
from onefold.observe.rehearsal import rehearse
from onefold.observe.reports import placement
from onefold.optim.named import choose
from onefold.optim.optimizer import Optimizer
from onefold.runtime.engine import Engine, engine_of
from onefold.train.run.data import Data, Prepared, bigram_loss
from onefold.train.run.model import GPT
from onefold.train.run.optimizers import newton_schulz_of
from onefold.train.run.run_model import RunModel
from onefold.train.run.settings import Settings
from onefold.version import VERSION

PLANNED = 3 * 10**9  # parameters: beyond it the rehearsal takes longer than it is worth here; see `onefold plan`


def facts_of(
    settings: Settings,
    made: RunModel,
    optimizer: Optimizer,
    data: Data,
    prepared: Prepared,
    *,
    earlier: dict[str, Any],
    step: int,
) -> dict[str, Any]:
    """`earlier` are those of the same run before it was interrupted, at `step`: what takes long is not done again."""
    model, shape = made.module, made.shape
    engine = engine_of(model)
    batch, accumulation = settings.steps.split(engine.everyone.size // engine.comms.sequence.size)
    cuda = engine.device.type == "cuda"
    rows = placement(model)
    digests = _digests(prepared, earlier.get("data") or {}, step)
    facts = {
        "model": _model(settings, model, shape),
        "ranks": engine.comms.world.size,
        "stage": engine.resolved.settings.stage,
        "stage_why": rows.why,
        "precision": settings.zero.precision,
        "optimizer": settings.adam.optimizer,
        "device": torch.cuda.get_device_name(engine.device) if cuda else "cpu",
        "global_batch": batch,
        "micro_batch": settings.steps.micro_batch,
        "accumulation": accumulation,
        "tokens_per_step": batch * shape.seq,
        "eval_windows": settings.steps.eval_windows,
        "seed": settings.steps.seed,
        "environment": {**environment(engine.device), "newton_schulz": newton_schulz_of(optimizer)},
        "placement": [dataclasses.asdict(row) for row in rows.rows],
        "data": {
            "source": data.source,
            "left_out": prepared.left_out,
            "train_tokens": data.windows.train * (shape.seq + 1),
            "val_tokens": data.windows.val * (shape.seq + 1),
            "val_fraction": settings.data.val_fraction,
            "tokenizer": data.tokenizer,
            **digests,
        },
    }
    same = all(earlier.get(key) == facts[key] for key in facts if key != "environment")
    if same and "baseline" in earlier and ("plan" in earlier or not settings.plan):
        return {**earlier, **facts}
    known = "baseline" in earlier and all(earlier.get(key) == facts[key] for key in ("model", "data", "eval_windows"))
    evaluated = data.windows.evaluated(settings.steps.eval_windows)
    return {
        **facts,
        **({"plan": planned(engine, settings, made, optimizer, accumulation)} if settings.plan else {}),
        "baseline": earlier["baseline"] if known else {"bigram_val_loss": bigram_loss(data, evaluated)},
    }


def _model(settings: Settings, model: nn.Module, shape: Shape) -> dict[str, Any]:
    """The model by name, class and shape."""
    start = settings.model.weights
    name = settings.model.model if start is None else start.absolute().name
    numel = shape.numel if start is None else sum(param.numel() for param in model.parameters())
    made = {"name": name, **dataclasses.asdict(shape), "parameters": numel, "class": type(model).__name__}
    return made if start is None else {**made, "weights": str(start.absolute())}


def _digests(prepared: Prepared, earlier: dict[str, Any], step: int) -> dict[str, Any]:
    """What the data are by content, and what they were before other data were accepted."""
    found = prepared.digests
    replaced = list(earlier.get("replaced") or [])
    if earlier.get("digest") not in (None, found.run_digest):
        replaced.append({"digest": earlier["digest"], "at_step": step})
    named = {"digest": found.run_digest, "tokenizer_sha256": found.tokenizer, "tokens_sha256": found.tokens}
    return {**named, "replaced": replaced}


def environment(device: torch.device) -> dict[str, Any]:
    return {
        "onefold": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def planned(
    engine: Engine, settings: Settings, made: RunModel, optimizer: Optimizer, accumulation: int
) -> dict[str, Any] | None:
    """Bytes at the fullest instant and bytes sent, rehearsed on tensors without memory; None if it is too large, or a
    model of others that cannot be rehearsed."""
    shape = made.shape
    if shape.numel > PLANNED or engine.comms.sequence.size > 1:  # cut sequences are planned by shape: `onefold plan`
        return None
    tokens = torch.zeros(settings.steps.micro_batch, shape.seq, dtype=torch.long)
    plays = "nccl" if engine.device.type == "cuda" else "gloo"
    zero = dataclasses.replace(engine.resolved.settings, mesh=None, init=None, compile=False)
    muon = {"ns_dtype": newton_schulz_of(optimizer)} if settings.adam.optimizer == "muon" else None
    chosen = choose(settings.adam.optimizer, muon, state=settings.adam.optimizer_state)
    refusals = OnefoldError if isinstance(made.module, GPT) else Exception
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True  # a model of others that cannot be rehearsed is no error of the run
    try:
        found = rehearse(
            made.twin(), made.sample(tokens), zero, chosen.cost, ranks=engine.comm.size,
            rank=engine.comm.rank, plays=plays, micro_batches=accumulation, optimizer=chosen.make_whole,
            cut=_cut(engine, sequence=settings.zero.sequence),
        )  # fmt: skip
    except refusals:
        return None
    finally:
        log.disabled = before
    sent: dict[str, int] = {}
    for (purpose, _), flow in found.sent.items():
        sent[purpose] = sent.get(purpose, 0) + flow.sent_bytes
    held = {**found.states._asdict(), "buffers": found.module_buffers, "communication": found.communication}
    held["activations"] = found.peak["activations"]  # the rest is what is held between steps
    return {"memory": held, "peak_bytes": found.peak_bytes, "traffic": sent}


def _cut(engine: Engine, *, sequence: bool) -> Cut:
    """How the run has split its model over "tp". A rehearsal on the same mesh sends nothing to its ranks."""
    places = engine.resolved.settings.mesh
    if engine.comms.tp.size == 1 or places is None:
        return Cut()
    from onefold.train.run.tensor_parallel import parallelize  # here: it brings the compiler, a second of imports

    return Cut(tp=engine.comms.tp.size, split=partial(parallelize, mesh=places, sequence=sequence))
