"""The name "onefold" in the registries of Lightning's strategies, of Trainer and of Fabric."""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY, Strategy
from lightning.pytorch.strategies import Strategy as TrainerStrategy
from lightning.pytorch.strategies import StrategyRegistry

NAME = "onefold"


def register(of_trainer: type[TrainerStrategy], of_fabric: type[Strategy]) -> None:
    """Lets strategy="onefold" mean these classes, with the default settings of `Zero`."""
    about = "ZeRO by Onefold, stage 2; for other settings give an instance of {}"
    StrategyRegistry.register(NAME, of_trainer, description=about.format("ZeroStrategy"), override=True)
    STRATEGY_REGISTRY.register(NAME, of_fabric, description=about.format("FabricZeroStrategy"), override=True)
