"""The Python that makes a choice of the plan true, to copy into a training script."""

from __future__ import annotations

from typing import NamedTuple

from onefold.cost.estimate import Estimate

CLASSES = {
    "adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "momentum": "SGD", "adagrad": "Adagrad", "rmsprop": "RMSprop"
}  # fmt: skip
MORE = {"momentum": ", momentum=0.9"}


class Settings(NamedTuple):
    """Names of settings that an Estimate has as numbers only."""

    precision: str = "bf16"
    master: str = "fp32"
    optimizer: str = "adamw"
    lora: int = 0
    optimizer_state: str = "fp32"

    @property
    def text(self) -> str:
        more = "" if self.optimizer_state == "fp32" else f", optimizer state in {self.optimizer_state}"
        more += f", LoRA of rank {self.lora}" if self.lora else ""
        return (self.precision if self.precision == "fp32" else f"{self.precision}, {self.master} master") + more


def script(e: Estimate, settings: Settings) -> str:
    """The lines before and inside a training loop."""
    arguments = ["model", *(f"{name}={value}" for name, value in fields(e, settings).items())]
    grid = e.grid
    shard = grid.shard // grid.sequence
    axes = {"replica": grid.replica, "shard": shard, "sequence": grid.sequence, "tp": grid.tp, "pp": grid.pp}
    lines = ["import torch", "import onefold", "", "onefold.init()"]
    if settings.lora:
        lines.insert(1, "from peft import LoraConfig, get_peft_model")
        lines.append(f'model = get_peft_model(model, LoraConfig(r={settings.lora}, target_modules="all-linear"))')
    if grid.data != grid.ranks or grid.replica > 1:
        sizes = ", ".join(f"{name}={size}" for name, size in axes.items() if size > 1 or name == "shard")
        lines.append(f"mesh = onefold.mesh({sizes})")
        arguments.append("mesh=mesh")
    lines += ["# the model, cut over mesh['tp'] by torch's parallelize_module"] * (grid.tp > 1)
    lines += ["# this rank's part of the model: docs/pipeline.md"] * (grid.pp > 1)
    lines += ["model = onefold.shard(", *(f"    {argument}," for argument in arguments), ")"]
    lines.append(f"optimizer = {_optimizer(settings, in_backward=e.in_backward)}")
    if e.work.tile is not None:
        lines.append(f"# tiles: onefold.tiled(block.mlp, tokens={e.work.tile}) of every block before shard(), and the")
        lines.append(f"# loss by onefold.tiled_cross_entropy(hidden, head.weight, targets, tokens={e.work.tile})")
    if e.work.knows_activations:
        lines.append("")
        micro = f", {e.micro_batches} micro-batches per step" if e.micro_batches > 1 else ""
        lines.append(f"# batch {e.batch} on each replica{micro}; {e.samples_per_step} sequences in all")
    return "\n".join(lines)


def _optimizer(settings: Settings, *, in_backward: bool) -> str:
    name, form = settings.optimizer.lower(), settings.optimizer_state
    more = "" if form == "fp32" else f', state="{form}"'
    more += ", step_in_backward=True" if in_backward else ""
    if name == "muon":
        return f'onefold.Muon(model, lr=0.02, adamw={{"lr": 3e-4}}{more})'
    return f"onefold.Optimizer(model, torch.optim.{CLASSES[name]}, lr=3e-4{MORE.get(name, '')}{more})"


def fields(e: Estimate, settings: Settings) -> dict[str, str]:
    """Arguments of shard(), as they are written in Python."""
    choice = e.choice
    found = {"stage": str(choice.stage)}
    if settings.precision == "fp32":
        found["precision"] = '"fp32"'
    else:
        found["precision"] = f'onefold.Precision(compute="{settings.precision}", master="{settings.master}")'
    if e.work.knows_activations:
        found["activations"] = f'"{choice.activations}"'
    if e.compiled:
        found["compile"] = "True"
    if choice.keep_whole:
        found["keep_whole"] = str(choice.keep_whole)
    if choice.optimizer != "device":
        optimizer = "auto" if choice.device_units else choice.optimizer
        parts = [f'optimizer="{optimizer}"']
        parts += [f'parameters="{choice.parameters}"'] if choice.parameters != "device" else []
        parts += ['path="/scratch"'] if "disk" in (choice.optimizer, choice.parameters) else []
        found["offload"] = f"onefold.Offload({', '.join(parts)})"
    if e.prefetch != 1:
        found["prefetch"] = str(e.prefetch)
    if not e.reshard_after_forward:
        found["reshard_after_forward"] = "False"
    return found
