"""A library that another user planted in the cache is never loaded; a killed compilation leaves nothing for long."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from onefold.optim.kernels import compiled as module
from onefold.optim.kernels.cache import NotOurs, cache_folder, kept, opened
from onefold.optim.kernels.compiled import Compiled, compiled, compilers
from onefold.settings.trust import why_untrusted
from tests.harness.python import run_python, start_python
from tests.security.others import NOBODY, needs_root

needs_compiler = pytest.mark.skipif(not compilers(), reason="needs a C compiler")
GOOD, EVIL = 42, 666
COMPILE = "import sys, pathlib, onefold.optim.kernels.compiled as it; it.compiled(pathlib.Path(sys.argv[1]))"


def text(answer: int) -> str:
    return f"int answer(void) {{ return {answer}; }}\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "spare").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "spare"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("CC", raising=False)
    path = tmp_path / "answer.c"
    path.write_text(text(GOOD))
    return path


def answer(found: Compiled) -> int:
    assert found.library is not None, found.failures
    return found.library.answer()


def plant(source: Path, tmp_path: Path) -> Path:
    """What an attacker would put there: other code under the very name that is looked for, with a right digest."""
    assert answer(compiled(source)) == GOOD
    folder = cache_folder()
    (good,) = folder.iterdir()
    evil, code = tmp_path / "evil.so", tmp_path / "evil.c"
    code.write_text(text(EVIL))
    subprocess.run([compilers()[0][0], "-shared", "-fPIC", str(code), "-o", str(evil)], check=True)
    stem = good.stem.rpartition("-")[0]
    planted = folder / f"{stem}-{module.digest(evil.read_bytes())}.so"
    good.unlink()
    planted.write_bytes(evil.read_bytes())
    planted.chmod(0o600)
    return planted


@needs_compiler
def test_what_this_user_put_there_is_loaded_so_the_planted_file_is_a_real_danger(source, tmp_path):
    plant(source, tmp_path)
    assert answer(compiled(source)) == EVIL


@needs_compiler
@needs_root
def test_a_file_of_another_user_is_not_loaded_and_made_again(source, tmp_path):
    os.chown(plant(source, tmp_path), NOBODY, NOBODY)
    assert answer(compiled(source)) == GOOD


@needs_compiler
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_loaded(source, tmp_path, mode):
    plant(source, tmp_path).chmod(mode)
    assert answer(compiled(source)) == GOOD


@needs_compiler
def test_a_link_to_a_library_is_not_followed(source, tmp_path):
    planted = plant(source, tmp_path)
    planted.rename(tmp_path / "elsewhere.so")
    planted.symlink_to(tmp_path / "elsewhere.so")
    assert answer(compiled(source)) == GOOD


@needs_compiler
def test_a_pipe_under_the_name_of_a_library_is_not_waited_for(source, tmp_path):
    planted = plant(source, tmp_path)
    planted.unlink()
    os.mkfifo(planted)
    assert answer(compiled(source)) == GOOD


@needs_compiler
@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777])
def test_a_folder_of_another_user_is_not_used_and_one_warning_says_why(source, tmp_path, caplog, mode):
    plant(source, tmp_path)
    folder = cache_folder()
    os.chown(folder, NOBODY, NOBODY)
    folder.chmod(mode)
    before = sorted(folder.iterdir())
    with caplog.at_level(logging.WARNING, logger="onefold"):
        assert [answer(compiled(source)) for _ in range(2)] == [GOOD] * 2
    (record,) = caplog.records
    assert record.message == (
        f"{folder} is not used: it belongs to user {NOBODY}; answer.c is compiled for this process alone"
    )
    assert sorted(folder.iterdir()) == before, "nothing of ours was put there"
    assert list((tmp_path / "spare").iterdir()) == []


@needs_compiler
@pytest.mark.parametrize("what", ["link", "file"])
def test_a_link_or_file_in_the_place_of_the_folder_is_not_used(source, tmp_path, caplog, what):
    (tmp_path / "cache").mkdir()
    (tmp_path / "elsewhere").mkdir(0o777)
    if what == "link":
        cache_folder().symlink_to(tmp_path / "elsewhere")
    else:
        cache_folder().touch()
    with caplog.at_level(logging.WARNING, logger="onefold"):
        assert answer(compiled(source)) == GOOD
    assert "is a link or no folder" in caplog.text and list((tmp_path / "elsewhere").iterdir()) == []


@needs_compiler
def test_a_folder_of_ours_that_others_could_write_is_closed_to_them(source):
    cache_folder().mkdir(parents=True)
    cache_folder().chmod(0o777)
    assert answer(compiled(source)) == GOOD
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o755
    (kept_file,) = cache_folder().iterdir()
    assert why_untrusted(kept_file.stat()) is None


@needs_compiler
def test_what_is_made_is_private_whatever_the_umask(source, tmp_path):
    before = os.umask(0)
    try:
        assert answer(compiled(source)) == GOOD
    finally:
        os.umask(before)
    modes = [
        stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache", cache_folder(), *cache_folder().iterdir())
    ]
    assert modes == [0o700, 0o700, 0o600]


@needs_compiler
def test_a_file_exchanged_after_the_check_is_not_the_one_that_is_loaded(source, tmp_path, monkeypatch):
    """The loader is given the descriptor that was read, not a name. Another process compiles: the loader of this one
    would remember the library."""
    assert run_python("-c", COMPILE, source).returncode == 0
    (path,) = cache_folder().iterdir()
    real = ctypes.CDLL

    def exchanged(name: str) -> ctypes.CDLL:
        path.unlink(missing_ok=True)
        path.write_bytes(b"not this")
        return real(name)

    monkeypatch.setattr(ctypes, "CDLL", exchanged)
    with opened(cache_folder()) as folder:
        library = kept(folder, path.stem.rpartition("-")[0])
    assert library is not None and library.answer() == GOOD and path.read_bytes() == b"not this"


@needs_compiler
def test_a_new_library_is_not_taken_for_one_that_was_loaded_before(source):
    """The loader remembers the names of what it loaded: a descriptor's number must not come to mean another file."""
    seen = []
    for number in range(4):
        source.write_text(text(number))
        seen.append(answer(compiled(source)))
    assert seen == [0, 1, 2, 3]


