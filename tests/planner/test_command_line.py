"""`onefold plan`, `verify` and `simulate` as a user meets them."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
import torch
import tyro

import onefold
from onefold.cli.answer import show_answer
from onefold.cli.main import main
from onefold.cli.verify import EXACT, PEAK, STATES, Check, VerifyCommand, compare, verdict
from onefold.cost.shapes import Shape
from onefold.observe.rehearsal import rehearse
from onefold.observe.simulation import train_step
from onefold.optim.elementwise import cost_of
from onefold.settings.zero import Zero
from onefold.train.run.fits import on_host
from onefold.train.run.model import GPT
from tests.harness import run_ranks
from tests.harness.patience import PATIENCE_S
from tests.security.reached import CAN_ENTER, ENTER, listeners_of_all_its_life, outside_loopback
from tests.train.launched import launched

KEYS = {
    "stage", "params_bytes", "grads_bytes", "optimizer_bytes", "states_bytes", "peak_bytes", "traffic_elements",
    "step_s", "fits",
}  # fmt: skip


def plan(capsys, *arguments: str) -> dict:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_bare_count_is_planned_with_the_papers_accounting(capsys):
    found = plan(capsys, "--params", "7.5e9", "--ranks", "64")
    assert [row["stage"] for row in found["stages"]] == [0, 1, 2, 3]
    assert all(row.keys() >= KEYS for row in found["stages"])
    gigabytes = [row["states_bytes"] / 1e9 for row in found["stages"]]
    assert gigabytes == pytest.approx([120, 31.4, 16.6, 1.875], abs=0.05)
    assert {"stage", "reason", "batch"} <= found["recommendation"].keys()
    found = plan(capsys, "--params", "7.5e9", "--ranks", "64", "--hardware", "v100-32")
    largest = [row["largest_model"] / 1e9 for row in found["stages"]]
    assert largest == pytest.approx([2, 7.64, 14.4, 128], rel=0.005)


def test_a_models_name_is_text_and_not_markup(capsys):
    net = type("[red]Net[/red]", (torch.nn.Linear,), {})
    show_answer(onefold.plan(net(8, 8), torch.ones(2, 8), ranks=2))
    assert capsys.readouterr().out.startswith("[red]Net[/red]: ")


def test_split_masters_save_two_bytes_per_parameter(capsys):
    found = plan(capsys, "--params", "1e9", "--ranks", "8", "--master", "split")
    assert found["stages"][0]["states_bytes"] == pytest.approx(14e9, rel=1e-6)  # and a step count per unit


def test_a_named_model_gets_time_tokens_and_days(capsys):
    found = plan(capsys, "--model", "8b-dp", "--ranks", "128", "--hardware", "v100-32", "--tokens", "3e11")
    row = found["stages"][2]
    assert row["step_s"] == pytest.approx(
        sum(row[key] for key in ("compute_s", "exposed_s", "tensor_s", "update_s", "transfer_s", "bubble_s"))
    )
    assert row["days"] == pytest.approx(3e11 / row["tokens_per_s"] / 86400)
    assert row["largest_batch"] >= 1 and row["fewest_ranks"] >= 1
    assert found["stages"][3]["break_even_batch"] >= 1 and row["break_even_batch"] is None
    assert {message["purpose"] for message in row["messages"]} >= {"reduce", "gather-updated"}


def test_a_hugging_face_config_is_planned(tmp_path, capsys):
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plan(capsys, "--config", str(tmp_path), "--ranks", "2", "--seq", "32")
    assert found["parameters"] == 2 * 128 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    assert found["stages"][3]["states_bytes"] < found["stages"][0]["states_bytes"]


def test_the_table_is_for_people(capsys):
    assert main(["plan", "--model", "gpt2-1.5b", "--ranks", "8", "--all"]) == 0
    text = capsys.readouterr().out
    assert "stage 3" in text and "what to choose" in text and "tokens/s" in text


BAD = {
    "a negative count": ["--params", "-5", "--ranks", "4"],
    "no ranks": ["--params", "1e9", "--ranks", "0"],
    "a negative batch": ["--model", "1.5b", "--ranks", "4", "--batch", "-1"],
    "heads that do not divide hidden": ["--layers", "2", "--hidden", "100", "--heads", "3", "--ranks", "2"],
    "heads that do not divide by tp": ["--layers", "2", "--hidden", "96", "--heads", "3", "--ranks", "2", "--tp", "2"],
    "ranks that are no product of axes": ["--model", "1.5b", "--ranks", "6", "--tp", "4"],
    "an unknown model": ["--model", "gpt9", "--ranks", "2"],
    "unknown hardware": ["--params", "1e9", "--ranks", "2", "--hardware", "abacus"],
    "an unknown optimizer": ["--params", "1e9", "--ranks", "2", "--optimizer", "lamb2"],
    "half a shape": ["--layers", "2", "--ranks", "2"],
    "no model": ["--ranks", "2"],
    "two models": ["--params", "1e9", "--model", "1.5b", "--ranks", "2"],
    "P_a without tp": ["--model", "1.5b", "--ranks", "2", "--activations", "partition"],
    "a page of no kind": ["--params", "1e9", "--ranks", "2", "--page", "out.gif"],
    "more stages than layers": ["--layers", "2", "--hidden", "64", "--heads", "2", "--ranks", "4", "--pp", "4"],
    "memory that is no number": ["--params", "1e9", "--ranks", "2", "--memory-gb", "nan"],
    "buckets that are no number": ["--params", "1e9", "--ranks", "2", "--bucket-mb", "inf"],
    "buckets of nothing": ["--params", "1e9", "--ranks", "2", "--bucket-mb", "1e-9"],
    "more tokens than there are": ["--params", "1e9", "--ranks", "2", "--tokens", "1e300"],
    "tokens below zero": ["--params", "1e9", "--ranks", "2", "--tokens", "-5"],
    "a sequence of a bare count": ["--params", "1e9", "--ranks", "2", "--seq", "32"],
    "a setting that a config cannot have": ["--config", "config.json", "--ranks", "2", "--tp", "2"],
    "as many layers as no model has": ["--model", "gpt2", "--ranks", "2", "--layers", "1" + "0" * 30],
    "as many words as no model has": ["--model", "gpt2", "--ranks", "2", "--vocab", "1" + "0" * 30],
    "as many ranks as there are nowhere": ["--model", "gpt2", "--ranks", "1" + "0" * 30],
    "as many micro-batches as in no step": ["--model", "gpt2", "--ranks", "2", "--micro-batches", "1" + "0" * 30],
    "a batch of 1e30": ["--model", "gpt2", "--ranks", "2", "--batch", "1" + "0" * 30],
    "no such config": ["--config", "/nowhere/config.json", "--ranks", "2"],
}  # fmt: skip


@pytest.mark.parametrize("arguments", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_exit_code_2(arguments, capsys):
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("onefold: ") and "\n" not in said and "Traceback" not in said


WORDS = {
    "a page where a folder is wanted": (["report", "run", "--out", "a.html"], "--out a.html is no folder: report.html"),
    "a number in words": (["plan", "--params", "7b"], "--params '7b' is not a number"),
    "half a rank": (["plan", "--ranks", "1.5"], "--ranks '1.5' is not a whole number"),
    "an unknown precision": (["plan", "--precision", "int8"], "--precision 'int8' is unknown; use one of bf16"),
    "a setting that is none": (["verify", "--rank", "2"], "unrecognized options: --rank, 2; perhaps --ranks is meant"),
    "a setting without its value": (["train", "--lr"], "--lr needs a value"),
    "no checkpoint": (["inspect"], "PATH is missing: The --out of `onefold train`"),
    "a path longer than the screen": (["inspect", "one", "/very/" * 30], f"unrecognized options: {'/very/' * 30};"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "said"), WORDS.values(), ids=WORDS.keys())
def test_words_that_are_no_settings_are_one_line(words, said, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"onefold: {said}") and err.count("\n") == 1 and not out
    assert err.endswith(f"see onefold {words[0]} --help\n") or words[0] == "report"


@pytest.mark.parametrize(
    "content", ['{"model_type": "frobnicator"}', "{}", "not json", '{"model_type": "llama", "hidden_size": -3}']
)
def test_a_config_that_is_no_model_is_one_line(content, tmp_path, capsys):
    (tmp_path / "config.json").write_text(content)
    assert main(["plan", "--config", str(tmp_path / "config.json"), "--ranks", "2"]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and "config.json" in said


def test_a_process_of_its_own_ends_with_exit_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "onefold.cli.main", "plan", "--params", "-1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Traceback" not in done.stderr


def test_verify_runs_real_ranks_with_their_flags_finds_the_plan_right_and_is_reached_on_loopback_only(tmp_path):
    """--master begins like a flag of torchrun, which once took it."""
    shape = ("--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "16", "--vocab", "64")  # 16 bits are slow here
    model = (*shape, "--precision", "bf16", "--master", "split")
    flags = (*model, "--ranks", "2", "--stage", "3", "--json")
    with launched(tmp_path / "deep", *flags, command="verify", limit=ENTER if CAN_ENTER else "") as launch:
        seen = listeners_of_all_its_life(launch)
        code, out, err = launch.end()
    assert code == 0, err
    assert bool(seen) == CAN_ENTER and outside_loopback(seen) == set()
    told = json.loads(out)
    assert told["good"]
    checks = {row["what"]: row for row in told["checks"]}
    assert checks["states"]["planned"] == checks["states"]["measured"] > 0
    assert checks["gather-forward (all-gather)"]["planned"] == checks["gather-forward (all-gather)"]["measured"] > 0
    assert checks["peak"]["good"]


@pytest.mark.parametrize("command", [["verify"], ["plan", "--ranks", "2"], ["simulate"]])
def test_a_split_master_of_fp32_is_refused(command, capsys):
    assert main([*command, "--model", "gpt-tiny", "--precision", "fp32", "--master", "split"]) == 2
    assert "master='split' needs compute='bf16'" in capsys.readouterr().err


def test_what_goes_wrong_on_a_rank_of_verify_is_said_once(tmp_path):
    flags = ("--model", "gpt-tiny", "--ranks", "2", "--offload", "disk", "--offload-path", str(tmp_path))
    with launched(tmp_path, *flags, command="verify", limit="ulimit -f 1000") as launch:
        code, _, err = launch.end()
    ours = [line for line in err.splitlines() if line.startswith("onefold: ")]  # torch has a warning of its own
    assert code == 2 and len(ours) == 1 and "ulimit -f" in ours[0] and "Traceback" not in err, err


def test_a_signal_ends_verify_and_all_that_it_started(tmp_path):
    flags = ("--model", "gpt-tiny", "--ranks", "2")
    with launched(tmp_path, *flags, command="verify") as launch:
        rank = launch.wait_for(lambda: len(found := launch.rank_pids()) == 2 and found, "both ranks")[1]
        os.kill(rank, signal.SIGSTOP)  # so that no rank comes to the end by itself
        launch.process.send_signal(signal.SIGTERM)
        assert launch.process.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM
        assert launch.gone()
        assert launch.end()[2] == "onefold: ended by SIGTERM\n"


def checks_against(planned_layers: int) -> list[dict]:
    """One rank trains two layers, beside a plan for so many."""
    onefold.init()
    rows = torch.zeros(1, 16, dtype=torch.long)
    shapes = [Shape(layers=layers, hidden=32, heads=2, seq=16, vocab=64) for layers in (planned_layers, 2)]
    planned = rehearse(GPT(shapes[0]), (rows, rows), Zero(stage=2), cost_of("adamw"), ranks=1)
    model = onefold.shard(GPT(shapes[1]), stage=2)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW)
    peak = [train_step(model, optimizer, (rows, rows)) for _ in range(3)][-1]
    return [check._asdict() | {"good": check.good} for check in compare(planned, model, peak)]


def test_verify_ends_with_1_where_the_plan_is_wrong():
    right, wrong = (run_ranks(1, checks_against, layers)[0] for layers in (2, 3))
    assert verdict(right) == 0
    assert verdict(wrong) == 1 and {"states", "peak"} <= {row["what"] for row in wrong if not row["good"]}
    assert [Check("states", 1000, measured, STATES).good for measured in (1020, 1021, 979)] == [True, False, False]
    assert [Check("peak", 1000, measured, PEAK).good for measured in (1100, 1101)] == [True, False]
    assert not Check("reduce calls", 5, 6, EXACT).good


def test_verify_hands_its_settings_to_the_ranks():
    command = VerifyCommand(model="gpt-tiny", ranks=3, stage=1, bucket_mb=0.5, json=True)
    assert tyro.cli(VerifyCommand, args=command.arguments(), config=(tyro.conf.FlagCreatePairsOff,)) == command


@pytest.mark.parametrize(
    "command", [["verify", "--ranks", "2"], ["simulate", "--ranks", "4", "--device", "cpu", "--json"]]
)
def test_a_trial_that_cannot_fit_is_refused_before_it_takes_memory(command, capsys):
    assert main([*command, "--model", "1t"]) == 2
    out, err = capsys.readouterr()
    assert "stage 3 does not fit: the plan for 1,0" in err and err.count("\n") == 1 and not out


def test_the_verdict_of_verify_is_one_table_for_each_pipeline_stage(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    row = {"planned": 1_234_567, "measured": 1_234_567, "tolerance": 0.02, "good": True}
    names = ("gather-backward (all-gather)", "gather-backward (all-gather) calls", "tensor-parallel (all-reduce)")
    asked = VerifyCommand(model="gpt-tiny", ranks=4, pp=2)
    asked.show([{**row, "what": f"{name}, stage {stage}"} for stage in (0, 1) for name in names])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("┏") for line in lines) == 2 and sum("│   calls" in line for line in lines) == 2
    assert all(line.rstrip("│ ").endswith("yes") for line in lines if line.startswith("│"))


def test_a_trial_says_first_in_three_lines_what_is_planned_for_it(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    asked = VerifyCommand(model="gpt-tiny", stage=2, offload="host")
    asked.tell_plan("fp32", 2, 4, on_host(2))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Planned: stage 2, optimizer on host, batch 4, activations keep."
    assert lines[1].startswith("On each rank: parameters ")
    assert all(len(f"onefold: {line}") <= 80 for line in lines[:3])
    assert lines[2].startswith("Expect ") and lines[2].endswith(" at the peak.") and len(lines) == 3
    dataclasses.replace(asked, json=True).tell_plan("fp32", 2, 4, on_host(2))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_simulate_measures_what_was_planned(capsys, stage):
    arguments = ["--model", "gpt-tiny", "--ranks", "64", "--stage", str(stage), "--precision", "fp32", "--json"]
    assert main(["simulate", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["states"]["states_bytes"] == found["planned"]["states_bytes"]
    assert abs(found["peak_off"]) < 0.1
    assert len(found["steps_s"]) == 2


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("plan", "verify", "simulate", "export", "inspect", "verify-checkpoint"))
    assert main(["frobnicate"]) == 2
