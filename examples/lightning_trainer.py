"""A Lightning module trained by ZeRO: the only line that is new is the strategy.

    python examples/lightning_trainer.py --devices 2 --out run                  # Lightning starts the other rank
    python examples/lightning_trainer.py --devices 2 --out run --epochs 6       # goes on where it stopped
    torchrun --standalone --nproc-per-node 2 examples/lightning_trainer.py --devices 2 --out other

Checkpoints can be resumed with another number of devices and another stage. `run/weights.ckpt` is a plain file, for
`Bytes.load_from_checkpoint`.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from onefold.lightning import ZeroStrategy

LENGTH = 32  # bytes that the model sees at a time


class Bytes(L.LightningModule):
    """Predicts the next byte of a text."""

    def __init__(self, hidden: int = 64, layers: int = 2, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(256, hidden)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, 4, 2 * hidden, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device, dtype=hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (tokens,) = batch
        logits = self(tokens[:, :-1]).float()  # the loss in fp32, whatever the precision
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def windows(batch: int) -> DataLoader[tuple[Tensor, ...]]:
    """Pieces of a text that every machine has."""
    text = torch.frombuffer(bytearray(Path(os.__file__).read_bytes()), dtype=torch.uint8).long()
    rows = text[: 32 * (LENGTH + 1)].view(32, LENGTH + 1)
    return DataLoader(TensorDataset(rows), batch, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Lightning module by ZeRO.")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("run"))
    flags = parser.parse_args()

    L.seed_everything(0, verbose=False)
    checkpoints = ModelCheckpoint(flags.out, "{epoch}", save_last=True)
    trainer = L.Trainer(
        strategy=ZeroStrategy(stage=flags.stage),
        accelerator="cpu" if not torch.cuda.is_available() else "cuda",
        devices=flags.devices,
        precision=flags.precision,
        max_epochs=flags.epochs,
        gradient_clip_val=1.0,
        callbacks=[checkpoints],
        logger=CSVLogger(flags.out, name="log", flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = flags.out / "last.ckpt"
    started = any(last.glob("step-*"))  # a checkpoint has this name once it is complete
    trainer.fit(Bytes(), windows(batch=4), ckpt_path=last if started else None)
    trainer.save_checkpoint(flags.out / "weights.ckpt", weights_only=True)


if __name__ == "__main__":
    main()
