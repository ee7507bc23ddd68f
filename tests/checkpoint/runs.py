"""A small run with every trait that makes resuming hard, and what its state is, found without any checkpoint code."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import onefold
from onefold.cost.layout import Span
from onefold.optim.kernels.codec import from_8bit
from onefold.optim.kernels.rule import MOMENTS, SCALE
from onefold.runtime.engine import engine_of
from onefold.state.rounding import narrowed
from tests.harness import device
from tests.models import EveryTrait
from tests.parity.whole import LAMB, Shampoo

VOCAB, BATCH, EPOCH = 37, 2, 5
PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": onefold.Precision(compute="bf16", master="fp32"),
    "split": onefold.Precision(compute="bf16", master="split"),
    "fp16": "fp16",
}


class Case(NamedTuple):
    stage: int
    precision: str
    optimizer: str = "adamw"


class Trainer:
    """A model, its optimizer, a schedule and a place in the data."""

    def __init__(self, case: Case, seed: int = 0, **fields: Any) -> None:
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        fields = {"bucket_bytes": 4 << 10, **fields}
        precision = PRECISIONS[case.precision]
        self.model = onefold.shard(EveryTrait(VOCAB).to(device()), stage=case.stage, precision=precision, **fields)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.ndim > 1]},
            {"params": [p for p in trained if p.ndim <= 1], "lr": 3e-3},
        ]
        cls = {
            "adamw": torch.optim.AdamW,
            "sgd": torch.optim.SGD,
            "nadam": torch.optim.NAdam,
            "lamb": LAMB,
            "shampoo": Shampoo,
        }.get(case.optimizer.partition("-")[0])
        more: dict[str, Any] = {"momentum": 0.9} if cls is torch.optim.SGD else {}
        if "-" in case.optimizer:
            more["state"] = case.optimizer.partition("-")[2]
        if case.precision == "fp16":  # the first steps overflow, and the scale soon grows again
            more["loss_scale"] = onefold.LossScale(initial=2.0**40, factor=2.0**12, growth_interval=2)
        self.optimizer = (
            onefold.Muon(self.model, lr=1e-2, adamw={"lr": 3e-3}, split={"layers.1.weight": 3}, **more)
            if cls is None
            else onefold.Optimizer(self.model, cls, groups=groups, lr=1e-2, **more)
        )
        self.schedule = onefold.Scheduler(self.optimizer, torch.optim.lr_scheduler.MultiStepLR, milestones=[2, 3])
        self.tried, self.epoch, self.position = 0, 0, 0
        self.losses: list[float] = []
        torch.manual_seed(100 + dist.get_rank())

    def train(self, steps: int) -> Trainer:
        for _ in range(steps):
            order = torch.randperm(EPOCH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
            batch = torch.Generator().manual_seed(1000 * order[self.position] + dist.get_rank())
            tokens = torch.randint(0, VOCAB, (BATCH, 5), generator=batch).to(device())
            self.model.late = self.tried >= 2
            loss = F.cross_entropy(self.model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
            self.optimizer.backward(loss)
            self.optimizer.clip_grad_norm(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.losses.append(loss.item())
            self.tried += 1
            assert self.optimizer.tried == self.tried
            self.position = (self.position + 1) % EPOCH
            self.epoch += self.position == 0
        return self

    @property
    def extra(self) -> dict[str, Any]:
        return {"schedule": self.schedule.state_dict(), "data": (self.epoch, self.position), "tried": self.tried}

    def save(self, folder: Any, **kwargs: Any) -> Any:
        return onefold.save(folder, self.model, self.optimizer, extra=self.extra, step=self.tried, **kwargs)

    def load(self, folder: Any, **kwargs: Any) -> Trainer:
        extra = onefold.load(folder, self.model, self.optimizer, **kwargs)
        self.schedule.load_state_dict(extra["schedule"])
        (self.epoch, self.position), self.tried = extra["data"], extra["tried"]
        return self


def truth(trainer: Trainer) -> dict[str, Tensor]:
    """Every value and every optimizer state of the whole run, the same on all ranks. Collective."""
    engine = engine_of(trainer.model)
    state = onefold.full_state_dict(trainer.model)
    told = [{name: (bits(v), v.shape, v.dtype) for name, v in state.items() if isinstance(v, Tensor)}]
    dist.broadcast_object_list(told, 0)
    whole = {
        name: (torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)).view(shape)
        for name, (raw, shape, dtype) in told[0].items()
    }
    pieces: list[Any] = [None] * dist.get_world_size()
    mine = []
    for row in trainer.optimizer.state_dict()["slices"]:
        unit = next(unit for unit in engine.units if unit.name == row["unit"])
        span = Span(*row["span"])
        for slot in (unit.layout.slots[index] for index in row["slots"]):
            part = slot.span.clip(span)
            for key, value in widened(row["state"]).items():
                value = torch.as_tensor(value, dtype=torch.float32)
                if value.ndim > 1 and key in ("left", "right"):  # of another shape
                    mine.append((slot.name, key, 0, value.numel(), bits(value)))
                    continue
                if value.ndim > 1:  # of a whole tensor
                    value = unit.in_memory_order(value, row["slots"][0])
                if value.ndim and part.numel:
                    values = value[part.start - span.start : part.stop - span.start]
                    mine.append((slot.name, key, part.start - slot.start, slot.numel, bits(values)))
                elif part.numel:
                    mine.append((slot.name, key, 0, 1, bits(value)))
    dist.all_gather_object(pieces, mine)
    for name, key, start, numel, value in (row for rows in pieces for row in rows):
        target = whole.setdefault(f"{name}|{key}", torch.full((numel,), float("nan")))
        target[start : start + len(value) // 4] = torch.frombuffer(bytearray(value), dtype=torch.float32)
    return whole


def widened(state: dict[str, Any]) -> dict[str, Any]:
    """Optimizer state with moments of 8 bits as the fp32 values that they stand for."""
    coded = {key: state[key + SCALE] for key in state if key + SCALE in state}
    wide = {key: from_8bit(state[key], scales, second=bool(MOMENTS[key])) for key, scales in coded.items()}
    return {key: wide.get(key, value) for key, value in state.items() if not key.endswith(SCALE)}


def compute_copies(trainer: Trainer, whole: dict[str, Tensor]) -> list[str]:
    """Parameters on this rank that are not the truth, rounded."""
    with onefold.full_parameters(trainer.model):
        named = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    return [name for name, value in named.items() if not same(value, narrowed(whole[name], value.dtype))]


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bits(a) == bits(b)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def digests(whole: dict[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(bits(value)).hexdigest()[:16] for name, value in sorted(whole.items())}


def fingerprint(trainer: Trainer) -> dict[str, Any]:
    """All that decides how this rank goes on."""
    return {
        **digests(truth(trainer)),
        "buffers": digests(dict(trainer.model.named_buffers())),
        "random": hashlib.sha256(bits(torch.get_rng_state())).hexdigest()[:16],
        "settings": [
            {k: v for k, v in group.items() if k not in ("params", "param_names")}
            for group in trainer.optimizer.param_groups
        ],
        "counts": (trainer.optimizer.steps, trainer.optimizer.skipped, trainer.optimizer.loss_scale),
        "place": (trainer.tried, trainer.epoch, trainer.position, trainer.model.calls),
        "schedule": trainer.schedule.last_epoch,
        "losses": trainer.losses[-2:],
    }


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [name for name in sorted({*a, *b}) if a.get(name) != b.get(name)]


def write(cases: list[Case], folder: str) -> list[dict[str, str]]:
    """On every rank: train and save each case; what the state is."""
    onefold.init()
    found = []
    for case in cases:
        trainer = Trainer(case).train(3)
        trainer.save(f"{folder}/{case.stage}-{case.precision}")
        found.append(digests(trained(truth(trainer))))
    return found


def trained(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in whole.items() if not name.startswith("fixed.")}


def read(cases: list[tuple[Case, str]]) -> list[tuple[dict[str, str], list[str]]]:
    """On every rank: load each case from its folder; what the state is, and which parameters are not the truth's."""
    onefold.init()
    found = []
    trainers: dict[Case, Trainer] = {}
    for case, folder in cases:
        if case not in trainers:
            trainers[case] = Trainer(case, seed=3)
        trainer = trainers[case].load(folder)  # the next one over what the last one left
        whole = truth(trainer)
        found.append((digests(trained(whole)), compute_copies(trainer, whole)))
    return found
