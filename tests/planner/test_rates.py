"""Plans from what `onefold measure` recorded: exact at measured sizes, between them elsewhere, and whole models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from onefold.cli.main import main
from onefold.cost.case import Choice
from onefold.cost.compute import shape_seconds
from onefold.cost.estimate import Estimate
from onefold.cost.families import FAMILIES
from onefold.cost.hardware import TABLE, hardware, recorded
from onefold.cost.rates import FORMAT, Rates, shipped_rates
from onefold.cost.shapes import Shape
from onefold.cost.states import named_cost
from onefold.cost.work import Work, grid_of
from onefold.settings.widths import widths_of

SHAPE = Shape(layers=24, hidden=4096, heads=32)
FLOPS, BANDWIDTH = 4e14, 4e12
SIZES = (1024, 4096, 16384)


def ideal(flops: float = FLOPS, bandwidth: float = BANDWIDTH, block_s: float = 1e-4, **parts: Any) -> dict[str, Any]:
    """The record of a device whose products all have one rate, and whose other kernels are bound by memory."""

    def product(tokens: int, inputs: int, outputs: int) -> list[float]:
        return [tokens, inputs, outputs, *[2 * tokens * inputs * outputs / flops] * 3]

    rows = [
        product(tokens, a * width, b * width)
        for tokens in SIZES
        for width in (1024, 4096)
        for a, b in ((1, 1), (1, 3), (1, 4), (4, 1))
    ]
    moved = {"norm": (4, 6), "gelu": (4, 6), "add": (6, 6), "copy": (4, 4), "sum": (2, 2)}
    passes = {
        kind: [[numel, forward * numel / bandwidth, backward * numel / bandwidth] for numel in (1 << 20, 1 << 28)]
        for kind, (forward, backward) in moved.items()
    }
    heads = [[n, 128, 1 << 18, 4 * n * 128 * 2**18 / flops, 8 * n * 128 * 2**18 / flops] for n in (512, 4096)]
    return {
        "format": FORMAT, "device": "NVIDIA H200", "kind": "cuda", "memory_bytes": 150 * 10**9,
        "machine": {"memory_bytes": 10**12}, "versions": {"torch": "2"}, "date": "today", "command": "none",
        "products": {"bf16": rows}, "attention": {"bf16": heads}, "elementwise": {"bf16": passes},
        "loss": {"bf16": [[8192, 50304, 8192 * 50304 * 10 / bandwidth, 8192 * 50304 * 10 / bandwidth]]},
        "updates": {"device": [[1 << 27, 26, 26 * 2**27 / bandwidth]], "host": [[1 << 26, 26, 26 * 2**26 / 1e11]]},
        "copies": {"both": 5e10}, "host": {"launch": 5e-6, "block": block_s, "sharded_block": 2 * block_s},
        **parts,
    }  # fmt: skip


def estimate(record: dict[str, Any], ranks: int = 1, activations: str = "keep") -> Estimate:
    work = Work(widths=widths_of("bf16", "split"), shape=SHAPE)
    return Estimate(
        work=work, choice=Choice(3, activations=activations), grid=grid_of(ranks), hardware=recorded(Rates(record)),
        cost=named_cost("adamw"), batch=8,
    )  # fmt: skip


def test_a_measured_product_takes_what_was_measured_and_another_something_between():
    rows = [[1024, 1024, 1024, 1e-5, 2e-5, 3e-5], [4096, 1024, 1024, 8e-5, 9e-5, 9e-5], [1024, 1024, 1023, 1, 1, 1]]
    rates = Rates({"products": {"bf16": rows}})
    assert rates.product("bf16", 1024, 1024, 1024) == pytest.approx((1e-5, 2e-5, 3e-5), rel=1e-4)
    between = rates.product("bf16", 2048, 1024, 1024).forward
    assert 2e-5 < between < 4e-5, "its rate lies between the two rates"
    far = rates.product("bf16", 65536, 1024, 1024).forward
    assert 16 * 7e-5 < far < 16 * 8e-5, "nearly at the rate of the nearest"
    assert rates.product("bf16", 1024, 1024, 1025).forward > 0.9, "columns that no vector divides are another kernel"
    assert rates.product("fp16", 1024, 1024, 1024) == rates.product("bf16", 1024, 1024, 1024)


@pytest.mark.parametrize("name", ["gpt", *FAMILIES])
def test_no_matrix_of_a_model_is_forgotten(name: str):
    shape = SHAPE if name == "gpt" else FAMILIES[name]
    numel = sum(inputs * outputs * times for inputs, outputs, times in shape.products())
    assert numel + shape.vocab * shape.hidden == shape.matmul_numel


def test_a_step_is_its_flops_at_the_measured_rate_and_what_memory_bounds():
    rates = Rates(ideal())
    found = shape_seconds(SHAPE, rates, 8, "keep")
    bare = Work(widths=widths_of("bf16", "split"), shape=SHAPE).flops(8, "keep", grid_of(1)) / FLOPS
    assert bare < found.total < 1.2 * bare
    no_memory = shape_seconds(SHAPE, Rates(ideal(bandwidth=1e30)), 8, "keep")
    assert no_memory.total == pytest.approx(bare, rel=1e-6), "nothing but products and attention"
    again = shape_seconds(SHAPE, rates, 8, "checkpoint")
    assert again.again == pytest.approx(found.forward, rel=0.1) and again[:2] == found[:2]
    half = shape_seconds(SHAPE, rates, 8, "keep", tp=2)
    assert found.total / 2 < half.total < 0.6 * found.total, "norms and sums of residuals are on every rank"
    assert shape_seconds(SHAPE, rates, 8, "keep", pp=2).total == pytest.approx(found.total / 2)
    frozen = shape_seconds(SHAPE, rates, 8, "keep", trained=False)
    assert found.backward - frozen.backward == pytest.approx(bare / 3, rel=0.1)


def test_blocks_measured_whole_count_more_than_the_sum_of_their_kernels_and_long_ones_more_than_short_ones():
    one = Shape(layers=1, hidden=4096, heads=32, vocab=8)
    plain = shape_seconds(one, Rates(ideal()), 8, "keep")
    blocks = {"bf16": [[8192, 4096, 128, 1024, 2 * plain.forward, 3 * plain.backward]]}
    found = shape_seconds(one, Rates(ideal(blocks=blocks)), 8, "keep")
    assert found[:2] == pytest.approx((2 * plain.forward, 3 * plain.backward), rel=0.02)
    long = {"bf16": [[8192, 4096, 128, 1024, 1.5 * sum(blocks["bf16"][0][4:])], [1, 1, 1, 1, 1]]}
    slower = shape_seconds(one, Rates(ideal(blocks=blocks, sustained=long)), 8, "keep")
    assert slower.total == pytest.approx(1.5 * found.total, rel=0.02)


def test_a_host_that_launches_too_slowly_is_what_counts():
    quick, slow = estimate(ideal(block_s=1e-4)), estimate(ideal(block_s=0.1))
    assert quick.time.compute_s == estimate(ideal(block_s=0.0)).time.compute_s
    assert slow.time.compute_s == pytest.approx(0.1 * SHAPE.layers)
    several = estimate(ideal(block_s=0.1), ranks=8)
    copied = 4  # bytes per gradient, into flat buffers
    summed = (6 + 7 * 10 + 8 + 6) / 8  # of 8 parts one is converted, 7 are added in fp32, all is scaled and rounded
    own = 2 * 2 * 2 * SHAPE.numel / 8  # copied at two all-gathers, the second without the unit that forward left
    assert 0.9 * own < several.messages.copied_bytes < own
    moved = ((copied + summed) * SHAPE.numel + several.messages.copied_bytes) / BANDWIDTH
    launched = 0.1 * (SHAPE.layers + len(several.sizes.units))  # a block's, and those of each unit's messages
    assert several.time.compute_s == pytest.approx(launched + moved, rel=1e-4)


def test_a_model_of_unknown_shape_is_planned_at_the_rate_of_models_of_many_layers():
    """Not at that of one layer, of which the loss takes most."""
    rates = shipped_rates("h200")
    assert rates is not None
    found, deep = recorded(rates), Shape(layers=32, hidden=2048, heads=16)
    work = Work(widths=widths_of("bf16", "split"), shape=deep)
    per_second = work.flops(8, "keep", grid_of(1)) / shape_seconds(deep, rates, 8, "keep").total
    assert found.flops * found.efficiency == pytest.approx(per_second, rel=0.15)


def test_a_record_gives_the_machine_and_a_plan_without_one_is_as_before(tmp_path: Path, capsys):
    found = recorded(Rates(ideal()))
    assert (found.memory_bytes, found.pcie_rate, found.host_rate) == (150 * 10**9, 5e10, pytest.approx(1e11))
    assert found.flops == TABLE["h200"].flops and 0.3 < found.efficiency * found.flops / FLOPS < 1
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(ideal()))
    asked = ["plan", "--layers", "24", "--hidden", "4096", "--heads", "32", "--batch", "8", "--json", "--hardware"]
    assert main([*asked, str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"]["name"] == "NVIDIA H200"
    plain = dataclasses.replace(estimate(ideal()), hardware=dataclasses.replace(hardware("h200"), rates=None))
    flops = plain.work.flops(8, "keep", grid_of(1))
    assert plain.time.compute_s == flops / (TABLE["h200"].flops * TABLE["h200"].efficiency)
    assert main([*asked, "none.json"]) == 2 and "No such file" in capsys.readouterr().err


def test_a_plan_has_the_master_that_a_run_has(capsys):
    """5.25B on one H200: 14 bytes per parameter with gradients, of which an fp32 master would take two more."""
    asked = ["plan", "--layers", "24", "--hidden", "4096", "--heads", "32", "--batch", "8", "--activations", "keep"]

    def peak(*more: str) -> int:
        assert main([*asked, "--hardware", "h200", "--stage", "0", "--json", *more]) == 0
        return int(json.loads(capsys.readouterr().out)["recommendation"]["peak_bytes"])

    assert peak() == peak("--master", "split") == peak("--master", "fp32") - 2 * SHAPE.numel
