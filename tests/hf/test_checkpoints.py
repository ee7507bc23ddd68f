"""Checkpoints of a sharded Trainer: a run goes on exactly, or at another number of ranks and stage; models are read."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import onefold
from tests.harness import run_ranks, run_ranks_raises, start_ranks
from tests.harness.grids import thinned
from tests.harness.patience import PATIENCE_S
from tests.hf.runs import Run, Sentences, run, same, trained, trainer

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "lr_scheduler_type": "cosine"}


def cut(full: Run, start: int) -> Run:
    return Run(full.losses[start:], full.norms[start:], full.state)


def interrupted(stage: int, folder: str, flags: dict[str, Any], resume_stage: int) -> tuple[Run, Run]:
    """A whole run, and what another run logs that goes on from its checkpoint of step 4."""
    whole = run(stage, folder, flags)
    again = run(resume_stage, folder, flags, resume=f"{folder}/checkpoint-4")
    return whole, again


@pytest.mark.parametrize(("stage", "later", "precision"), [(0, 3, {}), (3, 3, {"bf16": True}), (2, 1, {"fp16": True})])
def test_a_resumed_run_logs_what_the_whole_run_logged_bit_for_bit_at_any_stage(stage, later, precision, tmp_path):
    whole, again = run_ranks(2, interrupted, stage, str(tmp_path), {**SAVING, **precision}, later)[0]
    assert same([again, whole])  # the log of the first steps comes with the checkpoint


def test_a_run_of_two_ranks_goes_on_with_one_and_back(tmp_path):
    whole = run_ranks(2, run, 3, str(tmp_path), SAVING)[0]
    double = {**SAVING, "per_device_train_batch_size": 4}
    one = run_ranks(1, run, 1, str(tmp_path / "one"), double, f"{tmp_path}/checkpoint-2")[0]
    back = run_ranks(2, run, 2, str(tmp_path / "back"), SAVING, f"{tmp_path}/one/checkpoint-4")[0]
    for again in (one, back):
        assert again.losses == pytest.approx(whole.losses, abs=1e-5)


def killed(folder: str) -> None:
    """Trains at stage 3 until rank 1 is killed in step 5."""
    import transformers

    class Kill(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if (state.global_step, args.process_index) == (4, 1):
                os.kill(os.getpid(), signal.SIGKILL)

    trained(trainer(3, folder, SAVING, callbacks=[Kill()]))


def test_a_killed_run_ends_on_every_rank_and_goes_on_at_other_stages_and_ranks(tmp_path):
    whole = run_ranks(2, run, 2, str(tmp_path / "whole"), SAVING)[0]
    with start_ranks(2, killed, str(tmp_path / "killed"), timeout_s=PATIENCE_S) as group:
        survivor, lost = group.join()
    assert (survivor.exitcode, lost.exitcode) == (1, -signal.SIGKILL)
    assert "CommError: rank 0: " in str(survivor.error) and "rank 1" in str(survivor.error).splitlines()[-1]
    shutil.copytree(tmp_path / "killed", tmp_path / "one")
    again = run_ranks(2, run, 1, str(tmp_path / "killed"), SAVING, True)[0]
    assert same([again, whole])
    double = {**SAVING, "per_device_train_batch_size": 4}
    one = run_ranks(1, run, 0, str(tmp_path / "one"), double, True)[0]
    assert one.losses == pytest.approx(whole.losses, abs=1e-5)


def saved_models(stage: int, folder: str, flags: dict[str, Any]) -> Run:
    one = trainer(stage, folder, flags)
    found = trained(one)
    one.save_model(f"{folder}/model")
    return found


@pytest.mark.parametrize(("stage", "flags"), thinned([0, 3], [{}, {"bf16": True}]))
def test_from_pretrained_reads_what_save_model_wrote_with_all_bits_of_the_masters(stage, flags, tmp_path):
    import transformers

    found = run_ranks(2, saved_models, stage, str(tmp_path), flags)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype is torch.float32
    assert all(torch.equal(found.state[name], value) for name, value in model.state_dict().items())
    assert not (tmp_path / "model" / "onefold").exists()


def limited(stage: int, folder: str) -> tuple[list[str], str, bool]:
    """Trains on other sentences than it evaluates, which get worse: what is left, what was best, and is it loaded."""
    flags = {
        **SAVING, "learning_rate": 0.05, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 2,
        "load_best_model_at_end": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    one = trainer(stage, folder, flags, train_dataset=[Sentences()[0]] * 64, eval_dataset=Sentences(11))
    one.train()
    losses = [row["eval_loss"] for row in one.state.log_history if "eval_loss" in row]
    left = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    return left, one.state.best_model_checkpoint, one.evaluate()["eval_loss"] == min(losses)


def test_the_best_model_is_loaded_at_the_end_and_old_checkpoints_are_removed(tmp_path):
    for stage in (1, 3):
        folder = tmp_path / str(stage)
        for left, best, loaded in run_ranks(2, limited, stage, str(folder)):
            assert left == ["checkpoint-2", "checkpoint-6"]
            assert (best, loaded) == (str(folder / "checkpoint-2"), True)


def models_only(stage: int, folder: str) -> tuple[Run, Run]:
    flags = {**SAVING, "save_only_model": True}
    return interrupted(stage, folder, flags, stage)


def test_with_save_only_model_there_is_no_optimizer_state_and_weights_are_resumed(tmp_path):
    whole, again = run_ranks(2, models_only, 3, str(tmp_path))[0]
    assert not (tmp_path / "checkpoint-4" / "onefold").exists()
    assert again.losses[4] == whole.losses[4]  # the same parameters
    assert again.losses[5] != whole.losses[5]  # other moments


def taken_over(folder: str) -> tuple[Run, list[Run], bool]:
    """A whole run by DDP, and runs of several stages that go on from its checkpoint of step 4."""
    whole = run(None, folder, SAVING)
    again = [run(stage, f"{folder}/{stage}", SAVING, resume=f"{folder}/checkpoint-4") for stage in (1, 3)]
    return whole, again, any(".imported" in str(path) for path in Path(folder).rglob("*"))


def test_a_plain_trainers_checkpoint_is_resumed_in_place_with_its_moments_and_schedule(tmp_path):
    whole, again, left = run_ranks(2, taken_over, str(tmp_path))[0]
    assert same(again) and not left
    assert again[0].losses == pytest.approx(whole.losses, abs=1e-6)
    assert again[0].norms == pytest.approx(whole.norms, abs=1e-6)
    for name, value in whole.state.items():
        torch.testing.assert_close(again[0].state[name], value, rtol=0, atol=1e-6)
    # without names the order of weights does not tell which number is which; and a damaged file is said on every rank
    with pytest.raises(onefold.CheckpointError, match=r"resume from the folder with onefold\.hf\.Trainer"):
        onefold.import_checkpoint(tmp_path / "checkpoint-4", tmp_path / "run")
    (tmp_path / "checkpoint-4" / "optimizer.pt").write_bytes(b"PK")
    for error in run_ranks_raises(2, run, 2, str(tmp_path), SAVING, f"{tmp_path}/checkpoint-4"):
        assert error.type_name == "CheckpointError"
        assert "optimizer state of a Trainer without Onefold, which was not imported" in error.message
