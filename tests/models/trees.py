"""Trees of modules without a forward, for whoever looks for blocks in them."""

from __future__ import annotations

from torch import nn


class LayerTree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(2, 2)
        self.mlp = nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2))


class TransformerTree(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.layers = nn.ModuleList([LayerTree() for _ in range(layers)])
        self.head = nn.Linear(2, 4)


class ResidualTree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 1))


class ExpertsTree(nn.Module):
    """A mixture-of-experts layer: a list of equals inside each block."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(2, 4)
        self.experts = nn.ModuleList([LayerTree() for _ in range(4)])
