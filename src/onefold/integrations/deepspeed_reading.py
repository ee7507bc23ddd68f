"""What a DeepSpeed configuration says, collected key by key, and what keys say together."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from onefold.integrations.deepspeed_schedules import KNOWN

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adam": torch.optim.AdamW,  # unless adam_w_mode is off
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}


class Outcome(Enum):
    """What happened to a key."""

    BECAME = "became"
    NOT_NEEDED = "not needed"
    YOURS = "left to you"
    OPEN = "auto"
    REFUSED = "refused"


class Key(NamedTuple):
    """One key of the file, by its dotted path, and what happened to it."""

    path: str
    value: Any
    outcome: Outcome
    text: str


@dataclass
class Reading:
    """What was found so far."""

    keys: list[Key] = field(default_factory=list)
    zero: dict[str, Any] = field(default_factory=lambda: {"stage": 0})
    precision: dict[str, Any] = field(default_factory=dict)
    offload: dict[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    decoupled: bool = True  # weight decay: DeepSpeed's Adam is AdamW unless told otherwise
    optimizer_settings: dict[str, Any] = field(default_factory=dict)
    schedule: str | None = None
    schedule_settings: dict[str, Any] = field(default_factory=dict)
    loss_scale: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)

    def add(self, path: str, value: Any, outcome: Outcome, text: str) -> None:
        self.keys.append(Key(path, value, outcome, text))

    def refuse(self, path: str, text: str) -> None:
        """Refuses a key after all, because of another."""
        self._say(path, Outcome.REFUSED, text)

    def _say(self, path: str, outcome: Outcome, text: str) -> None:
        self.keys = [key._replace(outcome=outcome, text=text) if key.path == path else key for key in self.keys]

    def check(self) -> None:
        """What keys say together."""
        zero = "zero_optimization"
        if self.precision.get("compute") == "both":
            self.refuse("fp16.enabled", "bf16 is enabled too; choose one of them")
            self.precision["compute"] = "bf16"
        if self.offload.get("parameters") and self.zero["stage"] != 3:
            self.refuse(f"{zero}.offload_param.device", "parameters are offloaded at stage 3 only")
            self.offload.pop("parameters")
        tier = self.offload.get("parameters")
        if tier and not self.offload.get("optimizer"):
            self.offload["optimizer"] = tier
            text = f'Offload(optimizer="{tier}", parameters="{tier}"): the optimizer state is where its parameters are'
            self._say(f"{zero}.offload_param.device", Outcome.BECAME, text)
        if "path" in self.offload and "disk" not in (self.offload.get("optimizer"), tier):
            self.offload.pop("path")
            for which in ("offload_optimizer", "offload_param"):
                self._say(f"{zero}.{which}.nvme_path", Outcome.NOT_NEEDED, "nothing is on disk")
        if "disk" in self.offload.values() and "path" not in self.offload:
            for which in ("offload_optimizer", "offload_param"):
                self.refuse(f"{zero}.{which}.device", "nvme needs nvme_path")
        for name, path in (("optimizer", "optimizer.params"), ("schedule", "scheduler.params")):
            if getattr(self, name) is None and getattr(self, f"{name}_settings"):
                for key in [key.path for key in self.keys if key.path.startswith(path)]:
                    self.refuse(key, f"{path.partition('.')[0]}.type is missing")
        self._check_settings()

    def _check_settings(self) -> None:
        if self.optimizer is not None and (cls := self.optimizer_class()) is not None:
            known = inspect.signature(cls).parameters
            for name in [name for name in self.optimizer_settings if name not in known]:
                self.refuse(f"optimizer.params.{name}", f"torch.optim.{cls.__name__} has no such setting")
        if self.schedule in KNOWN:
            for name in self.schedule_settings.keys() - KNOWN[self.schedule]:
                self.refuse(f"scheduler.params.{name}", f"{self.schedule} has no such setting")

    def optimizer_class(self) -> type[Optimizer] | None:
        cls = OPTIMIZERS.get(self.optimizer or "")
        return torch.optim.Adam if self.optimizer == "adam" and not self.decoupled else cls
