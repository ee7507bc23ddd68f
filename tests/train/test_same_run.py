"""What goes on is the run that began: its data by content, its model, its seed; and it is there."""

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path

import numpy
import pytest

from onefold.cli.main import main
from onefold.settings.limited import JSON_BYTES_LIMIT
from onefold.train.run.groups import DataSettings
from onefold.train.run.records import read_facts, read_metrics
from onefold.train.run.settings import Settings
from onefold.train.run.source import find_source
from onefold.train.run.toml import NOT_SAVED, to_toml, with_values
from tests.harness import fresh_ranks, run_ranks, run_ranks_raises
from tests.train.launched import launched
from tests.train.pooled import config_file, one_rank, settings_of, trained
from tests.train.test_bad_input import said_once
from tests.train.test_data import tokenizer_of
from tests.train.written import write_run

SHORT = {"steps": 2, "eval_every": 0}
WORDS = b"some words that are trained on, "


def texts(root: Path) -> Path:
    for name in ("a.txt", "b.txt", "in/c.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(WORDS * 20)
    return root


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Path:
    """A folder with texts and a run that was trained on them; with token files, and runs on those."""
    root = tmp_path_factory.mktemp("same") / "first"
    texts(root / "texts")
    numpy.save(root / "t.npy", numpy.arange(600, dtype=numpy.uint16) % 50)
    (numpy.arange(600, dtype=numpy.uint8) % 50).tofile(root / "t.bin")
    (root / "t.bin.json").write_text('{"dtype": "uint8", "vocab": 50}')
    for out, data in (("run", "texts"), ("run-npy", "t.npy"), ("run-bin", "t.bin")):
        trained(1, root / out, steps=SHORT, data={"data": str(root / data)})
    return root


@pytest.fixture
def copy(first, tmp_path) -> Path:
    """The same in a folder of its own, so that a test may change it: a folder that was moved."""
    return Path(shutil.copytree(first, tmp_path / "root"))


def resume(root: Path, data: str = "texts", out: str = "run", *flags: str) -> int:
    """Exit code of `train --resume` without ranks: if the data pass, it fails later, because the run is already past
    --steps 1."""
    where = ("--out", str(root / out), "--data", str(root / data), "--cache", str(root / "cache"), "--ranks", "1")
    return main(["train", "--resume", *where, *flags])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit(path: Path) -> None:
    """Same size, same time of writing."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda root: cut(root / "a.txt"), "texts/a.txt has changed since the run began (640 bytes then, 320 now)"),
        (lambda root: edit(root / "in/c.txt"), "texts/in/c.txt has changed since the run began (640 bytes then, 640"),
        (lambda root: (root / "b.txt").unlink(), "texts/b.txt is gone, or no longer text, since the run began"),
        (lambda root: (root / "d.txt").write_text("new"), "texts/d.txt is new since the run began"),
        (lambda root: [(root / f"d{n}").write_text("new") for n in range(9)], "since the run began and 6 more"),
    ],
    ids=["halved", "edited", "gone", "new", "many"],
)  # fmt: skip
def test_text_that_is_not_the_same_is_named_before_training(copy, capsys, change, said):
    change(copy / "texts")
    before = (copy / "run" / "facts.json").read_bytes()
    assert resume(copy) == 2
    line = said_once(capsys.readouterr().err)
    assert said in line and "accept them with --accept-changed-data" in line
    assert (copy / "run" / "facts.json").read_bytes() == before


@pytest.mark.parametrize(
    ("out", "data", "change"),
    [
        ("run-npy", "t.npy", edit),
        ("run-bin", "t.bin", edit),
        ("run-bin", "t.bin", cut),
        ("run-bin", "t.bin.json", lambda path: path.write_text('{"dtype": "uint8", "vocab": 51}')),
    ],
)
def test_token_files_that_are_not_the_same_are_named(copy, capsys, out, data, change):
    change(copy / data)
    assert resume(copy, data.removesuffix(".json"), out) == 2
    assert f"{copy / data} has changed since the run began" in said_once(capsys.readouterr().err)


def test_data_that_were_touched_or_moved_are_the_same_and_tokens_that_were_planted_are_not_used(copy):
    os.utime(copy / "texts" / "a.txt")
    (copy / "texts").rename(copy / "moved")
    more = {"steps": {**SHORT, "steps": 3}, "data": {"data": str(copy / "moved")}, "checkpoints": {"resume": True}}
    trained(1, copy / "run", **more)
    facts = read_facts(copy / "run")["data"]
    assert facts["replaced"] == [] and read_metrics(copy / "run")[-1]["step"] == 3
    (entry,) = (
        path for path in (copy.parent / "cache").glob("*.tokens")
        if facts["tokens_sha256"].encode() in path.read_bytes()[:128]
    )  # fmt: skip
    edit(entry)
    trained(1, copy / "run", **more | {"steps": {**SHORT, "steps": 4}})
    assert read_facts(copy / "run")["data"]["tokens_sha256"] == facts["tokens_sha256"]


def test_changed_data_are_refused_on_all_ranks_and_go_on_if_they_are_accepted(copy):
    cut(copy / "texts" / "a.txt")
    before = read_facts(copy / "run")["data"]["digest"]
    going_on = {"steps": {**SHORT, "steps": 3}, "data": {"data": str(copy / "texts")}, "checkpoints": {"resume": True}}
    for caught in run_ranks_raises(2, one_rank, settings_of(copy / "run", **going_on)):
        assert "a.txt has changed since the run began (640 bytes then, 320 now)" in caught.message
    accepted = {"resume": True, "accept_changed_data": True}
    trained(1, copy / "run", **going_on | {"checkpoints": accepted})
    facts = read_facts(copy / "run")["data"]
    assert facts["replaced"] == [{"digest": before, "at_step": 2}] and facts["digest"] != before
    known = json.loads((copy / "run" / "data.json").read_text())
    assert known["digest"] == facts["digest"]
    assert (known["files"][0]["path"], known["files"][0]["bytes"]) == ("/a.txt", 320)
    trained(1, copy / "run", **going_on | {"steps": {**SHORT, "steps": 4}})
    assert len(read_facts(copy / "run")["data"]["replaced"]) == 1


def first_of_its_node(settings: Settings, root: str) -> None:
    """On a rank: the data are those of this node."""
    rank = os.environ["RANK"]
    os.environ["LOCAL_RANK"] = "0"
    one_rank(with_values(settings, {"data": {"data": f"{root}/{rank}"}}, "node"))


def test_nodes_with_other_data_train_no_model_together(tmp_path):
    texts(tmp_path / "0")
    edit(texts(tmp_path / "1") / "a.txt")
    outcomes = fresh_ranks(2, first_of_its_node, settings_of(tmp_path / "run"), str(tmp_path), timeout_s=120)
    assert ["rank 1 found other data at --data than rank 0" in outcome.error for outcome in outcomes] == [True, True]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--seed", "1", "--accept-changed-data"), "--seed was 0 when the run began and is 1 now"),
        (("--val-fraction", "0.1"), "--val-fraction was 0.05 when the run began and is 0.1 now"),
        (("--layers", "3"), "--layers was 2 when the run began and is 3 now"),
        (("--hidden", "64"), "--hidden was 32 when the run began and is 64 now"),
        (("--heads", "4"), "--heads was 2"),
        (("--seq", "8"), "--seq was 16"),
        (("--vocab", "300"), "--vocab was 256"),
    ],
)
def test_settings_that_make_it_another_run_are_refused(copy, capsys, flags, said):
    assert resume(copy, "texts", "run", *flags) == 2
    line = said_once(capsys.readouterr().err)
    assert said in line and line.endswith("or start a new run with another --out")


def test_a_seed_that_was_edited_into_the_settings_of_the_run_is_refused(copy, capsys):
    config = copy / "run" / "config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 7"))
    assert resume(copy) == 2
    assert "--seed was 0 when the run began and is 7 now" in said_once(capsys.readouterr().err)


def test_another_tokenizer_is_another_run(copy, capsys):
    path = Path(tokenizer_of(copy, {"[U]": 0, "some": 1, "words": 2}))
    assert resume(copy, "texts", "run", "--tokenizer", str(path)) == 2
    assert f"--tokenizer was bytes when the run began and is {path} now" in said_once(capsys.readouterr().err)
    told = {"data": {"data": str(copy / "texts"), "tokenizer": str(path)}}
    trained(1, copy / "words", steps=SHORT, model={"seq": 8}, **told)
    told["data"]["tokenizer"] = str(path.rename(copy / "moved.json"))  # the same file elsewhere
    trained(1, copy / "words", steps={**SHORT, "steps": 3}, model={"seq": 8}, checkpoints={"resume": True}, **told)
    (copy / "moved.json").write_text((copy / "moved.json").read_text() + " ")
    assert resume(copy, "texts", "words", "--tokenizer", str(copy / "moved.json")) == 2
    assert "the file of --tokenizer has changed since the run began" in said_once(capsys.readouterr().err)


def test_a_run_that_is_not_there_is_not_gone_on_with(tmp_path, capsys):
    write_run(tmp_path / "gpt2-large")
    (tmp_path / "empty").mkdir()
    assert main(["train", "--resume", "--out", str(tmp_path / "gpt2-lrage")]) == 2
    line = said_once(capsys.readouterr().err)
    assert (
        f"there is no run at --out {tmp_path}/gpt2-lrage (did you mean {tmp_path}/gpt2-large?); --resume-or-start"
        in line
    )
    assert main(["train", "--resume", "--out", str(tmp_path / "empty")]) == 2
    assert "there is no run at --out" in said_once(capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "gpt2-large"]


def test_resume_or_start_starts_and_then_goes_on_and_a_comparison_is_held_to_its_data(tmp_path, capsys):
    out, root = tmp_path / "run", texts(tmp_path / "texts")
    for steps in (2, 3):
        told = {"steps": {**SHORT, "steps": steps}, "checkpoints": {"resume_or_start": True}}
        settings = settings_of(out, data={"data": str(root)}, **told)
        for stage in dataclasses.replace(settings, compare="0,3").stages():
            assert run_ranks(1, one_rank, stage)[0].finished
    assert [row["step"] for row in read_metrics(out / "stage-3")] == [1, 2, 3]
    (out / "config.toml").write_text(to_toml(dataclasses.replace(settings, compare="0,3"), leave_out=NOT_SAVED))
    edit(root / "a.txt")
    assert main(["train", "--resume", "--out", str(out), "--ranks", "1", "--steps", "4"]) == 2
    assert "a.txt has changed since the run began" in said_once(capsys.readouterr().err)
    next_stage = dataclasses.replace(settings_of(out, data={"data": str(root)}), compare="1").stages()[0]
    for caught in run_ranks_raises(1, one_rank, next_stage):
        assert "a.txt has changed since the run began" in caught.message


def test_a_plain_run_beside_the_stages_of_a_comparison_has_data_of_its_own(copy):
    texts_now = {"data": str(copy / "texts")}
    (copy / "run").rename(copy / "stage-0")
    (copy / "config.toml").write_text(to_toml(dataclasses.replace(settings_of(copy), compare="0"), leave_out=NOT_SAVED))
    edit(copy / "texts" / "a.txt")
    trained(1, copy / "mine", steps=SHORT, data=texts_now)
    for caught in run_ranks_raises(1, one_rank, settings_of(copy / "stage-1", steps=SHORT, data=texts_now)):
        assert "a.txt has changed since the run began" in caught.message


def test_a_record_of_the_data_that_is_too_large_is_not_read(copy, capsys):
    edit(copy / "texts" / "a.txt")
    with (copy / "run" / "data.json").open("ab") as file:
        file.write(b" " * JSON_BYTES_LIMIT)
    assert resume(copy) == 2
    assert "the data have changed since the run began; put the data back" in said_once(capsys.readouterr().err)


def test_ranks_that_start_again_do_not_go_on_with_other_data(tmp_path):
    out, root = tmp_path / "run", texts(tmp_path / "texts")
    config = config_file(out, steps={"steps": 100000}, data={"data": str(root)}, checkpoints={"max_restarts": 3})
    with launched(out, "--config", str(config), "--ranks", "1") as launch:
        launch.wait_for(lambda: launch.steps() >= 1)
        edit(root / "b.txt")
        os.kill(launch.rank_pids()[0], signal.SIGKILL)
        code, _, err = launch.end()
    *again, line = err.splitlines()
    assert code == 1 and len(again) == 1 and f"{root}/b.txt has changed since the run began" in line


# -- a run is not its own data -----------------------------------------------------------------------------------------


def test_runs_and_caches_in_a_folder_of_data_are_left_out_and_counted(tmp_path):
    root = texts(tmp_path / "root")
    write_run(root / "runs" / "one")
    write_run(root / "two" / "stage-0")
    (root / "three").mkdir()
    (root / "three" / "config.toml").write_text('compare = "0,3"\n')
    (root / "own").mkdir()
    (root / "own" / "notes").write_text("of a run that has just begun")
    (root / "kept").mkdir()
    (root / "kept" / "x.tokens").write_text("tokens")
    (root / "config.toml").write_text("of something else")
    source = find_source(DataSettings(data=root, cache=root / "kept"), root / "own")
    assert [path.name for path in source.files] == ["a.txt", "b.txt", "config.toml", "c.txt"]
    assert source.left_out == "4 runs of onefold, 1 cache of tokens"


def test_a_run_in_the_folder_it_is_trained_on_goes_on_with_the_same_data(tmp_path):
    root = texts(tmp_path / "root")
    for steps in (2, 3):
        told = {"steps": {**SHORT, "steps": steps}, "checkpoints": {"resume_or_start": True}}
        trained(1, root / "run", data={"data": str(root)}, **told)
    assert read_facts(root / "run")["data"]["left_out"] == "1 run of onefold"
    files = json.loads((root / "run" / "data.json").read_text())["files"]
    assert [file["path"] for file in files] == ["/a.txt", "/b.txt", "/in/c.txt"]
