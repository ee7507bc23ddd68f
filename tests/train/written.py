"""Run folders as `onefold train` leaves them, for tests of what reads them: figures of a small GPT, by formula."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

PSI, RANKS, UNITS = 841_218, 2, 6
CONFIG = """\
[model]
model = "gpt-tiny"

[zero]
stage = {stage}
precision = "fp32"
"""
SHARDED_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}
WIDTH = {"parameters": 4, "gradients": 4, "optimizer": 8}
PURPOSES = {0: ("reduce", "gather-gradient"), 3: ("reduce", "gather-forward", "gather-backward")}


def write_run(
    run: Path, *, steps: int = 200, stage: int = 3, warnings: int = 2, seed: int = 0, **facts: Any
) -> list[dict[str, Any]]:
    """A run folder; what metrics.jsonl says."""
    run.mkdir(parents=True)
    (run / "config.toml").write_text(CONFIG.format(stage=stage))
    (run / "facts.json").write_text(json.dumps(facts_of(stage) | facts))
    rows = metrics(steps, stage, seed)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    messages = [
        {"step": 40 + n, "rank": n % 2, "kind": "buckets", "message": "23% of a step is latency; raise --bucket-mb"}
        for n in range(warnings)
    ]
    (run / "warnings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in messages))
    return rows


def write_profile(run: Path) -> None:
    """Beside it, what --profile leaves."""
    waits = {60 * "long." + "0": {"gather-forward": 9_000_000}}
    parts = {"forward": 40_000_000, "backward": 80_000_000, "gather": 9_000_000, "other": 1_000_000}
    step = {"wall_ns": sum(parts.values()), "parts_ns": parts, "exposed_ns": waits, "beside_ns": 0}
    step |= {"gathered_bytes": 3_300_000, "reduced_bytes": 1_600_000}
    rows = [{"rank": rank, "ranks": RANKS, "device": "cpu", "steps": [step] * 3} for rank in range(RANKS)]
    (run / "profile").mkdir()
    (run / "profile" / "summary.json").write_text(json.dumps(rows))


def memory(stage: int, surplus: float = 1.0) -> dict[str, int]:
    states = {k: int(surplus * WIDTH[k] * PSI / (RANKS if stage >= SHARDED_FROM[k] else 1)) for k in WIDTH}
    return {**states, "buffers": 0, "communication": 3_170_304}


def at_peak(stage: int) -> dict[str, int]:
    """With gathered units and activations."""
    sizes = memory(stage)
    return sizes | {"parameters": sizes["parameters"] + (700_000 if stage == 3 else 0), "activations": 37_000_000}


def traffic(stage: int) -> dict[str, int]:
    once = 4 * PSI * (RANKS - 1) // RANKS
    moved = dict.fromkeys(PURPOSES.get(stage, ("reduce", "gather-updated")), once)
    if "gather-backward" in moved:
        moved["gather-backward"] -= once // 50
    return {**moved, "used-flags": 60, "norm": 48}


def facts_of(stage: int) -> dict[str, Any]:
    kinds = {k: "shard" if stage >= SHARDED_FROM[k] else "whole" for k in SHARDED_FROM}
    placement = [
        {
            "unit": f"blocks.{n}",
            "elements": PSI // UNITS,
            **kinds,
            "parameter_bytes": memory(stage)["parameters"] // UNITS,
        }
        for n in range(UNITS)
    ]
    return {
        "model": {"name": "gpt-tiny", "layers": 4, "hidden": 128, "heads": 4, "seq": 128, "vocab": 256,
                  "parameters": PSI},
        "ranks": RANKS, "stage": stage, "stage_why": "", "precision": "fp32", "device": "cpu",
        "global_batch": 16, "micro_batch": 8, "accumulation": 1, "tokens_per_step": 2048,
        "environment": {"onefold": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "platform": "Linux aarch64",
                        "cores": 2, "gpu": None, "date": "2026-11-15 11:00:00 +0000"},
        "placement": placement,
        "plan": {"memory": at_peak(stage), "peak_bytes": 53_000_000, "traffic": traffic(stage)},
        "baseline": {"bigram_val_loss": 2.4631},
        "data": {"source": "Python's standard library", "train_tokens": 11_000_000, "val_tokens": 580_000,
                 "tokenizer": "bytes"},
    }  # fmt: skip


def metrics(steps: int, stage: int, seed: int) -> list[dict[str, Any]]:
    chance, rows = random.Random(seed), []
    for step in range(1, steps + 1):
        loss = 1.55 + 4.0 * math.exp(-step / (0.12 * steps)) + 0.03 * chance.gauss(0, 1)
        val = round(loss + 0.08, 4) if step % max(steps // 10, 1) == 0 else None
        seconds = 0.11 + 0.004 * stage + 0.01 * chance.random()
        rows.append({
            "step": step, "loss": loss, "val_loss": val, "val_ppl": val and math.exp(val),
            "grad_norm": 0.4 + 2 * math.exp(-step / 20) + 0.1 * chance.random(),
            "lr": 1e-3 * min(step / 20, 0.55 + 0.45 * math.cos(math.pi * step / steps)),
            "tokens_per_s": 2048 / seconds, "step_s": seconds, "mfu": None,
            "memory": memory(stage, 1.004) | {"activations": 36_900_000, "peak": 52_500_000},
            "traffic_bytes": sum(traffic(stage).values()),
            "traffic": traffic(stage), "loss_scale": None, "skipped": 0, "time": 1.7e9 + 0.12 * step,
        })  # fmt: skip
    return rows
