"""Plans of losses and MLPs by tiles: beside runs that were measured, and what is refused."""

import dataclasses
import json

import pytest
import torch

import onefold
from benchmarks.predicted_cases import DOCS, long_contexts
from onefold.cli.main import main
from onefold.cost.case import Choice
from onefold.cost.families import FAMILIES
from onefold.cost.hardware import hardware
from onefold.cost.search import Question, longest_sequence
from onefold.cost.states import named_cost
from onefold.cost.tiles import MLP_KERNELS
from onefold.cost.work import Work, grid_of
from onefold.errors import ConfigError
from onefold.settings.widths import widths_of

QWEN = dataclasses.replace(FAMILIES["qwen2.5-1.5b"], seq=131072)
CHOICE = Choice(3, activations="checkpoint+host")


def question(tile: int | None, *, sequence: int = 1) -> Question:
    work = Work(widths=widths_of("bf16", "split"), shape=QWEN, tile=tile)
    return Question(
        work=work,
        ranks=sequence,
        hardware=hardware("h200"),
        cost=named_cost("adamw", "fp32"),
        sequence=sequence,
        batch=1,
    )


def test_plans_are_near_the_runs_on_an_h200():
    found = list(long_contexts())
    assert len(found) == 4
    for case in found:
        assert 1.0 < case.estimate.peak_bytes / case.peak_bytes < 1.05, case.name
        assert 0.9 < case.estimate.step_s / case.step_s < 1.05, case.name


def test_tiles_make_room_for_longer_sequences_and_cost_another_forward_of_mlps():
    whole, tiled = question(None), question(4096)
    grid = whole.grid()
    assert longest_sequence(tiled, CHOICE, grid) > 8 * longest_sequence(whole, CHOICE, grid)
    plain, by_tiles = whole.price(CHOICE, grid, 1), tiled.price(CHOICE, grid, 1)
    mlps = 2 * QWEN.seq * sum(a * b * times for a, b, times in QWEN.mlp_products())
    assert tiled.work.tile_flops(1, grid) == mlps and whole.work.tile_flops(1, grid) == 0
    assert by_tiles.mfu < plain.mfu  # which does not count them
    assert by_tiles.time.compute_s > plain.time.compute_s and by_tiles.peak_bytes < plain.peak_bytes / 4


@pytest.mark.parametrize("machine", ["h200", "a100-80"])
def test_tiles_of_one_token_take_the_time_to_launch_their_kernels(machine):
    def seconds(tile: int | None) -> float:
        asked = dataclasses.replace(question(tile), hardware=hardware(machine))
        return asked.price(CHOICE, asked.grid(), 1).time.compute_s

    one, two, usual = seconds(1), seconds(2), seconds(4096)
    assert one == pytest.approx(2 * two, rel=0.01) and two > 2 * usual
    assert seconds(8192) == pytest.approx(usual, rel=0.02), "the device takes longer than the host"


def test_a_tile_has_as_many_kernels_as_are_counted():
    class Gated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))

    def kernels(tokens: int) -> int:
        mlp = onefold.tiled(Gated(), tokens=16)
        with torch.profiler.profile() as trace:
            mlp(torch.ones(1, tokens, 8, requires_grad=True)).sum().backward()
        names = {"aten::mm", "aten::silu", "aten::mul", "aten::silu_backward", "aten::add", "aten::add_"}
        return sum(event.name in names for event in trace.events())

    assert (kernels(16 * 32) - kernels(16 * 16)) / 16 == pytest.approx(MLP_KERNELS, abs=1)


def test_a_larger_tile_takes_more_memory_and_cut_sequences_less():
    peaks = [question(tile).price(CHOICE, grid_of(1), 1).peak_bytes for tile in (1024, 4096, 16384)]
    assert peaks == sorted(set(peaks))
    cut = question(4096, sequence=2)
    assert longest_sequence(cut, CHOICE, cut.grid()) > 1.9 * longest_sequence(question(4096), CHOICE, grid_of(1))


def test_blocks_that_keep_all_but_what_mlps_save():
    work, plain = question(4096).work, question(None).work
    kept = work.activations(1, "keep", grid_of(1)).kept_per_block
    assert plain.activations(1, "keep", grid_of(1)).kept_per_block - kept == QWEN.seq * 4 * QWEN.intermediate * 2


def test_a_frozen_head_has_no_gradient():
    heads = [dataclasses.replace(question(512).work, lora=lora).activations(1, "keep", grid_of(1)) for lora in (0, 8)]
    assert heads[0].head - heads[1].head >= 4 * QWEN.vocab * QWEN.hidden
    assert heads[0].logits - heads[1].logits == 2 * QWEN.vocab * QWEN.hidden


