"""A checkpoint is there when `commit` returns and not before, is never overwritten, and outlives failed saves."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from onefold.checkpoint.format.folder import committed, find, step_name
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.weights import open_weights
from onefold.checkpoint.protocol.commit import begin, set_aside
from onefold.errors import CheckpointDamaged, CheckpointError
from tests.checkpoint.drive import finish, load, save, write_rank
from tests.harness.patience import PATIENCE_S

CHANGES = ("make_folder", "create", "write", "finish", "sync_folder", "rename", "remove", "remove_folder")


class Failing(Storage):
    """Fails at the nth operation, and from then on if it is told to."""

    def __init__(self, code: int, nth: int, *, for_good: bool = False, kinds: tuple[str, ...] = CHANGES) -> None:
        self._code, self._left, self._for_good, self._kinds = code, nth, for_good, kinds
        self.failed: list[str] = []

    def at(self, operation: str, path: Path) -> None:
        if operation in self._kinds:
            self._left -= 1
            if self._left == -1 or (self._for_good and self._left < 0):
                self.failed.append(operation)
                raise OSError(self._code, os.strerror(self._code))


def test_the_newest_is_the_highest_step_and_a_folder_may_be_named_itself(tmp_path):
    for step in (9, 10, 123_456_789):
        save(Storage(), tmp_path / "run", step)
    assert committed(Storage(), tmp_path / "run") == [9, 10, 123_456_789]
    assert [load(Storage(), folder) for folder in find(Storage(), tmp_path / "run")] == [123_456_789, 10, 9]
    assert find(Storage(), tmp_path / "run" / step_name(9)) == [tmp_path / "run" / step_name(9)]


def test_nothing_to_load_is_an_error_that_says_what_was_wanted(tmp_path):
    with pytest.raises(CheckpointError, match="no folder; wanted is a folder of checkpoints"):
        find(Storage(), tmp_path / "nowhere")
    (tmp_path / "step-1").mkdir()  # no name of ours: too short
    with pytest.raises(CheckpointError, match="holds no committed checkpoint"):
        find(Storage(), tmp_path)


@pytest.mark.parametrize("step", [4, 5])
def test_a_committed_checkpoint_is_never_overwritten_nor_followed_by_an_older_step(tmp_path, step):
    folder = save(Storage(), tmp_path, 5)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CheckpointError, match=r"step-00000005 is committed"):
        save(Storage(), tmp_path, step)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["step-00000005"]


def test_keep_removes_the_oldest_only_after_the_newest_is_there(tmp_path):
    seen = []

    class Watching(Storage):
        def at(self, operation: str, path: Path) -> None:
            if operation == "remove":
                seen.append(committed(Storage(), tmp_path))

    for step in range(1, 6):
        save(Watching(), tmp_path, step, keep=2)
    assert committed(Storage(), tmp_path) == [4, 5]
    assert seen and all(len(steps) == 2 for steps in seen)  # two whole ones at every removal of a file


@pytest.mark.parametrize("name", [step_name(3), ".removing-step-00000003-0a", ".writing-step-00000003-0a"])
def test_of_a_link_to_another_runs_checkpoint_only_the_link_is_removed(tmp_path, name):
    theirs = save(Storage(), tmp_path / "base", 3)
    (tmp_path / "fork").mkdir()
    (tmp_path / "fork" / name).symlink_to(theirs)
    save(Storage(), tmp_path / "fork", 4, keep=1)
    assert os.listdir(tmp_path / "fork") == [step_name(4)]
    assert load(Storage(), theirs) == 3


def test_a_writer_that_was_believed_dead_cannot_commit_what_was_cleaned(tmp_path):
    draft = begin(Storage(), tmp_path, 1)
    parts = [write_rank(Storage(), draft, rank, 2) for rank in range(2)]
    save(Storage(), tmp_path, 2)  # of a job started again
    with pytest.raises(CheckpointError, match=r"\.writing-step-00000001"):
        finish(Storage(), draft, parts)
    assert os.listdir(tmp_path) == ["step-00000002"]


def test_a_writer_that_is_cleaned_away_while_it_commits_leaves_nothing_half_there(tmp_path):
    class Killed(Exception): ...

    class Cleaner(Storage):
        def at(self, operation: str, path: Path) -> None:
            if operation == "remove" and path.name != "manifest.json":
                raise Killed  # with some of the files gone

    class Writer(Storage):
        def at(self, operation: str, path: Path) -> None:
            if operation == "rename" and path.name.startswith(".writing"):
                with pytest.raises(Killed):
                    begin(Cleaner(), tmp_path, 2)  # of a job that believes this one dead

    draft = begin(Storage(), tmp_path, 1)
    parts = [write_rank(Storage(), draft, rank, 2) for rank in range(2)]
    with pytest.raises(CheckpointError, match="could not rename"):
        finish(Writer(), draft, parts)
    assert committed(Storage(), tmp_path) == []


def test_a_file_that_is_there_is_never_written(tmp_path):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(CheckpointError, match=r"could not create .*mine: File exists"):
        Storage().create(tmp_path / "mine")
    assert (tmp_path / "mine").read_text() == "kept"


def test_reads_that_come_in_pieces_are_put_together():
    symbols = Path("/proc/kallsyms")  # the kernel gives it some pages at a time
    into = bytearray(1 << 16)
    with open(symbols, "rb", buffering=0) as file:
        if not 0 < len(file.read(len(into))) < len(into):
            pytest.skip("this kernel gives it whole, or not at all")
    Storage().read(symbols, 0, memoryview(into))
    assert bytes(into) == symbols.read_bytes()[: len(into)]


def test_leftovers_that_cannot_be_removed_do_not_stop_a_save(tmp_path, caplog):
    (tmp_path / ".removing-step-00000001-0badcafe").mkdir()
    (tmp_path / ".removing-step-00000001-0badcafe" / "kept open").touch()
    assert load(Storage(), save(Failing(errno.EBUSY, 0, for_good=True, kinds=("remove",)), tmp_path, 2)) == 2
    assert "files of an earlier save that failed could not be removed" in caplog.text


def test_leftovers_with_folders_are_removed_and_links_in_them_not_followed(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept").touch()
    left = tmp_path / "run" / ".removing-step-00000001-0badcafe"
    (left / "in the way").mkdir(parents=True)
    (left / "in the way" / "file").touch()
    (left / "link").symlink_to(tmp_path / "mine")
    save(Storage(), tmp_path / "run", 2)
    assert os.listdir(tmp_path / "run") == ["step-00000002"]
    assert os.listdir(tmp_path / "mine") == ["kept"]


def test_a_folder_with_checkpoints_is_a_runs_whatever_else_lies_in_it(tmp_path):
    save(Storage(), tmp_path, 1)
    for name in ("manifest.json", "model.safetensors", "a.safetensors.index.json", "old.pt"):
        (tmp_path / name).write_text("{}")
    assert find(Storage(), tmp_path) == [tmp_path / step_name(1)]
    assert open_weights(Storage(), tmp_path) is None


def test_a_checkpoint_is_no_folder_to_save_into(tmp_path):
    folder = save(Storage(), tmp_path, 1)
    with pytest.raises(CheckpointError, match="step-00000001 is a checkpoint, which is never written again"):
        save(Storage(), folder, 2)
    assert load(Storage(), find(Storage(), tmp_path)[0]) == 1


def test_bytes_that_the_disk_cannot_read_are_damage_and_a_closed_door_is_not(tmp_path):
    folder = save(Storage(), tmp_path, 1)
    with pytest.raises(CheckpointDamaged, match="Input/output error"):
        load(Failing(errno.EIO, 0, kinds=("read",)), folder)
    with pytest.raises(CheckpointError, match="Permission denied") as refused:
        load(Failing(errno.EACCES, 0, kinds=("read",)), folder)
    assert not isinstance(refused.value, CheckpointDamaged)


def test_ranks_that_write_to_different_disks_are_told_so(tmp_path):
    draft = begin(Storage(), tmp_path / "one", 1)
    parts = [write_rank(Storage(), draft, 0, 2)]
    parts.append(write_rank(Storage(), begin(Storage(), tmp_path / "two", 1), 1, 2))
    with pytest.raises(CheckpointError, match=r"rank-00001.* no such file; all ranks must see the same folder"):
        finish(Storage(), draft, parts)


def test_a_damaged_checkpoint_set_aside_makes_room_for_its_step(tmp_path):
    save(Storage(), tmp_path, 1)
    (save(Storage(), tmp_path, 2) / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointDamaged, match=r"step-00000002.manifest\.json"):
        load(Storage(), find(Storage(), tmp_path)[0])
    set_aside(Storage(), tmp_path, 2)
    assert load(Storage(), find(Storage(), tmp_path)[0]) == 1
    assert load(Storage(), save(Storage(), tmp_path, 2)) == 2


def test_a_full_disk_at_any_operation_is_a_named_error_and_the_checkpoint_before_still_loads(tmp_path):
    failed = []
    for nth in range(1000):
        run = tmp_path / f"run-{nth}"
        save(Storage(), run, 1)
        storage = Failing(errno.ENOSPC, nth, for_good=True)
        try:
            save(storage, run, 2, keep=1)
            break  # it has fewer operations than that
        except CheckpointError as error:
            assert "free space there" in str(error) and str(tmp_path) in str(error)
        failed.append(storage.failed[0])
        steps = committed(Storage(), run)  # renamed: the newer is whole, though its removal of the older was not
        assert [load(Storage(), run / step_name(step)) for step in steps] == steps and steps[0] in (1, 2)
        save(Storage(), run, 3)
        assert sorted(os.listdir(run)) == [step_name(step) for step in [*steps, 3]]
    assert set(failed) == set(CHANGES) and len(failed) > 20


def test_a_file_that_really_cannot_grow_is_a_named_error(tmp_path):
    save(Storage(), tmp_path, 1)
    with files_of_at_most(700), pytest.raises(CheckpointError, match=r"could not write .*File too large; free space"):
        save(Storage(), tmp_path, 2)
    assert load(Storage(), find(Storage(), tmp_path)[0]) == 1


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_read_only_folder_is_a_named_error_and_still_loads(tmp_path):
    save(Storage(), tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"Read-only file system; choose a folder that this user may"):
        save(Failing(errno.EROFS, 0, for_good=True, kinds=tuple(set(CHANGES) - {"sync_folder"})), tmp_path, 2)
    assert load(Storage(), find(Storage(), tmp_path)[0]) == 1


def test_a_folder_above_the_run_that_may_not_be_read_does_not_stop_a_save(tmp_path):
    (tmp_path / "run").mkdir()
    storage = Failing(errno.EACCES, 0, kinds=("sync_folder",))  # the first is of the folder above
    assert load(storage, save(storage, tmp_path / "run", 1)) == 1 and storage.failed
    with pytest.raises(CheckpointError, match="Permission denied"):  # but one that we made must last
        save(Failing(errno.EACCES, 1, kinds=("sync_folder",)), tmp_path / "new", 1)


# On a file system of 48 kB that nobody else sees; argument: its folder. Prints what each save says.
REALLY_FULL = """
import subprocess, sys
from pathlib import Path
from onefold.checkpoint.protocol.commit import committed, step_name
from onefold.checkpoint.format.storage import Storage
from onefold.errors import CheckpointError
from tests.checkpoint.drive import load, save

