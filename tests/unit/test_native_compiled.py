"""Our C is compiled once and kept; whatever is broken, missing or damaged on the way costs time and never a run."""

from __future__ import annotations

import logging
import math
import os
import shutil
import stat
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

import pytest

from onefold.optim.kernels import cpu
from onefold.optim.kernels.compiled import Compiled, compiled, compilers
from onefold.optim.kernels.threads import quota, threads_here
from tests.harness import run_ranks

ANSWER = "#ifdef _OPENMP\nint answer(void) { return 42; }\n#else\nint answer(void) { return 41; }\n#endif\n"
needs_compiler = pytest.mark.skipif(not compilers(), reason="needs a C compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small C file, a cache of its own, and the machine's own compilers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    path = tmp_path / "answer.c"
    path.write_text(ANSWER)
    return path


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!{shutil.which('sh')}\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def answer(found: Compiled) -> int:
    assert found.library is not None, found.failures
    return found.library.answer()


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "onefold").glob("*"))


@needs_compiler
def test_it_is_compiled_once_and_again_when_the_source_changes(source: Path, tmp_path: Path, monkeypatch) -> None:
    real, log = compilers()[0][0], tmp_path / "log"
    script = program(tmp_path / "counting", f'case "$*" in *answer.c*) echo x >> {log};; esac\nexec {real} "$@"')
    monkeypatch.setenv("CC", str(script))
    assert [answer(compiled(source)) for _ in range(3)] == [42] * 3
    assert len(log.read_text().split()) == 1 and len(kept(tmp_path)) == 1, "nothing else is left in the cache"
    source.write_text(ANSWER.replace("42", "43"))
    assert answer(compiled(source)) == 43
    assert len(log.read_text().split()) == 2 and len(kept(tmp_path)) == 2


@needs_compiler
@pytest.mark.parametrize("damage", ["cut short", "other bytes", "empty"])
def test_a_damaged_file_in_the_cache_is_made_again(source: Path, tmp_path: Path, damage: str) -> None:
    assert answer(compiled(source)) == 42
    (path,) = kept(tmp_path)
    whole = path.read_bytes()
    path.unlink()  # this process has it in memory
    path.write_bytes({"cut short": whole[:4096], "other bytes": whole[:-99] + bytes(99), "empty": b""}[damage])
    assert answer(compiled(source)) == 42
    assert kept(tmp_path) == [path] and path.read_bytes() == whole


@needs_compiler
def test_a_cache_that_cannot_be_written_is_done_without(source: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "spare"))
    monkeypatch.setattr("tempfile.tempdir", None)  # or it remembers another
    (tmp_path / "spare").mkdir()
    assert answer(compiled(source)) == 42
    assert list((tmp_path / "spare").iterdir()) == [], "a temporary folder was left behind"


@needs_compiler
def test_a_compiler_that_fails_is_passed_over(source: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CC", str(program(tmp_path / "broken", "echo 'fatal error: no' >&2\nexit 1")))
    assert answer(compiled(source)) == 42


@needs_compiler
def test_without_openmp_it_is_compiled_for_one_thread(source: Path, tmp_path: Path, monkeypatch) -> None:
    real = compilers()[0][0]
    without = f'case " $* " in *" -fopenmp "*) exit 1;; esac\nPATH={os.environ["PATH"]} exec {real} "$@"'
    script = program(tmp_path / "plain", without)
    monkeypatch.setenv("CC", f"{script} -DSIDE")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compilers() == [[str(script), "-DSIDE"]], "the arguments in $CC belong to it"
    assert answer(compiled(source)) == 41


def freshly_imported(module: ModuleType) -> ModuleType:
    """The module as a process has it that has not used it yet."""
    spec = module.__spec__
    assert spec is not None and spec.loader is not None
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    return fresh


def test_with_no_compiler_at_all_the_log_says_so_once_and_torch_updates(source: Path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.INFO, logger="onefold"):
        assert not freshly_imported(cpu).available()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "no C compiler was found: $CC, cc, gcc, clang" in record.message and "as long" in record.message


def compile_at_once(source: str, cache: str) -> int:
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = cache
    try:
        return answer(compiled(Path(source)))
    finally:
        os.environ.clear()
        os.environ.update(before)


@needs_compiler
def test_ranks_may_compile_at_once(source: Path, tmp_path: Path) -> None:
    for attempt in range(3):
        cache = tmp_path / f"cache{attempt}"
        assert run_ranks(2, compile_at_once, str(source), str(cache)) == [42] * 2
        assert {path.suffix for path in (cache / "onefold").iterdir()} == {".so"}, "an unfinished file was left"


# -- threads ---------------------------------------------------------------------------------------------------------


def test_ranks_of_a_machine_share_the_cores_they_may_use(monkeypatch) -> None:
    allowed = os.sched_getaffinity(0)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = threads_here()
    assert 1 <= alone <= len(allowed)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert threads_here() == max(1, alone // 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert threads_here() == 1
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert threads_here() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("files", "mine", "cores"),
    [
        ({}, "0::/", math.inf),
        ({"cpu.max": "max 100000"}, "0::/", math.inf),
        ({"cpu.max": "350000 100000"}, "0::/", 3.5),
        ({"cpu.max": "50000 100000"}, "0::/", 1.0),
        ({"a/cpu.max": "400000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 4.0),
        ({"a/cpu.max": "200000 100000", "a/b/cpu.max": "600000 100000"}, "0::/a/b", 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/x", math.inf),
        ({"cpu/cpu.cfs_quota_us": "800000", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/x\n0::/", 8.0),
    ],
)
def test_a_container_grants_what_its_control_groups_say(tmp_path: Path, files, mine, cores) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    (tmp_path / "mine").write_text(mine + "\n")
    assert quota(tmp_path, tmp_path / "mine") == cores
    assert quota(tmp_path, tmp_path / "not there") == math.inf