def test_plans_of_two_ranks_are_near_the_runs_that_share_an_h200():
    """Which were not used for the two fitted numbers of tiles.py."""
    for row in json.loads((DOCS / "long-context-1.5b-2-ranks-h200.json").read_text()):
        shape, sequence = dataclasses.replace(QWEN, seq=row["tokens"]), row["sequence"]
        asked = question(4096, sequence=sequence)
        asked = dataclasses.replace(asked, ranks=2, work=dataclasses.replace(asked.work, shape=shape, _cache={}))
        peak = asked.price(CHOICE, asked.grid(), 1).peak_bytes
        assert 1.0 < peak / row["peak_bytes"] < 1.05, (row["sequence"], peak, row["peak_bytes"])


@pytest.mark.parametrize(
    ("tile", "more", "said"),
    [
        (0, {"shape": QWEN}, "at least one token"),
        (2.5, {"shape": QWEN}, "at least one token"),
        (4096, {"numel": 10**9}, "needs a shape"),
    ],
)
def test_what_is_no_tile_is_refused(tile, more, said):
    with pytest.raises(ConfigError, match=said):
        Work(widths=widths_of("bf16", "split"), tile=tile, **more)


def test_a_tiled_loss_with_a_split_head_is_refused():
    asked = dataclasses.replace(question(4096), tp=2, ranks=2)
    with pytest.raises(ConfigError, match=r"tile=4096 with tp=2.*use tp=1"):
        assert asked.price(CHOICE, asked.grid(), 1).peak_bytes


def test_tiles_are_offered_where_nothing_fits_and_not_twice(capsys):
    asked = ["plan", "--model", "qwen2.5-1.5b", "--seq", "4000000", "--hardware", "h200"]
    said = [" ".join(_printed(capsys, [*asked, *more]).split()) for more in ([], ["--tile", "4096"])]
    assert "Nothing fits" in said[0] and "Nothing fits" in said[1]
    assert ["--tile 4096" in one for one in said] == [True, False]
    assert "longest sequence that fits" in said[1]


def test_a_plan_that_may_choose_tensor_parallelism_does_not_split_a_tiled_loss(capsys):
    asked = ["plan", "--model", "8b", "--ranks", "8", "--tp", "0", "--hardware", "h200", "--tile", "1024", "--json"]
    assert {row["tp"] for row in json.loads(_printed(capsys, asked))["recommendations"]} == {1}


def test_every_choice_says_how_long_a_sequence_fits(capsys):
    asked = [
        "plan",
        "--model",
        "qwen2.5-1.5b",
        "--seq",
        "65536",
        "--ranks",
        "2",
        "--sequence",
        "2",
        "--hardware",
        "h200",
    ]
    found = json.loads(_printed(capsys, [*asked, "--json"]))
    rows = [*found["stages"], *found["variants"]]
    assert len(rows) > 8 and all(row["longest_sequence"] > 65536 for row in rows if row["fits"])
    tiled = json.loads(_printed(capsys, [*asked, "--tile", "4096", "--json"]))["stages"]
    assert all(long["longest_sequence"] > 2 * row["longest_sequence"] for long, row in zip(tiled, found["stages"]))
    plain = json.loads(_printed(capsys, ["plan", "--model", "8b", "--ranks", "8", "--json"]))["stages"]
    assert {row["longest_sequence"] for row in plain} == {None}


def _printed(capsys, arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_a_loss_by_tiles_takes_as_long_as_its_bytes_and_blocks_stay_whole():
    whole, both = question(None), question(4096)
    alone = dataclasses.replace(both, work=dataclasses.replace(both.work, tiled_mlps=False, _cache={}))
    plain, by_tiles, loss = (one.price(CHOICE, one.grid(), 1) for one in (whole, both, alone))
    rates = hardware("h200").rates
    assert rates is not None
    moved = 6 * QWEN.seq * QWEN.vocab  # bytes: logits are read twice and written once
    saved = sum(rates.loss("bf16", QWEN.seq, QWEN.vocab)) - rates.moved("bf16", moved, 0)
    assert plain.time.compute_s - loss.time.compute_s == pytest.approx(saved, rel=0.02)
    assert loss.work.tile_flops(1, alone.grid()) == 0 and loss.time.compute_s < by_tiles.time.compute_s
    assert by_tiles.peak_bytes < loss.peak_bytes < plain.peak_bytes, "MLPs are whole, logits are not"


def test_blocks_that_are_recomputed_in_part_take_their_share_of_time_and_memory():
    def priced(policy: str, recomputed: int | None = None) -> tuple[float, float]:
        one = question(None)
        shape = dataclasses.replace(QWEN, seq=1024)
        asked = dataclasses.replace(one, work=dataclasses.replace(one.work, shape=shape, _cache={}))
        found = asked.price(Choice(3, activations=policy), one.grid(), 16)
        found = dataclasses.replace(found, recomputed=recomputed)
        return found.time.compute_s, found.activations.kept_per_block

    keep, every, half = priced("keep"), priced("checkpoint"), priced("checkpoint", QWEN.layers // 2)
    assert priced("checkpoint", 0) == pytest.approx(keep)
    assert priced("checkpoint", QWEN.layers) == pytest.approx(every)
    assert half == pytest.approx([(a + b) / 2 for a, b in zip(keep, every, strict=True)])
