"""Expected throughput against the number of ranks: what the model must give whatever the figures, and what it gives for
the paper's models. It is a model, not a measurement, and says so."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.cli.main import main
from onefold.cost.case import Choice
from onefold.cost.hardware import TABLE, Hardware, hardware
from onefold.cost.search import Question, fits
from onefold.cost.shapes import PAPER, Shape
from onefold.cost.states import StateCost
from onefold.cost.work import Work
from onefold.planner.throughput import STATED, at, expected, rank_counts, scaling
from onefold.settings.widths import Widths

MIXED, ADAM = Widths(compute=2, wire=2, grad=2, master=4), StateCost(8)
V100 = hardware("v100-32")


def question(shape: Shape, ranks: int, machine: Hardware = V100, tp: int = 1, batch: int | None = None) -> Question:
    work = Work(widths=MIXED, shape=shape)
    return Question(work=work, ranks=ranks, hardware=machine, cost=ADAM, tp=tp, batch=batch)


shapes = st.builds(
    lambda layers, width: Shape(layers=layers, hidden=16 * width, heads=16),
    st.integers(1, 24), st.sampled_from([4, 16, 64, 128]),
)  # fmt: skip
grids = st.sampled_from([(1, 1), (4, 1), (8, 2), (16, 1), (32, 4), (64, 1), (128, 16), (512, 8)])  # ranks, tp
machines = st.sampled_from([TABLE[name] for name in ("v100-32", "a100-80", "h200", "ethernet")])


@settings(max_examples=60, deadline=None)
@given(shapes, grids, machines, st.sampled_from([1, 2, 3]), st.floats(1, 1e3), st.floats(1, 1e3))
def test_less_bandwidth_never_gives_more_throughput(shape, grid, machine, stage, slower_nics, slower_node):
    slow = dataclasses.replace(
        machine, nic_rate=machine.nic_rate / slower_nics, node_link=machine.node_link / slower_node
    )
    fast, less = (at(question(shape, grid[0], row, grid[1]), stage) for row in (machine, slow))
    assert fast.batch == less.batch  # links do not change what fits
    assert less.samples_per_s <= fast.samples_per_s * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(shapes, machines, st.sampled_from([0, 1, 2, 3]), st.integers(1, 4))
def test_one_rank_waits_for_no_link(shape, machine, stage, batch):
    point = at(question(shape, 1, machine, batch=batch), stage)
    assert point.step.exposed == point.step.tensor == 0
    assert point.tflops <= machine.flops * machine.efficiency / 1e12


@settings(max_examples=60, deadline=None)
@given(shapes, st.sampled_from([2, 4, 16, 64, 256]), machines, st.integers(1, 8), st.floats(1, 1e4))
def test_where_links_are_the_limit_stage_2_is_as_fast_as_stage_3_at_the_same_batch(shape, n, machine, batch, slower):
    slow = dataclasses.replace(machine, nic_rate=machine.nic_rate / slower, node_link=machine.node_link / slower)
    two, three = (question(shape, n, slow).price(Choice(stage), question(shape, n).grid(), batch) for stage in (2, 3))
    assert two.messages.traffic_elements <= three.messages.traffic_elements
    forward = three.time.compute_s / 4
    if (
        sum(three.messages.gather_s) >= forward
        and two.messages.traffic["reduce"].bytes / two.messages.link("shard") >= 3 * forward
    ):
        assert two.step_s <= three.step_s * (1 + 1e-9)


def test_where_compute_covers_links_stage_3_hides_what_stage_2_waits_for():
    """As the engine does it: stages 1 and 2 gather after the update, when there is nothing left to compute."""
    asked = question(PAPER["60b-wide"].shape, 400, tp=16)
    two, three = (asked.price(Choice(stage, activations="partition"), asked.grid(), 48) for stage in (2, 3))
    gathered = two.messages.traffic["gather-updated"].bytes / two.messages.link("shard")
    assert two.time.step.exposed == pytest.approx(gathered, rel=0.01)
    assert three.time.step.exposed < 0.05 * two.time.step.exposed


def test_60b_speeds_up_by_more_than_its_number_of_ranks_from_64_to_400():
    """The batch is what fits, by the plan's bytes; no term of the model knows of superlinearity."""
    asked = question(PAPER["60b-wide"].shape, 400, tp=16)
    points = expected(asked, 2, (64, 128, 256, 400))
    batches, ratios = [point.batch for point in points], scaling(points)
    assert batches == sorted(set(batches)) and ratios == sorted(set(ratios))
    assert ratios[0] == 1 and ratios[-1] > 1.005
    for point in points:
        grid = dataclasses.replace(asked, ranks=point.ranks).grid()
        choice = Choice(2, activations=point.activations)
        assert [fits(asked.price(choice, grid, b)) for b in (point.batch, point.batch + 1)] == [True, False]


