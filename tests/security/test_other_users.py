"""Other people's folders: what this user may not read, search or write is one line and exit code 2, no traceback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from onefold.checkpoint.format.storage import Storage
from tests.checkpoint.drive import save
from tests.security.others import NOBODY, User, needs_root, one_line, run_here
from tests.train.written import write_run


@pytest.fixture(scope="module")
def nobody() -> Iterator[User]:
    user = User(NOBODY)
    yield user
    user.end()


def make_run(run: Path) -> Path:
    write_run(run, steps=3)
    save(Storage(), run / "checkpoints", 1)
    return run


def commands(run: Path, out: Path) -> list[list[object]]:
    return [
        ["report", run, "--out", out / "page"], ["inspect", run], ["verify-checkpoint", run],
        ["export", run, out / "weights"], ["sample", run], ["train", "--resume", "--out", run],
    ]  # fmt: skip


@pytest.fixture
def out(shared_path: Path) -> Path:
    """A folder in which anyone may write."""
    path = shared_path / "out"
    path.mkdir()
    path.chmod(0o1777)
    return path


@needs_root
def test_a_private_folder_and_one_under_it_are_refused_in_one_line(shared_path, out, nobody):
    run = make_run(shared_path / "private" / "run")
    refused = []
    for private in (run, run.parent):  # the folder itself; a folder that may not be searched above it
        private.chmod(0o700)
        ends = [nobody.run(*command) for command in commands(run, out)]
        assert [end for end in ends if not one_line(end, str(run), "Permission denied")] == []
        refused += ends
        private.chmod(0o755)
    assert len(refused) == 12 and list(out.iterdir()) == []


@needs_root
def test_a_file_that_may_not_be_read_is_named_in_one_line(shared_path, out, nobody):
    wanted = {
        "facts.json": ["report", "sample"],
        "metrics.jsonl": ["report"],
        "warnings.jsonl": ["report"],
        "config.toml": ["report", "train"],
        "checkpoints/step-00000001/manifest.json": ["inspect", "verify-checkpoint", "export", "sample"],
        "checkpoints/step-00000001/rank-00001.safetensors": ["verify-checkpoint", "export"],
        "checkpoints/step-00000001": ["inspect", "verify-checkpoint", "export", "sample"],
    }
    told = []
    for number, (name, verbs) in enumerate(wanted.items()):
        run = make_run(shared_path / f"run{number}")
        (run / name).chmod(0)
        told += [(name, command) for command in commands(run, out) if command[0] in verbs]
    ends = [nobody.run(*command) for _, command in told]
    wrong = [(name, end) for (name, _), end in zip(told, ends) if not one_line(end, name, "Permission denied")]
    assert wrong == []


@needs_root
def test_a_run_that_may_be_read_but_not_written_is_reported_elsewhere(shared_path, out, nobody):
    run = make_run(shared_path / "run")
    assert one_line(
        nobody.run("report", run),
        f"{run}/report.html cannot be written: Permission denied; give another folder with --out",
    )
    assert nobody.run("report", run, "--out", out / "page") == (0, f"{out}/page/report.html\n", "")
    assert {path.name for path in (out / "page").iterdir()} >= {"report.html", "loss.png"}
    assert not (run / "report.html").exists()


def test_a_comparison_is_written_elsewhere_with_its_pages(tmp_path):
    for stage in (0, 3):
        write_run(tmp_path / "runs" / f"stage-{stage}", steps=3, stage=stage)
    assert run_here("report", tmp_path / "runs", "--out", tmp_path / "page").code == 0
    pages = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("report.html")}
    assert pages == {"page/report.html", "page/stage-0/report.html", "page/stage-3/report.html"}


@needs_root
def test_nothing_can_be_exported_into_a_folder_of_others(shared_path, nobody):
    run = make_run(shared_path / "run")
    end = nobody.run("export", run, shared_path / "weights")
    assert one_line(end, "could not make the folder", "Permission denied")
