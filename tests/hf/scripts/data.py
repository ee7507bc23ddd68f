"""Synthetic data for the scripts: tokens that depend on nothing but their place."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

VOCABULARY = 64


class Sentences(Dataset):
    """Sentences of several lengths, padded; a fifth of them has half of its labels ignored."""

    def __init__(self, size: int, length: int = 12) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(3, VOCABULARY, (size, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        real = torch.arange(len(tokens)) < len(tokens) - index % 5
        labels = torch.where(real, tokens, -100)
        if index % 5 == 0:
            labels[: len(tokens) // 2] = -100
        return {"input_ids": torch.where(real, tokens, 0), "attention_mask": real.long(), "labels": labels}
