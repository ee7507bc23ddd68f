"""The token cache is this user's alone; what is damaged or planted is noticed; who is killed leaves nothing."""

import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from onefold.errors import ConfigError
from onefold.train.run import digest
from onefold.train.run.cache import HEADER_BYTES, Cache, named_draft_of
from onefold.train.run.data import load_data, prepare
from onefold.train.run.groups import DataSettings
from tests.harness.python import start_python

NOBODY = 65534
TEXT = b"private words, " * 40
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def settings(tmp_path) -> DataSettings:
    (tmp_path / "a.txt").write_bytes(TEXT)
    return DataSettings(data=tmp_path / "a.txt", cache=tmp_path / "in" / "cache")


def entry_of(settings: DataSettings) -> Path:
    assert settings.cache is not None
    found = prepare(settings).entry
    assert found is not None
    return settings.cache / found


def tokens(settings: DataSettings) -> bytes:
    return bytes(load_data(settings, 4, prepare(settings).entry).tokens[:].tolist())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_and_folders_of_the_cache_are_for_this_user_alone(settings):
    before = os.umask(0)
    try:
        path = entry_of(settings)
    finally:
        os.umask(before)
    assert (mode(path), mode(path.parent), mode(path.parent.parent)) == (0o600, 0o700, 0o700)
    assert [one.name for one in path.parent.iterdir() if not one.name.endswith(".sha256")] == [path.name]


def other(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command as another user."""
    return subprocess.run(arguments, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True)


@as_root
def test_another_user_cannot_read_what_was_tokenised(settings):
    path = entry_of(settings)
    for folder in path.parents[:-2]:
        folder.chmod(0o755)  # as if it were reachable
    assert other("cat", str(path)).returncode != 0
    assert TEXT in path.read_bytes()


def test_a_cache_that_others_may_write_is_refused_in_one_line(settings):
    settings.cache.mkdir(parents=True)
    settings.cache.chmod(0o777)
    with pytest.raises(ConfigError) as error:
        prepare(settings)
    assert "group or others may write to it (mode 0777); give a folder of your own with --cache" in str(error.value)
    assert "\n" not in str(error.value) and list(settings.cache.iterdir()) == []


@as_root
def test_a_cache_of_another_user_is_refused(settings):
    settings.cache.mkdir(parents=True)
    os.chown(settings.cache, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"it belongs to user {NOBODY}; give a folder of your own"):
        prepare(settings)


def test_the_default_cache_is_put_right(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "onefold").mkdir()
    (tmp_path / "onefold").chmod(0o777)
    prepare(DataSettings(data=settings.data))
    assert mode(tmp_path / "onefold") == 0o700


def test_a_relative_xdg_cache_home_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Cache(None).folder == tmp_path / ".cache" / "onefold"
    assert [path.name for path in tmp_path.iterdir()] == [".cache"]


@as_root
def test_a_default_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "onefold").mkdir()
    os.chown(tmp_path / "onefold", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="it belongs to user"):
        Cache(None)


def test_an_entry_that_others_may_write_is_refused_in_a_given_cache_and_made_again_in_the_default_one(
    settings, tmp_path, monkeypatch
):
    path = entry_of(settings)
    path.chmod(0o666)
    with pytest.raises(ConfigError, match=r"mode 0666\); remove it"):
        prepare(settings)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    default = DataSettings(data=settings.data)
    planted = tmp_path / "onefold" / prepare(default).entry
    planted.chmod(0o666)
    assert tokens(default) == TEXT and mode(planted) == 0o600


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1] + b"?",
        lambda whole: whole + b"more",
        lambda whole: b"",
        lambda whole: whole[HEADER_BYTES:],
        lambda whole: b"\0" * len(whole),
    ],
    ids=["halved", "one byte", "longer", "empty", "no header", "zeros"],
)
def test_a_damaged_entry_is_noticed_and_made_again(settings, damage):
    path = entry_of(settings)
    path.write_bytes(damage(path.read_bytes()))
    assert tokens(settings) == TEXT
    assert path.read_bytes()[HEADER_BYTES:] == TEXT


def test_an_entry_that_is_a_link_or_a_pipe_is_replaced(settings, tmp_path):
    path = entry_of(settings)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert tokens(settings) == TEXT and not path.is_symlink()
    path.unlink()
    os.mkfifo(path)
    assert tokens(settings) == TEXT and path.is_file()


WRITER = """
import sys
from pathlib import Path
from onefold.train.run.cache import Cache
def pieces():
    while True:
        yield b"x" * 65536
Cache(Path(sys.argv[1])).write("large.tokens", pieces())
"""


def drafts(pid: int, folder: Path) -> list[int]:
    """Sizes of files in a folder that a process has open."""
    found = []
    for one in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(one).startswith(f"{folder}/"):
                found.append(one.stat().st_size)
        except OSError:
            continue
    return found


def test_a_writer_that_is_killed_leaves_nothing(tmp_path):
    process = start_python("-c", WRITER, str(tmp_path / "cache"))
    try:
        deadline = time.monotonic() + 60
        while not any(size > 1 << 20 for size in drafts(process.pid, tmp_path / "cache")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_named_draft_becomes_the_file_or_goes(tmp_path):
    with named_draft_of(tmp_path / "good") as draft:
        os.write(draft, b"all")
        assert mode(next(tmp_path.iterdir())) == 0o600
    with pytest.raises(KeyError), named_draft_of(tmp_path / "bad"):
        raise KeyError
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("good", b"all")]


def test_files_that_nobody_wrote_to_are_not_hashed_again(settings, monkeypatch):
    os.utime(settings.data, (1, 1))
    first = prepare(settings).digests
    time_ns = settings.data.stat().st_ctime_ns
    monkeypatch.setattr(digest, "SETTLED_NS", -(10**12))  # as if the file were old
    assert prepare(settings).digests == first
    monkeypatch.setattr(digest, "_hash", lambda *_: pytest.fail("hashed again"))
    assert prepare(settings).digests == first and settings.data.stat().st_ctime_ns == time_ns
    monkeypatch.undo()
    settings.data.write_bytes(TEXT[::-1])
    os.utime(settings.data, (1, 1))
    assert prepare(settings).digests != first, "size and time of writing are those of before"