def test_at_one_batch_more_ranks_are_no_more_than_linear():
    """So it is the batch that makes 60B superlinear, and nothing else."""
    points = expected(question(PAPER["60b-wide"].shape, 400, tp=16, batch=16), 2, (64, 128, 256, 400))
    assert all(ratio <= 1 for ratio in scaling(points))


def test_the_papers_batches_give_a_larger_gain_since_they_differ_more():
    names = ("60b-wide-64", "60b-wide-128", "60b-wide-256", "60b-wide")
    points = [at(question(PAPER[n].shape, PAPER[n].ranks, tp=16, batch=PAPER[n].batch), 2) for n in names]
    assert scaling(points)[-1] == pytest.approx(1.05, abs=0.02)


@pytest.mark.parametrize("name, least", [("100b", 30), ("13b-dp", 35)])
def test_large_models_run_near_what_the_paper_measured(name, least):
    """38 and 40 TFLOP/s there."""
    run = PAPER[name]
    assert least < at(question(run.shape, run.ranks, tp=run.tp, batch=run.batch), 2).tflops < 42


def test_numbers_of_ranks_are_those_the_grid_can_have():
    assert rank_counts(question(PAPER["60b-wide"].shape, 400, tp=16)) == [16, 32, 64, 128, 256, 400, 512, 1024]


def test_the_global_batch_bounds_the_batch():
    asked = dataclasses.replace(question(PAPER["1.5b"].shape, 64), max_global_batch=256)
    assert [point.global_batch for point in expected(asked, 2, (64, 128, 256, 512))] == [256, 256, 256]


def scaled(capsys, *arguments: str) -> tuple[int, str]:
    code = main(["plan", "--scaling", "--hardware", "v100-32", *arguments])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_the_command_line_gives_a_table_and_json_and_says_what_they_are(capsys):
    asked = ["--model", "60b-wide", "--tp", "16", "--ranks", "400"]
    code, said = scaled(capsys, *asked)
    assert code == 0 and STATED in " ".join(said.split()) and "1024" in said
    code, said = scaled(capsys, *asked, "--json")
    found = json.loads(said)
    assert found["note"] == STATED and [curve["stage"] for curve in found["curves"]] == [1, 2, 3]
    two = {row["ranks"]: row for row in found["curves"][1]["points"]}
    assert two[64]["to_linear"] == 1 and two[400]["to_linear"] > 1 and two[400]["batch"] > two[64]["batch"]
    assert two[400]["step_s"] == pytest.approx(sum(two[400]["step"].values()))


@pytest.mark.parametrize("arguments", [["--params", "1e9"], ["--model", "1.5b", "--tp", "0"], ["--config", "x.json"]])
def test_what_has_no_curve_is_refused_in_one_line(arguments, capsys):
    code, said = scaled(capsys, *arguments)
    assert code == 2 and said.startswith("onefold: --scaling ") and said.count("\n") == 1


def test_fp32_on_a_gpu_runs_at_the_rate_of_fp32(capsys):
    def chosen(precision: str, machine: str) -> dict:
        asked = ["plan", "--model", "gpt2-1.5b", "--ranks", "8", "--stage", "3", "--batch", "2", "--hardware", machine]
        assert main([*asked, "--precision", precision, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["chosen"]

    half, whole = chosen("bf16", "a100-80"), chosen("fp32", "a100-80")
    assert whole["compute_s"] == pytest.approx(16 * half["compute_s"]) and 0.3 < whole["mfu"] < 0.5
    assert chosen("fp32", "h200")["mfu"] < 1  # measured seconds over the peak of fp32
    assert chosen("fp32", "laptop")["compute_s"] == pytest.approx(chosen("bf16", "laptop")["compute_s"])
