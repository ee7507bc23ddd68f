"""The answer of `onefold plan` on one screen: first what to choose, no line wider than the screen, no figure cut."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from onefold.cli.main import main
from onefold.cli.tables import print_table

ASKED = {
    "a large model": ["--model", "128b", "--ranks", "64", "--hardware", "h200"],
    "a bare count": ["--params", "7.5e9", "--ranks", "64", "--hardware", "v100-32"],
    "a CPU": ["--model", "gpt-tiny", "--ranks", "2", "--hardware", "laptop", "--tokens", "1e9"],
    "what does not fit": ["--model", "1t", "--ranks", "2", "--hardware", "ethernet"],
    "another mesh": ["--params", "7.5e9", "--ranks", "512"],
}


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("arguments", ASKED.values(), ids=ASKED.keys())
def test_no_line_is_wider_than_the_screen(arguments, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["plan", *arguments]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= columns
    assert "…" not in said.replace("weight…", ""), "a figure or a name was cut"


def test_the_guide_shows_the_answer_that_the_command_gives(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    guide = (Path(__file__).parents[2] / "docs" / "planning.md").read_text()
    command, shown = re.search(r"`onefold (plan --model 128b [^`]*)` begins:\n\n```\n(.*?)```", guide, re.S).groups()
    assert main(command.split()) == 0
    assert capsys.readouterr().out.startswith(shown)


def test_the_answer_comes_first_and_is_the_one_of_the_json(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    asked = ["plan", "--model", "8b-dp", "--ranks", "16", "--hardware", "a100-80"]
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main([*asked, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    best, chosen = plan["recommendation"], plan["chosen"]
    assert (best["label"], best["batch"], best["peak_bytes"]) == (
        chosen["label"], chosen["batch"], chosen["peak_bytes"]
    )  # fmt: skip
    assert lines[1].endswith("A100 80 GB, DGX (16 shard)") and not lines[2]
    assert lines[3] == f"Choose {best['label']}, batch {best['batch']}, activations checkpoint, no offload."
    why = " ".join(lines[4:6])
    assert why.startswith(f"Why: {best['reason']}."[: len(lines[4])])
    expected = next(line for line in lines if line.startswith("Expect "))
    assert f"{chosen['tokens_per_s']:,.0f} tokens/s, MFU {chosen['mfu']:.0%}." in expected
    stages = [line.split("│")[1:-1] for line in lines if re.match(r"│ [→ ] [0-3]", line)]
    assert [row[0].strip("→ ") for row in stages] == ["0", "1", "2", "3"]
    rows = {one["label"]: one for one in plan["recommendations"]}
    for cells in stages:
        one = rows[f"stage {cells[0].strip('→ ')}"]
        assert cells[0].strip().startswith("→") == (one["label"] == best["label"])
        assert int(cells[1]) == one["batch"] and cells[4].strip() == ("yes" if one["fits"] else "no")


def test_the_bar_has_as_much_of_each_part_as_the_row(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    asked = ["plan", "--model", "128b", "--ranks", "64", "--hardware", "h200", "--batch", "4"]
    assert main(asked) == 0
    bar = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("[P"))
    assert len(bar) == 80
    assert main([*asked, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    row, memory = plan["chosen"], plan["hardware"]["memory_bytes"]
    for letter, field in (("P", "params_bytes"), ("O", "optimizer_bytes"), ("A", "activations_bytes")):
        assert bar.count(letter) == pytest.approx(78 * row[field] / memory, abs=1.01)
    assert bar.count(".") == pytest.approx(78 * (1 - row["peak_bytes"] / memory), abs=1.01)


def test_where_nothing_fits_the_answer_says_so_and_what_would(capsys):
    assert main(["plan", "--model", "1t", "--ranks", "2", "--hardware", "ethernet"]) == 0
    said = capsys.readouterr().out
    assert "Nothing fits. Closest: stage 3" in said and "too much" in said
    assert "Choose" not in said and "What would change the answer" in said


def _said(capsys, *asked: str) -> str:
    assert main(["plan", *asked]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_plan_that_chooses_tp_shows_its_own_tp_everywhere(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    asked = ["plan", "--model", "60b", "--ranks", "64", "--tp", "0"]
    assert main([*asked, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    tp, chosen = plan["recommendation"]["tp"], plan["chosen"]
    assert tp > 1 and f"{tp} tp" in plan["grid"]
    of_the_stage = next(row for row in plan["stages"] if row["stage"] == chosen["stage"])
    assert of_the_stage["states_bytes"] == chosen["states_bytes"]
    assert main(asked) == 0
    out = capsys.readouterr().out
    stages = [[cell.strip("→ ") for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    for stage, _, states, peak, *_ in stages:
        assert _bytes(states) <= _bytes(peak), f"stage {stage}"
    assert "and cost 50% more traffic" in " ".join(out.split()), "stage 3 at another tp and batch is no comparison"


def _bytes(said: str) -> float:
    amount, unit = said.replace(",", "").split()
    return float(amount) * {"GB": 1e9, "MB": 1e6}[unit]


def test_where_nothing_fits_at_any_tp_the_answer_says_so(capsys):
    said = _said(capsys, "--model", "llama-3-8b", "--ranks", "8", "--tp", "0", "--seq", "4000000")
    assert "Nothing fits. Closest:" in said and "activations partition+host" in said


def test_a_global_batch_that_is_too_small_is_no_question_of_memory(capsys):
    said = _said(capsys, "--model", "llama-3-8b", "--ranks", "8", "--max-global-batch", "1")
    assert "Closest: stage 1, batch 1," in said
    assert "Why: it makes a global batch of 8 with 1 on each of 8 replicas, and 1 is allowed." in said
    assert "Try --tp, --pp, fewer ranks, or a larger --max-global-batch." in said and "more memory" not in said


def test_what_offload_and_pipelines_cost_is_among_what_would_change_the_answer(capsys):
    alone = _said(capsys, "--model", "qwen2.5-14b", "--hardware", "h200")
    assert "more ranks: without offload, stage 3 fits on 2 or more" in alone
    assert "more memory: stage 0 needs devices of" in alone
    assert (
        main(["plan", "--model", "qwen2.5-14b", "--hardware", "h200", "--ranks", "2", "--offload", "none", "--json"])
        == 0
    )
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert chosen["fits"] and chosen["host_bytes"] == 0
    cut = ["--model", "llama-3-8b", "--ranks", "10", "--pp", "5"]
    assert "stages of the pipeline wait for each other 12 s of 14 s" in _said(capsys, *cut)
    assert "stages of the pipeline" not in _said(capsys, *cut, "--batch", "1", "--micro-batches", "128")


def test_stages_with_other_activations_than_the_choice_are_named(capsys):
    asked = ["--model", "llama-3-8b", "--ranks", "8"]
    assert main(["plan", *asked, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    zero = next(one for one in plan["recommendations"] if one["label"] == "stage 0")
    assert zero["activations"] == "checkpoint+host" != plan["chosen"]["activations"]
    assert "Stage 0: activations checkpoint+host." in _said(capsys, *asked)


def test_a_frozen_model_says_how_many_times_as_much_stage_3_sends(capsys):
    said = _said(capsys, "--model", "mixtral-8x7b", "--lora", "16", "--ranks", "8", "--pp", "4", "--micro-batches", "8")
    assert re.search(r"do not need and send [\d,]+ times as much\.", said)


def test_the_first_line_says_how_long_a_sequence_is_and_small_models_have_a_size(capsys):
    assert "sequences of 4,096 tokens" in _said(capsys, "--model", "llama-3-8b", "--ranks", "8")
    assert "gpt-tiny: 842k parameters, sequences of" in _said(capsys, "--model", "gpt-tiny", "--hardware", "laptop")


def test_a_link_that_is_the_bound_and_more_units_than_there_are_are_said_in_words(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    asked = ["plan", "--model", "gpt2", "--ranks", "8", "--hardware", "ethernet", "--stage", "3", "--batch", "1"]
    assert main(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The link is the bound." in said and "links: the link is the bound: all-gathers take longer" in said
    assert main([*asked, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["chosen"]
    assert row["bandwidth_bound"] and row["k_star"] > row["units"] > 0
    assert f"takes the compute of k* = {row['k_star']} units, and there are {row['units']};" in said
    assert main([*asked, "--network-gb", "10000", "--node-link-gb", "10000"]) == 0
    assert "the link is the bound" not in capsys.readouterr().out


def test_a_table_wider_than_the_screen_becomes_several_and_loses_nothing():
    heads = ["name", *(f"head {number}" for number in range(12))]
    rows = [[f"row {row}", *(f"{row * 1000 + number:,} GB" for number in range(12))] for row in range(3)]
    for columns in (40, 80):
        out = io.StringIO()
        print_table(Console(file=out, width=columns, force_terminal=True, color_system=None), "title", heads, rows)
        said = out.getvalue()
        assert max(map(len, said.splitlines())) <= columns
        assert all(cell in said for row in rows for cell in row) and all(head in said for head in heads)
        assert said.count("row 2") > 1, "each part says which row it is"
