"""`--log`: rows for TensorBoard and for Weights & Biases, by the real packages where they are installed, offline."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from onefold.cli.main import main
from onefold.errors import ConfigError
from onefold.train.run.logs import LOGS, Logged, check_logs
from onefold.train.run.metrics import Listener
from onefold.train.run.records import read_metrics
from onefold.train.run.settings import Settings
from onefold.train.run.start import Ended, train
from onefold.train.run.stop import Stop
from tests.harness import run_ranks
from tests.train.pooled import settings_of
from tests.train.test_bad_input import said_once

STEPS = {"steps": 4, "eval_every": 2}


def logged_rank(settings: Settings) -> Ended:
    """As `onefold train` does it: rank 0 alone has a listener that logs."""
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        os.environ.pop(name, None)
    first = os.environ["RANK"] == "0"
    return train(
        settings, Stop(), Logged(settings.output.out, settings.output.logs, Listener()) if first else Listener()
    )


def logged(out: Path, name: str, **groups: dict[str, Any]) -> Path:
    run_ranks(2, logged_rank, settings_of(out, steps=STEPS, output={"log": name}, **groups))
    return out


def figures(out: Path) -> dict[tuple[int, str], float]:
    """What metrics.jsonl has of some columns."""
    names = ("loss", "val_loss", "grad_norm", "lr")
    return {(row["step"], name): row[name] for row in read_metrics(out) for name in names if row[name] is not None} | {
        (row["step"], "memory/parameters"): row["memory"]["parameters"] for row in read_metrics(out)
    }


def test_tensorboard_reads_the_rows_of_the_run(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = logged(tmp_path / "run", "tensorboard")
    assert len(list(out.glob("events.out.tfevents.*"))) == 1, "one rank writes"
    found = EventAccumulator(str(out)).Reload()
    read = {(one.step, tag): one.value for tag in found.Tags()["scalars"] for one in found.Scalars(tag)}
    wanted = figures(out)
    assert {key: read[key] for key in wanted} == pytest.approx(wanted, rel=1e-6)


def test_weights_and_biases_has_the_rows_of_the_run_without_a_network_and_knows_a_resumed_run(tmp_path):
    pytest.importorskip("wandb")
    out = logged(tmp_path / "run", "wandb", checkpoints={"keep": 9, "save_every": 2})
    [file] = (out / "wandb").glob("offline-run-*/*.wandb")
    content = file.read_bytes()
    assert all(name.encode() in content for name in ("val_loss", "grad_norm", "memory/parameters", "gpt-tiny"))
    name = (out / "wandb" / "onefold-run-id").read_text()
    logged(out, "wandb", checkpoints={"resume": True})
    assert (out / "wandb" / "onefold-run-id").read_text() == name
    assert {path.name for path in (out / "wandb").glob("offline-run-*/*.wandb")} == {f"run-{name}.wandb"}


@pytest.mark.parametrize("name", LOGS)
def test_a_package_that_is_not_installed_is_one_line_with_the_command_before_the_run_starts(
    tmp_path, capsys, monkeypatch, name
):
    (tmp_path / name).mkdir()  # as wandb leaves one where it ran
    monkeypatch.syspath_prepend(tmp_path)
    if (found := find_spec(name)) is not None and found.origin is not None:
        pytest.skip(f"{name} is installed")
    assert main(["train", "--log", name, "--out", str(tmp_path / "run")]) == 2
    said = said_once(capsys.readouterr().err)
    assert said == f"onefold: --log {name} needs one more package: pip install 'onefold[{name}]'"
    assert not (tmp_path / "run").exists()


def test_an_unknown_program_is_one_line():
    with pytest.raises(ConfigError, match=r"--log 'comet' is unknown; use tensorboard or wandb, or both with a comma"):
        check_logs(["comet"])
    assert settings_of(Path("run"), output={"log": "tensorboard, wandb"}).output.logs == ["tensorboard", "wandb"]


def test_neither_package_is_imported_unless_it_is_asked_for():
    code = "import sys, onefold.cli.train; sys.exit(bool({'tensorboard', 'wandb'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
