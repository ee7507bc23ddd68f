"""What transformers' Trainer costs: a script under `python -m onefold.hf` beside a plain loop of Onefold's, tokens/s.

    python -m benchmarks.hf_trainer                              # one rank, Qwen2.5-1.5B's shape, 8 x 1024 tokens, bf16
    python -m benchmarks.hf_trainer --shape tiny --batch 2 --length 16 --steps 4 --warm-up 1   # to see that it runs

Both train the same model on the same rows with AdamW and clipped gradients, in processes of their own, by turns: memory
holds one of them. A turn's time is that of all steps after the warm-up together, in which nothing waits for the device
but what the Trainer itself does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import at_least

CHILD = "--child"
LR = 1e-5


def plain_loop(asked: argparse.Namespace, results: Path) -> None:
    """The loop that a user of Onefold writes."""
    import onefold
    from benchmarks.hf_script import SHAPES, RandomTokens, build, now

    device = "cuda" if torch.cuda.is_available() else "cpu"
    onefold.init()
    model = build(asked.shape)
    onefold.shard(model, stage=asked.stage, precision="bf16")
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=LR, fused=True)
    loader = torch.utils.data.DataLoader(
        RandomTokens(SHAPES[asked.shape]["vocab_size"], asked.length), batch_size=asked.batch, pin_memory=True
    )
    losses, began = [], 0.0
    model.train()
    for step, rows in zip(range(asked.warm_up + asked.steps), loader):
        if step == asked.warm_up:
            began = now()
        rows = {name: value.to(device, non_blocking=True) for name, value in rows.items()}
        loss = model(**rows).loss
        loss.backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    seconds = now() - began
    results.write_text(json.dumps({"seconds": seconds, "loss": float(torch.stack(losses).mean())}))


def command(system: str, asked: argparse.Namespace, results: Path, scratch: Path) -> list[str]:
    shared = {"--shape": asked.shape, "--length": asked.length}
    if system == "loop":
        more = {"--batch": asked.batch, "--steps": asked.steps, "--stage": asked.stage, "--warm-up": asked.warm_up}
        return [sys.executable, "-m", "benchmarks.hf_trainer", *_words(shared | more | {CHILD: results})]
    flags = shared | {
        "--warm_up": asked.warm_up,
        "--output_dir": scratch, "--results": results, "--max_steps": asked.warm_up + asked.steps, "--bf16": True,
        "--per_device_train_batch_size": asked.batch, "--learning_rate": LR, "--lr_scheduler_type": "constant",
        "--logging_strategy": "no", "--save_strategy": "no", "--report_to": "none", "--disable_tqdm": True,
        "--optim": "adamw_torch_fused", "--max_grad_norm": 1.0, "--use_cpu": not torch.cuda.is_available(),
        "--train_sampling_strategy": "sequential",
    }  # fmt: skip
    launch = [sys.executable, "-m", "onefold.hf", "--stage", str(asked.stage), "-m", "benchmarks.hf_script"]
    return [*launch, *_words(flags)]


def _words(flags: Mapping[str, Any]) -> list[str]:
    return [str(word) for pair in flags.items() for word in pair]


def measure(asked: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {"loop": [], "trainer": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(asked.rounds):
            for system in ("loop", "trainer") if turn % 2 == 0 else ("trainer", "loop"):
                results = Path(folder, f"{system}-{turn}")
                done = subprocess.run(
                    command(system, asked, results, Path(folder, "out")), capture_output=True, text=True,
                    env={**os.environ, "HF_HUB_OFFLINE": "1"},
                )  # fmt: skip
                if done.returncode:
                    sys.exit(f"{system} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
                found[system].append(json.loads(results.read_text()))
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hf_trainer", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--shape", choices=("qwen2.5-1.5b", "tiny"), default="qwen2.5-1.5b")
    parser.add_argument("--batch", type=at_least(1), default=8, help="sequences of a step")
    parser.add_argument("--length", type=at_least(2), default=1024, help="tokens of a sequence")
    parser.add_argument("--stage", type=int, choices=range(4), default=2)
    parser.add_argument("--warm-up", type=at_least(1), default=4, help="steps that do not count")
    parser.add_argument("--steps", type=at_least(1), default=16, help="steps that do")
    parser.add_argument("--rounds", type=at_least(1), default=3, help="turns of each")
    parser.add_argument(CHILD, type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if asked.child:
        plain_loop(asked, asked.child)
        return 0
    found = measure(asked)
    tokens = asked.batch * asked.length * asked.steps
    speeds = {name: [tokens / turn["seconds"] for turn in turns] for name, turns in found.items()}
    print(f"{asked.shape}, one rank, {asked.batch} x {asked.length} tokens a step, bf16, stage {asked.stage}")
    for name, per_s in speeds.items():
        turns = ", ".join(f"{speed:,.0f}" for speed in per_s)
        print(f"{name:<8}{statistics.median(per_s):>12,.0f} tokens/s  [{turns}]  loss {found[name][0]['loss']:.4f}")
    print(f"trainer / loop: {statistics.median(speeds['trainer']) / statistics.median(speeds['loop']):.3f}")
    losses = [turn["loss"] for turns in found.values() for turn in turns]
    if max(losses) - min(losses) > 1e-3:
        print(f"losses differ: {min(losses):.6f} to {max(losses):.6f}; the two do not train the same", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
