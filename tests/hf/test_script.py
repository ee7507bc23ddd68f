"""The example is a script as users start it: by torchrun, or by `accelerate launch`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
FLAGS = ["--max_steps", "12", "--learning_rate", "1e-2", "--use_cpu", "True", "--report_to", "none", "--logging_steps",
         "1", "--per_device_train_batch_size", "4", "--bf16", "True", "--save_steps", "12"]  # fmt: skip
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    "accelerate launch": ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"],
}


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accelerate launch", marks=pytest.mark.soak)])
def test_the_example_learns_and_leaves_a_model_and_a_checkpoint(launcher, tmp_path):
    import transformers

    done = subprocess.run(
        [sys.executable, "-m", *LAUNCHERS[launcher], "examples/trainer.py", "--output_dir", str(tmp_path), *FLAGS],
        cwd=ROOT, timeout=PATIENCE_S, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    logs = json.loads((tmp_path / "checkpoint-12" / "trainer_state.json").read_text())["log_history"]
    losses = [row["loss"] for row in logs if "loss" in row]
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "checkpoint-12" / "onefold").is_dir()
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config.hidden_size == 64
