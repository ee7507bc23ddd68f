"""A DeepSpeed configuration beside TrainingArguments: "auto" is the Trainer's, and what both say must agree.

As transformers does with DeepSpeed itself: a value of the file that contradicts TrainingArguments is refused, and a
schedule of the file takes the place of the Trainer's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from onefold import ConfigError, DeepSpeedConfig
from onefold.integrations.deepspeed_schedules import KNOWN, Schedule

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object  # the Trainer class comes behind it


class Pair(NamedTuple):
    """A value of the file, and the argument of the Trainer that says the same."""

    key: str
    found: Any
    argument: str
    given: Any


class FollowsDeepSpeed(Base):
    """What comes before a sharded Trainer class where --zero is a DeepSpeed configuration."""

    deepspeed_config: DeepSpeedConfig
    lr_scheduler: Any  # of the Trainer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wrong = [pair for pair in _pairs(self.deepspeed_config, self.args) if pair.found not in (None, pair.given)]
        if wrong:
            said = "; ".join(f"{p.key} is {p.found!r}, but {p.argument} is {p.given!r}" for p in wrong)
            raise ConfigError(
                f"the DeepSpeed configuration and TrainingArguments disagree: {said}; set the key to 'auto', or the "
                f"argument to the same"
            )

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        schedule = self.deepspeed_config.schedule
        if schedule is None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            args = self.args
            auto = {
                "warmup_min_lr": 0.0, "warmup_max_lr": args.learning_rate, "total_num_steps": num_training_steps,
                "warmup_num_steps": args.get_warmup_steps(num_training_steps),
            }  # fmt: skip
            known = {name: value for name, value in auto.items() if name in KNOWN[schedule.kind]}
            made = Schedule(schedule.kind, {**known, **schedule.settings})
            self.lr_scheduler = made.scheduler(self.optimizer if optimizer is None else optimizer)
            self._created_lr_scheduler = True
        return self.lr_scheduler


def _pairs(config: DeepSpeedConfig, args: Any) -> Iterator[Pair]:
    settings = config.optimizer_settings
    for key, found, argument in (
        ("train_micro_batch_size_per_gpu", config.micro_batch_size, "per_device_train_batch_size"),
        ("gradient_accumulation_steps", config.micro_batches, "gradient_accumulation_steps"),
        ("gradient_clipping", config.clip_norm, "max_grad_norm"),
        ("optimizer.params.lr", settings.get("lr"), "learning_rate"),
        ("optimizer.params.eps", settings.get("eps"), "adam_epsilon"),
        ("optimizer.params.weight_decay", settings.get("weight_decay"), "weight_decay"),
    ):
        yield Pair(key, found, argument, getattr(args, argument))
    if "betas" in settings:
        given = (args.adam_beta1, args.adam_beta2)
        yield Pair("optimizer.params.betas", tuple(settings["betas"]), "(adam_beta1, adam_beta2)", given)
    if config.optimizer is not None:
        asked = str(getattr(args.optim, "value", args.optim)).split("_")[0]
        yield Pair("optimizer.type", config.optimizer.__name__.lower(), "optim", asked)


def following(cls: type, config: DeepSpeedConfig) -> type:
    """A subclass of a sharded Trainer class that keeps to a DeepSpeed configuration."""
    return type(cls.__name__, (FollowsDeepSpeed, cls), {"deepspeed_config": config, "__module__": __name__})
