"""Strategies for Lightning: `Trainer(strategy="onefold")` and `Fabric(strategy="onefold")` train by ZeRO."""

import onefold.lightning.framework  # noqa: F401  first: it says what to install where Lightning is missing
from onefold.lightning.fabric import FabricZeroStrategy
from onefold.lightning.register import register
from onefold.lightning.trainer import ZeroStrategy

__all__ = ["FabricZeroStrategy", "ZeroStrategy"]

register(ZeroStrategy, FabricZeroStrategy)
