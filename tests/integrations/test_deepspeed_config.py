"""DeepSpeed's configurations: what is asked for becomes a setting, or is refused with the reason."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import onefold
from onefold import ConfigError
from onefold.cli.main import main
from onefold.integrations.deepspeed_config import read_config
from onefold.integrations.deepspeed_reading import Outcome
from onefold.integrations.deepspeed_rules import RULES, SECTIONS
from onefold.integrations.deepspeed_schedules import Schedule
from tests.harness import run_ranks
from tests.integrations.shipped import SHIPPED
from tests.models import Stack, blocks

LOSS_SCALE = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
CPU = {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize("name", SHIPPED)
def test_files_that_libraries_ship_are_understood(name: str, tmp_path: Path) -> None:
    one = SHIPPED[name]
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(one.content))
    for given_as in (one.content, path, str(path)):
        found = onefold.from_deepspeed(given_as)
        assert (found.zero.stage, found.zero.precision, found.zero.offload) == (one.stage, one.precision, one.offload)
    autos = {key.path for key in found.keys if key.value == "auto"}
    assert set(found.open) == autos
    assert all(key.text for key in found.keys)


def test_what_becomes_of_keys_that_only_some_files_have_is_said() -> None:
    said = {key.path: key.text for key in read_config({
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {**CPU, "nvme_path": "/nvme"}},
    }).keys}  # fmt: skip
    assert said["bfloat16.enabled"] == 'precision="bf16"'
    assert said["zero_optimization.offload_param.nvme_path"] == "nothing is on disk"
    assert said["zero_optimization.offload_param.device"] == (
        'Offload(optimizer="host", parameters="host"): the optimizer state is where its parameters are'
    )


def test_numbers_optimizer_and_loss_scale_come_along() -> None:
    content = {
        "fp16": {"enabled": True, **LOSS_SCALE},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": [0.8, 0.99], "weight_decay": 0.1}},
        "gradient_clipping": 0.5, "gradient_accumulation_steps": 4, "train_micro_batch_size_per_gpu": 2.0,
    }  # fmt: skip
    found = onefold.from_deepspeed(content, auto={"optimizer.params.lr": 3e-4}, stage=2, bucket_bytes=1 << 20)
    assert found.optimizer is torch.optim.AdamW, "DeepSpeed's Adam decouples weight decay"
    assert found.optimizer_settings == {"lr": 3e-4, "betas": (0.8, 0.99), "weight_decay": 0.1}
    assert found.loss_scale == onefold.LossScale(initial=2.0**16, growth_interval=1000, hysteresis=2, floor=1.0)
    assert (found.clip_norm, found.micro_batches, found.micro_batch_size) == (0.5, 4, 2)
    assert (found.zero.stage, found.zero.bucket_bytes) == (2, 1 << 20)
    content["optimizer"]["params"]["adam_w_mode"] = False  # type: ignore[index]
    assert onefold.from_deepspeed(content).optimizer is torch.optim.Adam


REFUSED = {
    "zero_optimization.zero_quantized_weights": {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
    "zero_optimization.mics_shard_size": {"zero_optimization": {"stage": 3, "mics_shard_size": 8}},
    "zero_optimization.offload_param.device": {"zero_optimization": {"stage": 2, "offload_param": CPU}},
    "zero_optimization.offload_optimizer.device": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
    "zero_optimization.stage": {"zero_optimization": {"stage": 4}},
    "fp16.loss_scale": {"fp16": {"enabled": True, "loss_scale": 128}},
    "fp16.enabled": {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
    "optimizer.type": {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1.0}}},
    "optimizer.params.freeze_step": {"optimizer": {"type": "AdamW", "params": {"freeze_step": 4}}},
    "optimizer.params.lr": {"optimizer": {"params": {"lr": 1.0}}},
    "scheduler.type": {"scheduler": {"type": "OneCycle"}},
    "scheduler.params.total_num_steps": {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 3}}},
    "tensor_parallel": {"tensor_parallel": {"autotp_size": 2}},
    "train_batch_size": {"train_batch_size": 1.5},
    "zero_optimisation.stage": {"zero_optimisation": {"stage": 3}},
    "communication_data_type": {"communication_data_type": "int8"},
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_onefold_does_not_do_is_refused_by_its_path(path: str) -> None:
    keys = {key.path: key for key in read_config(REFUSED[path]).keys}
    assert keys[path].outcome is Outcome.REFUSED and keys[path].text
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        onefold.from_deepspeed(REFUSED[path])


def test_sections_that_are_switched_off_refuse_nothing() -> None:
    names = ("fp16", "amp", "elasticity", "tensorboard", "eigenvalue", "flops_profiler")
    off = {name: {"enabled": False} for name in names}
    assert all(key.outcome is Outcome.NOT_NEEDED for key in read_config(off).keys)


@given(st.dictionaries(st.sampled_from(sorted(RULES)), st.none() | st.booleans() | st.integers() | st.text(max_size=5)))
def test_no_value_of_a_known_key_ends_in_an_exception_and_none_is_forgotten(values: dict[str, Any]) -> None:
    content: dict[str, Any] = {}
    for path, value in values.items():
        if path in SECTIONS:
            continue
        *sections, name = path.replace("*", "lr").split(".")
        at = content
        for section in sections:
            at = at.setdefault(section, {})
        at[name] = value
    found = read_config(content).keys
    assert len({key.path for key in found}) == len(found) and all(key.text for key in found)


def test_a_file_that_is_none_and_an_auto_for_nothing_are_named(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[1]")
    with pytest.raises(ConfigError, match="not an object"):
        onefold.from_deepspeed(path)
    with pytest.raises(ConfigError, match=r"optimizer\.params\.lr, which the configuration does not have"):
        onefold.from_deepspeed({}, auto={"optimizer.params.lr": 1.0})


@pytest.mark.parametrize(
    ("kind", "settings", "wanted"),
    [
        ("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"}, [0, 0, 0.5, 1, 1.5, 2, 2]),
        ("WarmupLR", {"warmup_num_steps": 4, "warmup_min_lr": 1}, [1, 1, 1.5, 1 + math.log(3, 4), 2, 2, 2]),
        (
            "WarmupDecayLR",
            {"warmup_num_steps": 2, "total_num_steps": 4, "warmup_max_lr": 4, "warmup_type": "linear"},
            [0, 0, 2, 4, 2, 0, 0],
        ),
        (
            "WarmupCosineLR",
            {"warmup_num_steps": 2, "total_num_steps": 4, "warmup_type": "linear", "cos_min_ratio": 0.5},
            [0, 0, 1, 1.5, 1, 1, 1],
        ),
    ],
)
def test_schedules_have_the_learning_rates_of_deepspeeds(
    kind: str, settings: dict[str, Any], wanted: list[float]
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = Schedule(kind, settings).scheduler(optimizer)
    rates = []
    for _ in wanted:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx(wanted)


def test_a_schedule_that_ends_needs_its_end() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    with pytest.raises(ConfigError, match="total_num_steps"):
        Schedule("WarmupDecayLR", {}).scheduler(optimizer)


def trained(by_file: bool) -> list[float]:
    torch.manual_seed(0)
    model: nn.Module = Stack(blocks(2, 16), nn.Linear(16, 4))
    if by_file:
        found = onefold.from_deepspeed(
            {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "gradient_clipping": 0.1,
             "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
             "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}}
        )  # fmt: skip
        model = onefold.shard(model, found.zero)
        assert found.optimizer is not None and found.schedule is not None and found.clip_norm == 0.1
        optimizer = onefold.Optimizer(model, found.optimizer, **found.optimizer_settings)
        scheduler = found.schedule.scheduler(optimizer)
    else:
        model = onefold.shard(model, stage=3, precision="bf16")
        optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, max(0, step - 1) / 3))
    losses = []
    for step in range(5):
        batch = torch.randn(3, 16, generator=torch.Generator().manual_seed(step))
        loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.clip_grad_norm(0.1)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def both() -> tuple[list[float], list[float]]:
    return trained(by_file=True), trained(by_file=False)


def test_a_model_trains_by_the_file_as_by_settings() -> None:
    for by_file, by_settings in run_ranks(2, both):
        assert by_file == by_settings and by_file[-1] < by_file[0]


def test_the_command_prints_every_key_and_exits_by_what_is_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "ds_config.json"
    content = SHIPPED["accelerate: zero_stage3_offload"].content
    for extra, code in (({}, 0), ({"elasticity": {"enabled": True}}, 1)):
        path.write_text(json.dumps(content | extra))
        assert main(["import-config", str(path)]) == code
        said = capsys.readouterr().out
        assert all(key.path in said and key.text in said for key in read_config(path).keys)
    assert "refused:\n  elasticity" in said
    assert main(["import-config", str(path), "--json"]) == 1
    listed = json.loads(capsys.readouterr().out)
    assert {row["path"] for row in listed} == {key.path for key in read_config(path).keys}
