"""verify and simulate know how a model is cut: tensors split, pipelines, every activation policy and every tier."""

from __future__ import annotations

import dataclasses
import json
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch.distributed as dist

from onefold.cli.main import main
from onefold.cli.verify import Check, VerifyCommand
from tests.harness import run_ranks
from tests.harness.python import run_python

TINY = {"model": "gpt-tiny", "layers": 2, "seq": 32, "vocab": 61, "bucket_mb": 0.25}  # 61 words: no tp divides them


def verified(commands: list[VerifyCommand]) -> list[list[Check]]:
    """On a rank: what was planned for it and what it did, by command."""
    return [command.measured(command.zero(command.precision)) for command in commands]


SPLIT = [
    {"tp": 2, "stage": 3, "activations": "partition", "micro_batches": 2},
    {"tp": 2, "stage": 1, "activations": "partition+host", "offload": "host", "precision": "bf16"},
    {"tp": 2, "stage": 2, "activations": "checkpoint"},
]
PIPED = [
    {"pp": 2, "stage": 3, "micro_batches": 3, "activations": "checkpoint"},
    {"pp": 2, "stage": 2, "micro_batches": 2, "precision": "bf16"},
]


@pytest.mark.parametrize("cases", [SPLIT, PIPED], ids=["tp", "pp"])
def test_real_ranks_of_a_cut_model_hold_and_send_what_was_planned(cases: list[dict[str, Any]]) -> None:
    commands = [VerifyCommand(**TINY, **case) for case in cases]
    for rank, found in enumerate(run_ranks(2, verified, commands)):
        for case, checks in zip(cases, found, strict=True):
            by_name = {check.what: check for check in checks}
            assert [check for check in checks if not check.good] == [], (rank, case)
            exact = [check for check in checks if check.what not in ("peak", "constant buffers")]
            assert [check for check in exact if check.planned != check.measured] == [], (rank, case)
            if "tp" in case:
                assert by_name["tensor-parallel (all-reduce)"].planned > 0
            else:
                assert by_name["pipeline (send)"].planned > 0
                assert by_name["sum-tied (all-gather)"].planned > 0
            if "+host" in case.get("activations", ""):
                assert by_name["block inputs on host"].planned > 0 and by_name["optimizer on host"].planned > 0


def test_states_sharded_beside_split_tensors_are_planned_to_the_byte() -> None:
    command = VerifyCommand(**TINY, ranks=4, tp=2, stage=3)
    for found in run_ranks(4, verified, [command]):
        checks = {check.what: check for check in found[0]}
        for name in ("states", "gather-forward (all-gather)", "reduce (reduce-scatter)", "used-flags (all-reduce)"):
            assert checks[name].planned == checks[name].measured > 0
        assert all(check.good for check in found[0])


def simulated(*arguments: str) -> dict[str, Any]:
    model = ("--model", "gpt-tiny", "--layers", "2", "--seq", "32", "--vocab", "61", "--precision", "fp32")
    with redirect_stdout(StringIO()) as out:
        assert main(["simulate", *model, "--device", "cpu", "--steps", "1", *arguments, "--json"]) == 0
    found = json.loads(out.getvalue())
    assert found["states"] == {name: found["planned"][name] for name in found["states"]}
    assert abs(found["peak_off"]) < 0.1
    return found


def cut_in_every_way(folder: str) -> None:
    whole = simulated("--ranks", "8", "--stage", "2")
    split = simulated("--ranks", "8", "--tp", "2", "--stage", "3", "--activations", "partition")
    assert (split["ranks"], split["tp"]) == (8, 2) and not dist.is_initialized()
    ends = [
        simulated("--ranks", "8", "--pp", "2", "--pp-stage", at, "--micro-batches", "2", "--stage", "2")
        for at in ("0", "1")
    ]
    assert [end["pp_stage"] for end in ends] == [0, 1]
    assert all(end["parameters"] < whole["parameters"] for end in ends)
    disk = simulated("--ranks", "8", "--stage", "3", "--offload", "disk", "--offload-path", folder)
    assert disk["disk"]["planned"] == disk["disk"]["measured"] and disk["disk"]["planned"]["optimizer"] > 0


def test_one_rank_of_a_cut_model_is_simulated_with_the_bytes_that_were_planned(tmp_path) -> None:
    """In a process of its own: this one may have joined ranks."""
    lines = f"from tests.planner.test_cut import cut_in_every_way; cut_in_every_way({str(tmp_path)!r})"
    ended = run_python("-c", lines)
    assert ended.returncode == 0, ended.stderr


BAD = {
    "a tp that does not divide heads": (["--tp", "3", "--ranks", "3"], "heads=4 cannot be cut over tp=3"),
    "ranks that are no multiple": (["--tp", "2", "--ranks", "3"], "3 ranks is not a multiple of tp × pp × replica"),
    "both": (["--tp", "2", "--pp", "2", "--ranks", "4", "--micro-batches", "2"], "tp=2 with pp=2"),
    "too few micro-batches": (["--pp", "2", "--ranks", "2"], "micro_batches=1 with pp=2"),
    "more stages than layers": (["--pp", "8", "--ranks", "8", "--micro-batches", "8"], "pp=8 stages for 4 layers"),
    "P_a without tp": (["--ranks", "2", "--activations", "partition"], "tp=1 has none"),
    "fp16 in a pipeline": (["--pp", "2", "--ranks", "2", "--micro-batches", "2", "--precision", "fp16"], "use bf16"),
    "offload in a pipeline": (["--pp", "2", "--ranks", "2", "--micro-batches", "2", "--offload", "host"], "--offload"),
    "muon": (["--tp", "2", "--ranks", "2", "--optimizer", "muon"], "muon with --tp"),
}


@pytest.mark.parametrize("command", ["verify", "simulate"])
def test_what_cannot_be_cut_so_is_one_line(command: str, capsys) -> None:
    for flags, said in BAD.values():
        assert main([command, "--model", "gpt-tiny", *flags]) == 2, flags
        told = capsys.readouterr().err
        assert told.startswith("onefold: ") and told.count("\n") == 1 and said in told, told
    assert main(["simulate", "--model", "gpt-tiny", "--pp-stage", "1"]) == 2
    assert "--pp-stage 1 is not one of the 1 stages" in capsys.readouterr().err


def test_the_settings_of_a_cut_reach_the_ranks() -> None:
    command = VerifyCommand(**TINY, tp=2, activations="partition")
    assert {"--tp", "2", "--activations", "partition"} <= set(command.arguments())
    assert dataclasses.replace(command, tp=1).arguments().count("--tp") == 0
