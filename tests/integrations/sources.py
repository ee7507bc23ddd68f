"""Training runs of other programs in small: a plain torch run, and its state as DeepSpeed's folders hold it."""

from __future__ import annotations

import math
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onefold
from tests.models.source_net import VOCAB, SourceNet

SAVED, STEPS = 2, 4


def build() -> SourceNet:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return SourceNet()


def groups(model: nn.Module, *, named: bool = False) -> list[dict[str, Any]]:
    rows: list[Any] = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    large, small = ([row for row in rows if (row[1].ndim > 1) == flag] for flag in (True, False))
    if not named:
        large, small = [param for _, param in large], [param for _, param in small]
    return [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0, "lr": 3e-3}]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Losses of some steps; the same batches on every rank."""
    losses = []
    for step in range(first, last):
        tokens = torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class PlainRun:
    """A plain run that has taken SAVED steps."""

    def __init__(self, *, named: bool = False) -> None:
        self.model = build()
        self.optimizer = torch.optim.AdamW(groups(self.model, named=named), lr=1e-2)
        train(self.model, self.optimizer, 0, SAVED)

    def rest(self) -> list[float]:
        return train(self.model, self.optimizer, SAVED, STEPS)


def continued(folders: list[str], stage: int) -> list[list[float]]:
    """Losses of the rest of the run under Onefold, from each of these checkpoints."""
    onefold.init()
    found = []
    for folder in folders:
        model = onefold.shard(build(), stage=stage)
        optimizer = onefold.Optimizer(model, torch.optim.AdamW, groups=groups(model), lr=0.5)
        onefold.load(folder, model, optimizer)
        found.append(train(model, optimizer, SAVED, STEPS))
    return found


# -- DeepSpeed ------------------------------------------------------------------------------------------------------


@contextmanager
def classes_of_deepspeed() -> Iterator[list[type]]:
    """Classes that pickle under the names of DeepSpeed's, whether it is installed or not; other code that looks for
    DeepSpeed must not find them."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    made = []
    for module, name in (
        ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
        ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ):
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
        cls = type(name, (), {"__module__": module})
        setattr(sys.modules[module], name, cls)
        made.append(cls)
    try:
        yield made
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]
        sys.modules.update(before)


def write_deepspeed(folder: Path, run: PlainRun, stage: int, ranks: int, prefix: str = "") -> Path:
    """The state of a run as `ranks` ranks of DeepSpeed 0.19.8 write it: flat vectors, cut and padded."""
    with classes_of_deepspeed() as (scaler, address):
        return _write_deepspeed(folder, run, stage, ranks, prefix, scaler(), address())


def _write_deepspeed(
    folder: Path, run: PlainRun, stage: int, ranks: int, prefix: str, scaler: object, address: object
) -> Path:
    inner = folder / f"global_step{SAVED}"
    inner.mkdir(parents=True)
    (folder / "latest").write_text(inner.name)
    names = {id(param): name for name, param in run.model.named_parameters()}
    rows = [[(names[id(p)], p) for p in group["params"]] for group in run.optimizer.param_groups]
    states = run.optimizer.state
    settings = [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]
    for rank in range(ranks):
        base: dict[str, Any] = {"state": {}, "param_groups": [{**s, "params": [i]} for i, s in enumerate(settings)]}
        values = []
        for i, row in enumerate(rows):
            cut = _cut_3 if stage == 3 else _cut
            value = cut([p.detach() for _, p in row], ranks, rank)
            vectors = {key: cut([states[p][key] for _, p in row], ranks, rank) for key in ("exp_avg", "exp_avg_sq")}
            base["state"][i] = {"step": states[row[0][1]]["step"], **vectors}
            left = sum(p.numel() for _, p in row) - rank * value.numel()  # what is no padding, below stage 3
            values.append(value if stage == 3 else value[: max(left, 0)].clone())
        optimizer = {
            "loss_scaler": scaler, "dynamic_loss_scale": False, "zero_stage": stage, "fragments": [address],
            "partition_count": ranks if stage == 3 else [ranks] * len(rows),
            **({"optimizer_state_dict": base, "fp32_flat_groups": values} if stage == 3 else
               {"base_optimizer_state": base, "single_partition_of_fp32_groups": values}),
        }  # fmt: skip
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}}, inner / f"{prefix}{name}_optim_states.pt")
        if stage == 3:
            torch.save(_model(run, rows, stage, ranks, rank), inner / f"{name}_model_states.pt")
    if stage < 3:
        torch.save(_model(run, rows, stage, ranks, 0), inner / "mp_rank_00_model_states.pt")
    return folder


def _model(run: PlainRun, rows: Any, stage: int, ranks: int, rank: int) -> dict[str, Any]:
    whole = run.model.state_dict()
    frozen = {"scale": run.model.scale.detach()}
    fragments = {"scale": _cut_3(list(frozen.values()), ranks, rank)} if stage == 3 else frozen
    return {
        "module": OrderedDict((n, v if stage < 3 or n == "seen" else torch.empty(0)) for n, v in whole.items()),
        "buffer_names": ["seen"],
        "optimizer": None,
        "param_shapes": [OrderedDict((name, param.shape) for name, param in row) for row in rows],
        "frozen_param_shapes": {"scale": torch.Size([1])} if stage > 1 else None,
        "frozen_param_fragments": fragments if stage > 1 else None,
        "shared_params": {} if stage == 3 else {"head.weight": "emb.weight"},
        "global_steps": SAVED, "skipped_steps": 0, "ds_config": {}, "ds_version": "0.19.8", "epoch": 7,
    }  # fmt: skip


def _cut(tensors: list[Tensor], ranks: int, rank: int) -> Tensor:
    """Stages 1 and 2: one vector of all parameters, padded to a multiple of 2N, of which a rank has 1/N."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    flat = F.pad(flat, (0, -flat.numel() % (2 * ranks)))
    return flat.chunk(ranks)[rank].clone()


def _cut_3(tensors: list[Tensor], ranks: int, rank: int) -> Tensor:
    """Stage 3: of each parameter 1/N, padded."""
    parts = []
    for tensor in tensors:
        size = math.ceil(tensor.numel() / ranks)
        parts.append(F.pad(tensor.reshape(-1), (0, size * ranks - tensor.numel()))[rank * size : (rank + 1) * size])
    return torch.cat(parts)
