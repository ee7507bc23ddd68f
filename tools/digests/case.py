"""One case on one rank: train, then describe all that was trained, through Onefold's public face only."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

import onefold
from tools.digests.models import MODELS
from tools.digests.refusals import MISTAKES
from tools.digests.table import Case, Refusal

STEPS, MICRO = 6, 2
BUCKET_BYTES = 4 << 10  # several units in models this small

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 1e-2}),
    "sgd": (torch.optim.SGD, {"lr": 5e-2, "momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}
PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": onefold.Precision(compute="bf16", master="fp32"),
    "fp16": "fp16",
    "split": onefold.Precision(compute="bf16", master="split"),
}


def run(case: Case | Refusal, folder: str) -> list[str]:
    """Lines that say what this rank has in the end. `folder` is new, empty and the same on all ranks."""
    if isinstance(case, Refusal):
        try:
            MISTAKES[case.mistake]()
        except onefold.OnefoldError as error:
            return [f"refused {type(error).__name__}"]
        return ["accepted"]
    training = Training(case, Path(folder))
    training.go()
    return [*training.said, *training.state()]


class Training:
    """A model and its optimizer, and what they said on the way."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder, self.said = case, folder, list[str]()
        self.build(seed=1)

    def build(self, seed: int) -> None:
        case = self.case
        torch.manual_seed(seed)
        self.model = onefold.shard(
            MODELS[case.model].build(),
            stage=case.stage,
            precision=PRECISIONS[case.precision],
            offload=self.offload(),
            activations=case.activations,
            bucket_bytes=BUCKET_BYTES,
            timeout_s=60,
        )
        cls, settings = OPTIMIZERS[case.optimizer]
        scale = None
        if case.precision == "fp16":  # the first step and the fourth overflow
            scale = onefold.LossScale(initial=2.0**36, factor=2.0**26, growth_interval=2)
        inside = case.gradients == "step-in-backward"
        trained = [param for param in self.model.parameters() if param.requires_grad]
        groups = [
            {"params": [param for param in trained if param.ndim > 1]},
            {"params": [param for param in trained if param.ndim <= 1], "lr": 3e-3},
        ]
        self.optimizer = onefold.Optimizer(
            self.model, cls, groups=groups, loss_scale=scale, step_in_backward=inside, **settings
        )

    def offload(self) -> onefold.Offload | None:
        scratch = self.folder / "scratch"
        if self.case.tier == "offload-disk":
            scratch.mkdir(exist_ok=True)
        return {
            "device": None,
            "offload-host": onefold.Offload(optimizer="host"),
            "offload-disk": onefold.Offload(optimizer="disk", path=scratch),
            "parameters-host": onefold.Offload(optimizer="host", parameters="host"),
        }[self.case.tier]

    def go(self) -> None:
        for step in range(STEPS):
            self.step(step)
            self.between(step)
        optimizer = self.optimizer
        self.said.append(f"steps {optimizer.steps} skipped {optimizer.skipped} scale {optimizer.loss_scale.hex()}")

    def step(self, step: int) -> None:
        accumulates = self.case.gradients.startswith("accumulate")
        parts = MICRO if accumulates else 1
        for part in range(parts):
            torch.manual_seed(100 * step + 10 * part + dist.get_rank())  # dropout
            waits = part + 1 < parts
            reduce = self.case.gradients.removeprefix("accumulate-")
            with onefold.accumulate(self.model, reduce=reduce) if waits else nullcontext():
                loss = self.loss(step, part) / parts
                self.optimizer.backward(loss)
            self.say("loss", loss)
        if self.case.gradients == "clip":
            self.say("norm", self.optimizer.clip_grad_norm(0.5))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, step: int, part: int) -> Tensor:
        batch = torch.Generator().manual_seed(10_000 * step + 100 * part + dist.get_rank())
        return MODELS[self.case.model].loss(self.model, batch)

    def between(self, step: int) -> None:
        what = self.case.between
        if what == "evaluate":
            self.model.eval()
            with torch.no_grad():
                self.say("evaluated", self.loss(step, 9))
            self.model.train()
        elif what == "edit" and step == 1:  # by hand; released parameters are written inside full_parameters
            whole = onefold.full_parameters(self.model, write=True) if self.case.stage == 3 else nullcontext()
            with whole, torch.no_grad():
                for param in list(self.model.parameters())[::2]:
                    param.mul_(0.75)
        elif what == "edit" and step == 3:
            torch.manual_seed(5)
            self.model.load_state_dict(MODELS[self.case.model].build().state_dict())
        elif what == "resume" and step == 2:
            onefold.save(self.folder / "middle", self.model, self.optimizer, extra={"step": step})
            del self.model, self.optimizer
            self.build(seed=2)
            self.said.append(f"extra {onefold.load(self.folder / 'middle', self.model, self.optimizer)}")

    def say(self, what: str, value: Tensor) -> None:
        self.said.append(f"{what} {float(value.detach()).hex()}")

    def state(self) -> list[str]:
        """Parameters, masters, buffers and optimizer state, a line for each tensor."""
        model = self.model
        lines = [line("buffer", name, buffer) for name, buffer in model.named_buffers()]
        with onefold.full_parameters(model):
            lines += [line("parameter", name, param) for name, param in model.named_parameters()]
        whole = onefold.full_state_dict(model)
        lines += [line("whole", name, value) for name, value in sorted(whole.items())]
        saved = onefold.save(self.folder / "end", model, self.optimizer)
        if dist.get_rank() == 0:
            lines += saved_lines(Path(saved))
        return lines


def line(kind: str, name: str, value: Tensor) -> str:
    return f"{kind} {name} {value.dtype} {tuple(value.shape)} {sha256([value])}"


def sha256(values: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for value in values:
        copied = value.detach().clone(memory_format=torch.contiguous_format)  # numpy() pins a storage for good
        digest.update(copied.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def saved_lines(folder: Path) -> list[str]:
    """What a checkpoint holds, as docs/checkpoints.md describes it: each state of each tensor, in one piece."""
    manifest = json.loads((folder / "manifest.json").read_text())
    states: dict[tuple[str, str], list[tuple[int, int, str]]] = {}
    for name, state, start, stop, file, *_ in manifest["entries"]:
        states.setdefault((name, state), []).append((start, stop, file))
    lines = [f"counts {record['name']} {record.get('scalars')}" for record in manifest["records"]]
    for (name, state), pieces in states.items():
        values = []
        for start, stop, file in sorted(pieces):
            with safe_open(os.fspath(folder / file), "pt") as opened:
                values.append(opened.get_tensor(f"{name}|{state}|{start}-{stop}"))
        lines.append(f"saved {name}|{state} {pieces_dtype(values)} {sum(v.numel() for v in values)} {sha256(values)}")
    return sorted(lines)


def pieces_dtype(values: list[Tensor]) -> str:
    return "/".join(sorted({str(value.dtype) for value in values}))
