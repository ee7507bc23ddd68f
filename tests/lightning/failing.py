"""The example, and after it a training whose rank 1 raises in its third step; Lightning starts the ranks."""

from __future__ import annotations

import lightning as L
from torch import Tensor

from examples import lightning_trainer as example
from tests.lightning.lit import QUIET, Lit, data


class Failing(Lit):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if self.global_rank == 1 and index == 2:
            raise ArithmeticError("rank 1 gives up")
        return super().training_step(batch, index)


if __name__ == "__main__":
    example.main()
    trainer = L.Trainer(strategy="onefold", accelerator="cpu", devices=2, enable_checkpointing=False, **QUIET)
    trainer.fit(Failing(), data())
