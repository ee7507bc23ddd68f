"""What the planner recommends in situations whose answer is known, and that it says why."""

import dataclasses

import pytest

from onefold.cost.case import Choice
from onefold.cost.hardware import hardware
from onefold.cost.recommend import activations_for, recommend
from onefold.cost.search import Question, fewest_ranks, largest_batch
from onefold.cost.shapes import PAPER, Shape
from onefold.cost.states import StateCost
from onefold.cost.work import Work
from onefold.settings.widths import Widths

MIXED, ADAM = Widths(2, 2, 2, 4), StateCost(8)


def question(shape_or_count, ranks, device, **fields):
    given = {"shape": shape_or_count} if isinstance(shape_or_count, Shape) else {"numel": int(shape_or_count)}
    return Question(work=Work(widths=MIXED, **given), ranks=ranks, hardware=hardware(device), cost=ADAM, **fields)


BERT = Shape(layers=24, hidden=1024, heads=16, seq=512, vocab=30522)
GPT_1B = PAPER["1.5b"].shape
GPT_10B = PAPER["10b-dp"].shape
GPT_60B = PAPER["60b-wide"].shape
GPT_200B = Shape(layers=96, hidden=13056, heads=96)


def best(asked):
    return recommend(asked)[0]


@pytest.mark.parametrize("batch", [None, 1, 2, 8])
def test_memory_comfortable_shards_the_optimizer_only(batch):
    found = best(question(GPT_1B, 64, "a100-80", batch=batch))
    assert found.fits and found.estimate.choice.stage == 1


@pytest.mark.parametrize("batch", [None, 4])
def test_memory_tight_and_a_fast_network_gives_stage_2(batch):
    found = best(question(GPT_10B, 128, "v100-32", batch=batch))
    assert found.estimate.choice[:4] == Choice(2)[:4]
    assert "stage 1" in found.reason and "stage 3 would save" in found.reason


def test_memory_critical_gives_stage_3():
    found = best(question(GPT_60B, 64, "a100-80"))
    assert found.estimate.choice.stage == 3 and found.estimate.choice.optimizer == "device"


def test_huge_gives_stage_3_with_offload():
    found = best(question(GPT_200B, 16, "a100-80"))
    assert found.estimate.choice.stage == 3 and found.estimate.choice.optimizer in ("host", "disk")


def test_a_device_with_room_left_keeps_some_units():
    """10B on one H200: all states do not fit, and with the optimizer on the host much of the device is empty."""
    rows = recommend(question(Shape(layers=50, hidden=4096, heads=32), 1, "h200", batch=4))
    mixed = next(row for row in rows if row.estimate.choice.device_units)
    assert mixed.fits and f"but for {mixed.estimate.choice.device_units} units" in str(mixed.estimate.choice)
    plain = next(row for row in rows if row.estimate.choice == mixed.estimate.choice._replace(device_units=0))
    assert mixed.estimate.step_s < plain.estimate.step_s
    more = mixed.estimate.choice._replace(device_units=mixed.estimate.choice.device_units + 1)
    assert not dataclasses.replace(mixed.estimate, choice=more).fits, "one more would not fit"


def test_bert_needs_little_or_nothing():
    assert best(question(BERT, 8, "a100-80")).estimate.choice.stage in (0, 1)


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize("batch", [None, 1, 8])
def test_slow_ethernet_never_gets_stage_3(batch, ranks):
    assert best(question(GPT_1B, ranks, "ethernet", batch=batch)).estimate.choice.stage < 3


def test_pipeline_stages_wait_for_each_other():
    alone = question(GPT_10B, 16, "a100-80", batch=1, micro_batches=4)
    piped = question(GPT_10B, 16, "a100-80", batch=1, micro_batches=4, pp=4)
    assert alone.price(Choice(1), alone.grid(), 1).time.step.bubble == 0
    step = piped.price(Choice(1), piped.grid(), 1).time.step
    assert step.bubble == pytest.approx(step.compute * 3 / 4)


@pytest.mark.parametrize(
    "count, ranks, device, stages",
    [(1e9, 64, "a100-80", {1}), (7.5e9, 64, "v100-32", {2}), (60e9, 64, "v100-32", {3}), (1e9, 1, "a100-80", {0})],
)
def test_a_bare_count_is_judged_by_its_states(count, ranks, device, stages):
    assert best(question(count, ranks, device)).estimate.choice.stage in stages


def test_what_cannot_fit_says_what_it_would_need():
    ranked = recommend(question(1e12, 2, "v100-32"))
    assert not any(row.fits for row in ranked)
    assert all("needs" in row.reason for row in ranked)


def test_block_inputs_are_shared_at_60b_and_go_to_the_host_at_170b_only():
    shared = best(question(GPT_60B, 128, "v100-32", tp=16, batch=32))
    assert shared.estimate.choice.activations == "partition"
    assert "P_a" in shared.reason
    heavy = question(PAPER["170b"].shape, 400, "v100-32", tp=16, batch=12)
    stage2, _ = activations_for(heavy, Choice(2), heavy.grid())
    assert stage2.fits and stage2.choice.activations == "partition+host"


def test_tensor_parallelism_stays_inside_a_node():
    ranked = recommend(question(GPT_60B, 64, "a100-80", tp=None, max_global_batch=512))
    assert max(row.estimate.grid.tp for row in ranked) == 8


def test_the_global_batch_is_respected():
    for row in recommend(question(GPT_1B, 64, "a100-80", max_global_batch=256)):
        assert row.estimate.samples_per_step <= 256
    too_many = recommend(question(GPT_1B, 64, "a100-80", max_global_batch=32))
    assert not any(row.fits for row in too_many) and "64 replicas" in too_many[0].reason
    cut = recommend(question(GPT_1B, 64, "a100-80", max_global_batch=32, tp=None))
    assert cut[0].fits and cut[0].estimate.grid.tp > 1 and cut[0].estimate.samples_per_step <= 32


def test_largest_batch_is_the_last_that_fits():
    asked = question(GPT_10B, 128, "v100-32")
    choice = Choice(2)
    found = largest_batch(asked, choice, asked.grid())
    assert found > 0
    assert asked.price(choice, asked.grid(), found).fits
    assert not asked.price(choice, asked.grid(), found + 1).fits


def test_fewest_ranks_is_the_first_number_that_fits():
    asked = question(60e9, 64, "v100-32")
    found = fewest_ranks(asked, Choice(3))
    assert 43 <= found <= 45  # 960 GB of states, 22.4 GB of each device
    assert fewest_ranks(asked, Choice(0)) is None