run = Path(sys.argv[1]) / "run"
for step in range(1, 100):
    try:
        save(Storage(), run, step)
    except CheckpointError as error:
        print(error)
        break
steps = committed(Storage(), run)
assert steps == list(range(1, step)) and [load(Storage(), run / step_name(s)) for s in steps] == steps
subprocess.run(["mount", "-o", "remount,ro", sys.argv[1]], check=True)
try:
    save(Storage(), run, step)
except CheckpointError as error:
    print(error)
assert [load(Storage(), run / step_name(s)) for s in steps] == steps
"""


def test_a_disk_that_is_really_full_and_one_that_is_really_read_only(tmp_path):
    mount = ["sh", "-c", 'mount -t tmpfs -o size=48k none "$1" && exec "$2" -c "$3" "$1"', "sh"]
    command = ["unshare", "--user", "--map-root-user", "--mount", *mount, str(tmp_path), sys.executable, REALLY_FULL]
    if subprocess.run([*command[:4], "true"], capture_output=True).returncode:
        pytest.skip("the kernel allows no mount namespace")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    full, read_only = done.stdout.splitlines()
    assert "No space left on device; free space there" in full
    assert "Read-only file system; choose a folder" in read_only


def test_a_folder_further_out_is_told_where_the_checkpoints_are(tmp_path):
    save(Storage(), tmp_path / "run" / "checkpoints", 1)
    with pytest.raises(CheckpointError, match=f"there are some in {tmp_path / 'run' / 'checkpoints'}"):
        find(Storage(), tmp_path / "run")
