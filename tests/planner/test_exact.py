"""What is planned is what ranks measure: states and traffic to the byte, the peak within a tenth."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import onefold
from onefold.cost.shapes import Shape
from onefold.cost.states import state_bytes
from onefold.model.survey import survey
from onefold.observe.rehearsal import rehearse
from onefold.observe.simulation import train_step
from onefold.optim.elementwise import OPTIMIZERS, cost_of
from onefold.settings.precision import Precision
from onefold.settings.zero import Zero
from onefold.train.run.model import GPT
from tests.harness import run_ranks
from tests.harness.grids import thinned
from tests.models import AnySize

PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(compute="bf16"),
    "split": Precision(compute="bf16", master="split"),
    "fp16": Precision(compute="fp16"),
}


def measure(model: nn.Module, sample: Any, zero: Zero, optimizer: str, steps: int = 3) -> list[Any]:
    """On a rank: states, constant buffers, the peak and the traffic of a steady step."""
    onefold.init()
    onefold.shard(model, zero)
    cls, kwargs = OPTIMIZERS[optimizer]
    half = zero.precision == "fp16" or zero.precision == PRECISIONS["fp16"]
    scale = {"loss_scale": onefold.LossScale(initial=1.0)} if half else {}
    trained = onefold.Optimizer(model, cls, **scale, **kwargs)
    for _ in range(steps):
        peak = train_step(model, trained, sample)
    now = onefold.memory(model)
    states = (now.parameters.measured, now.gradients.measured, now.optimizer.measured)
    return [states, now.communication.measured, peak, dict(onefold.traffic(model).flows)]


def random_cases(fields: dict[str, Any], zeros: list[Zero], optimizer: str) -> list[list[Any]]:
    """On a rank: one model under several settings."""
    found = []
    for zero in zeros:
        torch.manual_seed(0)
        found.append(measure(AnySize(**fields), torch.randn(4, 7), zero, optimizer, steps=2))
    return found


def states_by_formula(model: nn.Module, zero: Zero, optimizer: str, ranks: int, rank: int) -> tuple[int, ...]:
    """From the layout alone: no tensors, no processes."""
    seen = survey(model, zero, ranks)
    policy = Precision.of(zero.precision).decided(own_sum=True, cuda=False)
    units = [unit.size(rank, policy) for unit in seen.units]
    return tuple(state_bytes(units, [unit.placement for unit in seen.units], cost_of(optimizer)))


CASES = itertools.count()
BARE = settings(deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
RANDOM = given(
    fields=st.fixed_dictionaries(
        {
            "width": st.integers(1, 40),
            "inner": st.integers(1, 90),
            "depth": st.integers(0, 3),
            "frozen": st.booleans(),
            "buffers": st.booleans(),
        }
    ),
    optimizer=st.sampled_from(["adamw", "momentum", "sgd", "adagrad"]),
    bucket_bytes=st.sampled_from([256, 4096, 32 << 20]),
)


@settings(BARE, max_examples=4)
@RANDOM
def test_states_and_traffic_of_random_models_are_planned_to_the_byte(fields, optimizer, bucket_bytes):
    assert_planned(fields, optimizer, bucket_bytes)


@pytest.mark.soak
@settings(BARE, max_examples=100)
@RANDOM
def test_states_and_traffic_of_a_hundred_random_models_are_planned_to_the_byte(fields, optimizer, bucket_bytes):
    assert_planned(fields, optimizer, bucket_bytes)


def assert_planned(fields: dict[str, Any], optimizer: str, bucket_bytes: int) -> None:
    """Each model at one N and one precision, all stages; over four models every N from 1 to 4 and every precision."""
    case = next(CASES)
    ranks, name = 1 + case % 4, list(PRECISIONS)[(case + case // 4) % 4]
    zeros = [Zero(stage=stage, precision=PRECISIONS[name], bucket_bytes=bucket_bytes) for stage in range(4)]
    found = run_ranks(ranks, random_cases, fields, zeros, optimizer)
    for rank, by_stage in enumerate(found):
        for zero, (states, *_) in zip(zeros, by_stage):
            assert states_by_formula(AnySize(**fields), zero, optimizer, ranks, rank) == states, (zero, rank)
    for zero, (states, _, _, sent) in list(zip(zeros, found[0]))[1 + case % 3 :: 2]:
        planned = rehearse(AnySize(**fields), torch.zeros(4, 7), zero, cost_of(optimizer), ranks=ranks)
        assert tuple(planned.states) == states, zero
        assert planned.sent == sent, zero


def convolutions() -> tuple[nn.Module, Any]:
    def stage(inside: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(), nn.MaxPool2d(2))

    model = nn.Sequential(stage(3, 32), stage(32, 64), stage(64, 128), nn.Flatten(), nn.Linear(128 * 16, 10))
    return model, torch.randn(8, 3, 32, 32)


def gpt() -> tuple[nn.Module, Any]:
    tokens = torch.zeros(2, 128, dtype=torch.long)
    return GPT(Shape(layers=4, hidden=128, heads=4, seq=128, vocab=256)), (tokens, tokens)


def llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=256,
    )  # fmt: skip
    tokens = torch.zeros(2, 64, dtype=torch.long)
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


MODELS = {"gpt": gpt, "convolutions": convolutions, "llama": llama}


def model_case(name: str, zero: Zero) -> list[Any]:
    torch.manual_seed(0)
    return measure(*MODELS[name](), zero, "adamw")


@pytest.mark.parametrize(("name", "stage"), thinned(MODELS, [0, 2, 3]))
def test_the_peak_is_planned_within_a_tenth(name, stage):
    zero = Zero(stage=stage, bucket_bytes=1 << 20)
    (states, buffers, peak, sent), _ = run_ranks(2, model_case, name, zero)
    model, sample = MODELS[name]()
    planned = rehearse(model, sample, zero, cost_of("adamw"), ranks=2)
    assert tuple(planned.states) == states
    assert planned.sent == sent
    assert planned.communication == pytest.approx(buffers, rel=0.1)
    assert planned.peak_bytes == pytest.approx(peak, rel=0.1)


TIERS = {
    "host": {"optimizer": "host"},
    "half": {"optimizer": "auto", "device_bytes": 330_000},
    "device, host and disk": {"optimizer": "auto", "device_bytes": 250_000, "host_bytes": 240_000},
    "parameters of some units on the device": {"optimizer": "auto", "device_bytes": 130_000},
    "all on the host": {"optimizer": "host", "parameters": "host"},
    "all on disk": {"optimizer": "disk", "parameters": "disk"},
}


DECIDED = {
    "half": {"device", "host"},
    "device, host and disk": {"device", "host", "disk"},
    "parameters of some units on the device": {"host"},
}


def tier_case(zero: Zero) -> dict[str, Any]:
    torch.manual_seed(0)
    fields = {"width": 40, "inner": 90, "depth": 6, "frozen": True, "buffers": True}
    states, buffers, peak, sent = measure(model := AnySize(**fields), torch.randn(4, 7), zero, "adamw")
    rows = {(row.state, row.place == "disk"): row.measured for row in onefold.memory(model).elsewhere}
    auto = onefold.Offload.of(zero.offload).optimizer == "auto"
    kept = onefold.placement(model)
    tiers, parameters = (kept.optimizer_tiers, kept.parameter_tiers) if auto else (None, None)
    found = {"states": states, "buffers": buffers, "peak": peak, "sent": sent, "rows": rows, "tiers": tiers}
    return found | {"parameters": parameters}


@pytest.mark.parametrize(
    ("tiers", "stage"), [pytest.param("host", 1, marks=pytest.mark.soak), ("host", 2), *((tiers, 3) for tiers in TIERS)]
)
def test_states_on_every_tier_are_planned_to_the_byte(tiers, stage, tmp_path):
    path = {"path": tmp_path} if "disk" in tiers else {}
    zero = Zero(stage=stage, precision="bf16", bucket_bytes=8192, offload=onefold.Offload(**TIERS[tiers], **path))
    found = run_ranks(2, tier_case, zero)[0]
    model = AnySize(width=40, inner=90, depth=6, frozen=True, buffers=True)
    known = {"tiers": found["tiers"], "parameter_tiers": found["parameters"]}
    planned = rehearse(model, torch.zeros(4, 7), zero, cost_of("adamw"), ranks=2, **known)
    assert tuple(planned.states) == found["states"]
    assert planned.sent == found["sent"]
    for disk, states in ((False, planned.host), (True, planned.disk)):
        for state in ("optimizer", "parameters"):
            assert getattr(states, state) == found["rows"].get((state, disk), 0), (state, disk)
    assert planned.communication == pytest.approx(found["buffers"], rel=0.1)
    assert planned.peak_bytes == pytest.approx(found["peak"], rel=0.1)
    some = tiers == "parameters of some units on the device"
    assert set((found["parameters"] or {"": "device"}).values()) == ({"device", "host"} if some else {"device"})
    assert planned.parameter_tier == ("host" if some else onefold.Offload.of(zero.offload).parameters or "device")
    decided = set((found["tiers"] or {}).values())
    assert decided == DECIDED.get(tiers, set())
    assert (planned.states.optimizer > 0) == ("device" in decided) and planned.host.optimizer > 0


def test_a_rank_on_a_gpu_is_rehearsed_on_the_cpu_with_the_split_master_that_it_has() -> None:
    model, sample = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), torch.zeros(8, 64)
    numel = sum(param.numel() for param in model.parameters())

    def bytes_per_parameter(hardware: str) -> list[float]:
        found = onefold.plan(model, sample, ranks=4, hardware=hardware, precision="bf16")
        return [round(row.states_bytes / numel, 1) for row in found.stages]

    assert bytes_per_parameter("h200") == [14.0, 6.5, 5.0, 3.5]  # bf16 and 16 more bits, gradients, two moments
    assert bytes_per_parameter("laptop") == [16.0, 7.0, 5.5, 4.0]  # bf16, fp32, gradients, two moments