@needs_compiler
def test_a_compilation_that_was_killed_leaves_nothing_after_the_next(source, tmp_path):
    script = tmp_path / "slow"
    script.write_text(f'#!/bin/sh\ncase "$*" in *answer.c*) echo x > half; echo $$ > {tmp_path}/began; exec sleep 60;; '
                      f'esac\nexec {compilers()[0][0]} "$@"\n')  # fmt: skip
    script.chmod(0o700)
    victim = start_python("-c", COMPILE, source, env={**os.environ, "CC": str(script)})
    began, deadline = tmp_path / "began", time.monotonic() + 60
    while not (began.exists() and began.read_text().strip()):
        assert time.monotonic() < deadline and victim.poll() is None
        time.sleep(0.01)
    (left,) = (tmp_path / "spare").iterdir()
    assert stat.S_IMODE(left.stat().st_mode) == 0o700 and [path.name for path in left.iterdir()] == ["half"]
    assert answer(compiled(source)) == GOOD
    assert left.exists(), "its process lives"
    victim.kill()
    assert victim.wait() == -signal.SIGKILL
    os.kill(int(began.read_text()), signal.SIGKILL)
    source.write_text(text(GOOD + 1))
    assert answer(compiled(source)) == GOOD + 1
    assert list((tmp_path / "spare").iterdir()) == []


def test_what_is_not_ours_alone_is_told_by_owner_and_mode(tmp_path):
    file = tmp_path / "file"
    file.touch(0o600)
    assert why_untrusted(file.stat()) is None
    file.chmod(0o620)
    assert why_untrusted(file.stat()) == "group or others may write to it (mode 0620)"
    if os.geteuid() == 0:
        os.chown(file, 1001, 0)
        assert why_untrusted(file.stat()) == "it belongs to user 1001"


def test_a_relative_cache_home_is_ignored_as_the_standard_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "here", "./here"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache_folder() == tmp_path / ".cache" / "onefold"


@needs_root
def test_a_folder_of_root_that_all_may_write_is_refused_to_another_user(shared_path):
    folder = shared_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    os.seteuid(NOBODY)
    try:
        with pytest.raises(NotOurs, match=r"group or others may write to it \(mode 1777\)"), opened(folder):
            pass
    finally:
        os.seteuid(0)


def test_files_of_the_user_that_are_named_much_like_drafts_stay(source, tmp_path):
    mine = tmp_path / "spare" / "making-sourdough"
    mine.mkdir()
    (mine / "recipe.txt").write_text("flour")
    (tmp_path / "spare" / "making-of.txt").write_text("film")
    with module.compile_folder():
        pass
    assert (mine / "recipe.txt").exists() and (tmp_path / "spare" / "making-of.txt").exists()
