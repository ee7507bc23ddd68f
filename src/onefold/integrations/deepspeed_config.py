"""DeepSpeed's configuration file, read as settings of Onefold.

Every key has one outcome: it became a setting, it is not needed, it is left to you, it is "auto" and for the caller to
fill in, or it is refused with the reason. Keys that are unknown are refused: nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from onefold.errors import ConfigError
from onefold.integrations.deepspeed_reading import Key, Outcome, Reading
from onefold.integrations.deepspeed_rules import RULES, SECTIONS
from onefold.integrations.deepspeed_schedules import Schedule
from onefold.optim.loss_scale import LossScale
from onefold.settings.limited import read_json
from onefold.settings.offload import Offload
from onefold.settings.precision import Precision
from onefold.settings.zero import Zero

AUTO = "auto"


@dataclass(frozen=True)
class DeepSpeedConfig:
    """What a DeepSpeed configuration says, in settings of Onefold: `shard(model, found.zero)`, and
    `Optimizer(model, found.optimizer, loss_scale=found.loss_scale, **found.optimizer_settings)`.

    >>> import onefold
    >>> found = onefold.from_deepspeed({"gradient_clipping": 1.0, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    >>> found.clip_norm, found.optimizer.__name__, found.optimizer_settings
    (1.0, 'SGD', {'lr': 0.1})
    """

    zero: Zero
    optimizer: type[Optimizer] | None
    """The torch class of its optimizer; None if the file names none."""

    optimizer_settings: Mapping[str, Any]
    schedule: Schedule | None
    """Its learning-rate schedule; `schedule.scheduler(optimizer)` makes it."""

    loss_scale: LossScale | None
    """For fp16."""

    clip_norm: float | None
    """For `optimizer.clip_grad_norm`."""

    micro_batches: int | None
    """Micro-batches per step (gradient_accumulation_steps)."""

    micro_batch_size: int | None
    """Samples of a micro-batch on one rank."""

    global_batch_size: int | None
    """Samples per step, of all ranks."""

    keys: tuple[Key, ...]
    """Every key of the file, and what happened to it."""

    @property
    def open(self) -> tuple[str, ...]:
        """Paths of keys that are "auto" and were not filled in."""
        return tuple(key.path for key in self.keys if key.outcome is Outcome.OPEN)


def from_deepspeed(
    config: str | Path | Mapping[str, Any], auto: Mapping[str, Any] | None = None, **fields: Any
) -> DeepSpeedConfig:
    """Reads a DeepSpeed configuration, a file or its content. Raises if a key asks for what Onefold does not do.

    `auto` fills in keys that are "auto", by their dotted paths, such as {"optimizer.params.lr": 1e-4}; those that it
    leaves out take Onefold's defaults. `fields` are further settings of `Zero`, which go before the file's.

    >>> import onefold
    >>> found = onefold.from_deepspeed({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}})
    >>> found.zero.stage, found.zero.precision
    (3, 'bf16')
    """
    reading = read_config(config, auto)
    refused = [f"{key.path}: {key.text}" for key in reading.keys if key.outcome is Outcome.REFUSED]
    if refused:
        raise ConfigError(f"the DeepSpeed configuration asks for what Onefold does not do: {'; '.join(refused)}")
    return _result(reading, fields)


def read_config(config: str | Path | Mapping[str, Any], auto: Mapping[str, Any] | None = None) -> Reading:
    """Reads a configuration and refuses nothing: `keys` of the result say what would be."""
    content = config if isinstance(config, Mapping) else read_json(Path(config))
    if not isinstance(content, Mapping):
        raise ConfigError(f"{config} is no DeepSpeed configuration: it holds {type(content).__name__}, not an object")
    reading = Reading()
    filled = dict(auto or {})
    leaves = dict(_leaves(content))
    if unknown := sorted(filled.keys() - leaves.keys()):
        raise ConfigError(f"auto= fills in {', '.join(unknown)}, which the configuration does not have")
    for path, value in leaves.items():
        _read_key(reading, path, filled.get(path, value) if value == AUTO else value)
    reading.check()
    return reading


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths of all keys and their values. A section that is read as one, or is switched off, is one key."""
    for key, value in content.items():
        path = f"{prefix}{key}"
        whole = path in SECTIONS or (isinstance(value, Mapping) and value.get("enabled") is False)
        if isinstance(value, Mapping) and not whole:
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _read_key(reading: Reading, path: str, value: Any) -> None:
    """One key: by its own rule, or by that of its section."""
    if isinstance(value, Mapping) and value.get("enabled") is False:
        reading.add(path, "off", Outcome.NOT_NEEDED, "it is switched off")
        return
    rule = RULES.get(path) or next((RULES[f"{s}.*"] for s in _sections(path) if f"{s}.*" in RULES), None)
    if rule is None:
        reading.add(path, value, Outcome.REFUSED, "no key of DeepSpeed that Onefold knows")
    elif value == AUTO:
        reading.add(path, value, Outcome.OPEN, "fill it in by auto=; left as it is, the default of Onefold holds")
    else:
        try:
            outcome, text = rule(reading, path.rpartition(".")[2], value)
        except (ConfigError, TypeError, ValueError, KeyError, OverflowError) as error:
            outcome, text = Outcome.REFUSED, f"{value!r} is not understood: {error}"
        reading.add(path, value, outcome, text)


def _sections(path: str) -> Iterator[str]:
    """The sections around a key, the innermost first."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _result(reading: Reading, fields: Mapping[str, Any]) -> DeepSpeedConfig:
    compute = reading.precision.get("compute", "fp32")
    others = {key: value for key, value in reading.precision.items() if key != "compute" and compute != "fp32"}
    settings = {**reading.zero, "precision": Precision(compute=compute, **others) if others else compute}
    if reading.offload.get("optimizer"):
        settings["offload"] = Offload(**reading.offload)
    return DeepSpeedConfig(
        zero=Zero(**{**settings, **fields}),
        optimizer=reading.optimizer_class(), optimizer_settings=reading.optimizer_settings,
        schedule=Schedule(reading.schedule, reading.schedule_settings) if reading.schedule else None,
        loss_scale=LossScale(**reading.loss_scale) if compute == "fp16" else None,
        clip_norm=reading.numbers.get("clip_norm"), micro_batches=reading.numbers.get("micro_batches"),
        micro_batch_size=reading.numbers.get("micro_batch_size"),
        global_batch_size=reading.numbers.get("global_batch_size"), keys=tuple(reading.keys),
    )  # fmt: skip
