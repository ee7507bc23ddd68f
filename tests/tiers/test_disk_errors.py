"""What goes wrong with a disk is said by name: with what, where, and what to do. All errors here are the kernel's."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from onefold.errors import ConfigError, OffloadError, OnefoldError
from onefold.offload import disk, files
from onefold.offload.disk import DiskFile, Scratch
from tests.tiers.places import Refused, filled, in_child, on_ext2, on_tmpfs
from tests.tiers.test_disk import LATEST_S, held

BLOCK = 4096
MIB = 1 << 20
NAME = "the optimizer state of unit 3"


@pytest.fixture(params=["direct", "buffered"])
def scratch(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scratch]:
    with closing(Scratch(tmp_path, 0, buffered=request.param == "buffered")) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a file system is mounted for one process."""
    (tmp_path / "mounted").mkdir()
    return tmp_path / "mounted"


def said_by(use: Callable[[], object]) -> str:
    """The error's kind and text."""
    with pytest.raises(OnefoldError) as caught:
        use()
    return f"{type(caught.value).__name__}: {caught.value}"


# -- before the run ----------------------------------------------------------------------------------------------------


def test_a_path_that_is_not_there_or_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"/gone, does not exist; give a folder on a fast local disk"):
        Scratch(tmp_path / "gone", 0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"/file, is a file; give a folder"):
        Scratch(str(tmp_path / "file"), 0)


def in_a_folder_that_may_not_change(folder: Path) -> str:
    changed = subprocess.run(["chattr", "+i", str(folder)], capture_output=True, text=True)
    if changed.returncode:
        raise Refused(changed.stderr)
    try:
        return said_by(lambda: Scratch(folder, 0))
    finally:
        subprocess.run(["chattr", "-i", str(folder)], check=True)


def test_a_folder_in_which_this_user_may_not_write_is_refused(folder):
    if os.getuid():
        folder.chmod(0o500)
        said = said_by(lambda: Scratch(folder, 0))
    else:
        said = in_child(in_a_folder_that_may_not_change, folder)
    assert said.startswith(f"ConfigError: nothing can be written to the path for state on disk, {folder}: ")
    assert said.endswith("; choose a folder in which this user may make files")


def not_usable(folder: Path) -> str:
    return said_by(lambda: Scratch(folder, 0))


def test_a_disk_that_is_mounted_to_be_read_only_is_refused(folder):
    said = on_tmpfs(not_usable, folder, "ro")
    assert said.startswith("ConfigError: nothing can be written") and "Read-only file system" in said


def test_a_disk_that_is_too_small_is_refused_before_the_run(tmp_path):
    with pytest.raises(OffloadError, match=r"needs 1,024.0 TiB, but .* has .* left; free space there, or choose"):
        Scratch(tmp_path, 1 << 50)


# -- full --------------------------------------------------------------------------------------------------------------


