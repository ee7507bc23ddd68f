"""A small LightningModule and its data, and how a rank of the harness trains it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import onefold
from onefold.lightning import ZeroStrategy
from tests.harness.device import device

WIDTH = 16
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def blocks(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(3))
    )


class Lit(L.LightningModule):
    """Two param groups, a schedule for each step, a validation; what each training step saw is kept."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = blocks(width)
        self.losses: list[float] = []
        self.seen: list[tuple[torch.dtype, torch.dtype, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        out = self(x)
        self.seen.append((out.dtype, y.dtype, torch.is_autocast_enabled("cpu")))
        loss = nn.functional.mse_loss(out.float(), y.float())
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        self.log("val", nn.functional.mse_loss(self.net(x).float(), y.float()), sync_dist=True)

    def predict_step(self, batch: list[Tensor], index: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[0].parameters(), "lr": 2e-2}, {"params": self.net[1:].parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        then = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, then], [2])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Gan(Lit):
    """Two models with an optimizer each, optimized by hand in turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        x, y = batch
        makes, judges = self.optimizers()
        self.toggle_optimizer(judges)
        loss = self.judge(y).square().mean() + (1 - self.judge(self.net(x).detach())).square().mean()
        self.manual_backward(loss)
        self.clip_gradients(judges, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        judges.step()
        judges.zero_grad()
        self.untoggle_optimizer(judges)
        self.toggle_optimizer(makes)
        other = self.judge(self.net(x)).square().mean()
        self.manual_backward(other)
        makes.step()
        makes.zero_grad()
        self.untoggle_optimizer(makes)
        self.losses += [loss.item(), other.item()]
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self) -> Any:
        makes = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        judges = torch.optim.SGD(self.judge.parameters(), lr=0.05, momentum=0.9)
        schedules = torch.optim.lr_scheduler.StepLR(makes, 3), torch.optim.lr_scheduler.ExponentialLR(judges, 0.9)
        return [makes, judges], list(schedules)


def data(rows: int = 32, batch: int = 2, *, shuffle: bool = True) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, rows, WIDTH, generator=generator)
    return DataLoader(TensorDataset(x, y), batch, shuffle=shuffle)


def trainer(strategy: Strategy | str, folder: str | Path = "", **settings: Any) -> L.Trainer:
    """A Trainer on a rank of the harness, which is one of the ranks that its launcher would have started."""
    as_if_launched()
    ranks = dist.get_world_size()
    where = {"accelerator": "cpu", "devices": ranks}
    if device() == "cuda":  # each rank of a shared GPU is a node of its own
        where = {"accelerator": "gpu", "devices": 1, "num_nodes": ranks}
    given = {"max_epochs": 2, "enable_checkpointing": False, "default_root_dir": folder or None, **QUIET, **settings}
    return L.Trainer(strategy=strategy, **where, **given)


def as_if_launched() -> None:
    os.environ["LOCAL_RANK" if device() == "cpu" else "NODE_RANK"] = str(dist.get_rank())
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message=".*optimizer.step.*")  # torch, of a scheduler that sees no steps


def strategy_of(stage: int | str, **settings: Any) -> Strategy:
    return DDPStrategy(find_unused_parameters=True) if stage == "ddp" else ZeroStrategy(stage=stage, **settings)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights, on every rank; of a model of DDP's, which is plain again after fit, too."""
    try:
        return onefold.full_state_dict(model, every_rank=True)
    except onefold.ModelError:
        return {name: value.clone() for name, value in model.state_dict().items()}


def fitted(
    stage: int | str, make: Callable[[], L.LightningModule] = Lit, zero: dict[str, Any] | None = None, **settings: Any
) -> tuple[L.Trainer, Any]:
    """A model trained on this rank, and its Trainer."""
    module = make()
    found = trainer(strategy_of(stage, **(zero or {})), **settings)
    found.fit(module, data(), data(8, shuffle=False))
    return found, module
