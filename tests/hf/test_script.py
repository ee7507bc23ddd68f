"""The example is a script: on ranks with torchrun's environment, and with --soak started as users start it."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import fresh_ranks
from tests.harness.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "trainer.py")
FLAGS = ["--max_steps", "12", "--learning_rate", "1e-2", "--use_cpu", "True", "--report_to", "none", "--logging_steps",
         "1", "--per_device_train_batch_size", "4", "--bf16", "True", "--save_steps", "12"]  # fmt: skip
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate launch": ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"],
}


def run_example(words: list[str]) -> None:
    """On a rank of its own."""
    sys.argv = [EXAMPLE, *words]
    runpy.run_path(EXAMPLE, run_name="__main__")


def launch(launcher: str, words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], EXAMPLE, *words],
        cwd=ROOT, timeout=PATIENCE_S, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("launcher", [None, *(pytest.param(name, marks=pytest.mark.soak) for name in LAUNCHERS)])
def test_the_example_learns_and_leaves_a_model_and_a_checkpoint(launcher, tmp_path):
    import transformers

    words = ["--output_dir", str(tmp_path), *FLAGS]
    if launcher is None:
        ended = fresh_ranks(2, run_example, words, init=False, env={"HF_HUB_OFFLINE": "1"})
        assert [one.exitcode for one in ended] == [0, 0], [one.error for one in ended]
    else:
        launch(launcher, words)
    logs = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_text())["log_history"]
    losses = [row["loss"] for row in logs if "loss" in row]
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "checkpoint-12" / "onefold").is_dir()
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config.hidden_size == 64