def fill_while_making(folder: Path) -> list[str]:
    with closing(Scratch(folder, MIB)) as scratch:
        file = scratch.file(MIB // 2, "the first")
        file.write(filled(MIB // 2, 1)).wait()
        said = [said_by(lambda: scratch.file(MIB, NAME))]
        return [*said, said_by(lambda: file.read(filled(BLOCK, 0))), said_by(lambda: scratch.file(0, "another"))]


def test_a_disk_that_is_full_says_so_when_a_file_is_made(folder):
    said = on_tmpfs(fill_while_making, folder, "size=1m")
    assert said[0] == (
        f"OffloadError: could not make room for {NAME} in {folder}: No space left on device; free space there, or "
        f"choose a folder on a larger disk"
    )
    assert said[1] == said[2] == said[0], "after the first error all say it"


def fill_what_was_reserved(folder: Path) -> str:
    with closing(Scratch(folder, 0)) as scratch:
        file = scratch.file(MIB // 2, NAME)
        os.truncate(f"/proc/self/fd/{file.fileno()}", 0)  # its place is given back
        taken = scratch.file(MIB, "another")
        assert taken.nbytes == MIB
        return said_by(file.write(filled(MIB // 2, 1)).wait)


def test_a_disk_that_is_full_says_so_when_written_to(folder):
    said = on_tmpfs(fill_what_was_reserved, folder, "size=1m")
    assert said.startswith(f"OffloadError: could not write {NAME} in {folder}: No space left on device; free space")


def fill_while_writing(folder: Path) -> tuple[bool, list[str]]:
    with closing(Scratch(folder, 0)) as scratch:
        file = scratch.file(4 * MIB, NAME)  # more than there is: this disk cannot reserve
        direct = scratch.direct
        return direct, [said_by(file.write(filled(4 * MIB, 1)).wait), said_by(lambda: file.read(filled(BLOCK, 0)))]


def test_a_disk_that_cannot_reserve_space_says_that_it_is_full_when_written_to(folder, tmp_path):
    direct, said = on_ext2(fill_while_writing, folder, tmp_path / "image", 2048)
    assert direct
    assert said[0] == (
        f"OffloadError: could not write {NAME} in {folder}: No space left on device; free space there, or choose a "
        f"folder on a larger disk"
    )
    assert said[1] == said[0]


def beyond_the_limit(folder: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    with closing(Scratch(folder, 0)) as scratch:
        return said_by(lambda: scratch.file(2 * MIB, NAME))


def test_a_limit_on_the_size_of_files_is_named(tmp_path):
    said = in_child(beyond_the_limit, tmp_path)
    assert (
        f"make room for {NAME} in {tmp_path}: File too large; raise the limit on the size of files (ulimit -f)" in said
    )


def beyond_the_files(folder: Path) -> str:
    with closing(Scratch(folder, 0)) as scratch:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
        files: list[DiskFile] = []
        return said_by(lambda: files.extend(scratch.file(0, NAME) for _ in range(used + 1)))


def test_a_limit_on_open_files_is_named(tmp_path):
    said = in_child(beyond_the_files, tmp_path)
    assert said.endswith(f"{NAME} in {tmp_path}: Too many open files; raise the limit on open files (ulimit -n)")


# -- without O_DIRECT, O_TMPFILE ---------------------------------------------------------------------------------------


def round_trip(folder: Path) -> tuple[bool, list[int], list[str]]:
    with closing(Scratch(folder, 0)) as scratch:
        file, back = scratch.file(MIB, NAME), filled(MIB, 0)
        file.write(filled(MIB, 7)).wait()
        file.read(back).wait()
        return scratch.direct, back.unique().tolist(), os.listdir(folder)


def test_a_file_system_without_direct_io_is_used_through_the_page_cache(folder):
    assert on_tmpfs(round_trip, folder, "", kind="ramfs") == (False, [7], [])


def test_a_file_system_that_makes_no_nameless_files_gets_files_whose_name_is_gone_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)  # all that older kernels see of it: they say EISDIR
    assert round_trip(tmp_path)[1:] == ([7], [])


# -- broken ------------------------------------------------------------------------------------------------------------


def replace(file: DiskFile, path: str, flags: int) -> None:
    """From here on the file's descriptor leads to another one."""
    other = os.open(path, flags)
    os.dup2(other, file.fileno())
    os.close(other)


def test_a_disk_that_fails_is_named_with_what_was_on_it(scratch):
    file = scratch.file(BLOCK, NAME)
    replace(file, "/proc/self/mem", os.O_RDWR)  # the kernel has nothing at address 0, and says EIO
    text = (
        f"could not read {NAME} in {scratch.path}: Input/output error; the disk may be failing: see the kernel's log, "
        f"and choose a folder on another one"
    )
    with pytest.raises(OffloadError) as caught:
        file.read(filled(BLOCK, 0)).wait()
    assert str(caught.value) == text and isinstance(caught.value.__cause__, OSError)


def test_a_descriptor_that_is_not_ours_any_more_is_named(scratch):
    file = scratch.file(BLOCK, NAME)
    replace(file, os.devnull, os.O_RDONLY)
    with pytest.raises(OffloadError, match=rf"write {NAME} in .*: Bad file descriptor; something in this process"):
        file.write(filled(BLOCK, 0)).wait()


@pytest.mark.parametrize("left", [0, 3 * BLOCK, 3 * BLOCK + 100])
def test_a_file_cut_short_underneath_is_an_error_and_not_old_bytes(scratch, left):
    file = scratch.file(8 * BLOCK, NAME)
    file.write(filled(8 * BLOCK, 1)).wait()
    os.truncate(f"/proc/self/fd/{file.fileno()}", left)
    with pytest.raises(OffloadError, match=rf"could not read {NAME} in .*: it ends at byte {left:,}; something cut it"):
        file.read(filled(8 * BLOCK, 0)).wait()


def test_an_error_is_raised_once_in_the_thread_that_waits_and_then_for_all_that_is_asked(scratch):
    file, other = scratch.file(BLOCK, NAME), scratch.file(BLOCK, "another")
    replace(file, os.devnull, os.O_RDONLY)
    with held(scratch):
        first, second = file.write(filled(BLOCK, 0)), file.read(filled(BLOCK, 0))
    with pytest.raises(OffloadError, match="Bad file descriptor") as caught:
        first.wait()
    first.wait()
    text = str(caught.value)
    again = [said_by(second.wait)]
    second.wait()
    uses = (
        lambda: other.write(filled(BLOCK, 0)),
        lambda: file.read(filled(BLOCK, 0)),
        lambda: other.resize(0),
        lambda: scratch.file(BLOCK, "a third"),
    )
    again += [said_by(use) for use in uses for _ in range(2)]
    assert again == [f"OffloadError: {text}"] * 9
    scratch.close()
    with pytest.raises(OffloadError, match="Bad file descriptor"):
        other.read(filled(BLOCK, 0))


def test_one_bad_piece_of_many_fails_the_request(scratch, monkeypatch):
    monkeypatch.setattr(disk, "PIECE_BYTES", BLOCK)
    file = scratch.file(16 * BLOCK, NAME)
    os.truncate(f"/proc/self/fd/{file.fileno()}", 15 * BLOCK)
    with pytest.raises(OffloadError, match="it ends at byte"):
        file.read(filled(16 * BLOCK, 0)).wait()


def test_a_mistake_of_ours_reaches_the_caller_too(scratch, monkeypatch):
    def mistaken(*args: object) -> int:
        raise AssertionError

    monkeypatch.setattr(files, "transfer", mistaken)
    pending = scratch.file(BLOCK, NAME).read(filled(BLOCK, 0))
    assert pending.done.wait(LATEST_S)
    with pytest.raises(OffloadError, match=rf"could not read {NAME} in .*: AssertionError\(\); that is a mistake"):
        pending.wait()


def test_buffers_that_a_disk_cannot_take_are_refused(scratch):
    file, buffer = scratch.file(BLOCK, NAME), filled(4 * BLOCK, 0)
    for wrong in (buffer[:100], buffer[8 : 8 + BLOCK], buffer[: 2 * BLOCK], buffer[::4], buffer.view(4, -1)):
        with pytest.raises(AssertionError):
            file.write(wrong)
    with pytest.raises(AssertionError):
        file.resize(100)
