"""A C file of ours as a library in this process: compiled at first use by the compiler that is here, kept for later.

The library is kept in the user's cache folder, under a name made from all that went in (source, flags, compiler,
processor) and from the bytes that came out, so that a damaged file is seen before it is loaded, and made again. Ranks
may compile at once: each writes under a name of its own and renames the file when it is whole. Where nothing can be
kept, or others may write to that folder, a private temporary folder serves this process.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shlex
import shutil
import subprocess
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from onefold.optim.kernels.cache import (
    FILE,
    NotOurs,
    cache_folder,
    compile_folder,
    content_of,
    digest,
    keep,
    kept,
    load,
    opened,
    sweep,
)

LOG = logging.getLogger("onefold")
ARCH = "-mcpu=native" if platform.machine() in ("aarch64", "arm64", "ppc64le") else "-march=native"
EXACT = ("-ffp-contract=off",)  # the arithmetic that the source says
VECTORS = ("-O3", ARCH, "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd")  # these change no result
FLAGS = ("-std=c99", *VECTORS, *EXACT, "-fno-strict-aliasing", "-shared", "-fPIC")
THREADS = ("-fopenmp",)
TIMEOUT_S = 300
CPU_LINES = ("vendor", "model", "cpu family", "stepping", "flags", "features", "cpu part", "cpu implementer")


class Compiled(NamedTuple):
    """The library, or what went wrong with each compiler."""

    library: ctypes.CDLL | None
    failures: tuple[str, ...]


def compiled(source: Path) -> Compiled:
    """Load it from the cache, or compile it: with threads if any compiler can."""
    commands, failures = compilers(), []
    for more in (THREADS, ()):
        for command in commands:
            try:
                version = _run([*command, "--version"])
                if more and "clang" in version and _holds_llvm_openmp():
                    raise OSError("a second OpenMP of LLVM in one process would end it")
                return Compiled(_load(source, [*command, *FLAGS, *more], version), ())
            except (OSError, subprocess.SubprocessError) as error:
                failures.append(f"{shlex.join(command)}{' with OpenMP' if more else ''}: {_reason(error)}")
    return Compiled(None, tuple(failures) or ("no C compiler was found: $CC, cc, gcc, clang",))


def compilers() -> list[list[str]]:
    """Those that are here: the one that $CC names, with its arguments, then the usual names; each once."""
    named = [shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]]
    found: dict[tuple[str, ...], list[str]] = {}
    for command in named:
        if command and (path := shutil.which(command[0])):
            found.setdefault((os.path.realpath(path), *command[1:]), [path, *command[1:]])
    return list(found.values())


def _load(source: Path, command: list[str], version: str) -> ctypes.CDLL:
    went_in = [source.read_text(), *command[1:], version, platform.machine(), _processor()]
    stem = f"{source.stem}-{digest(chr(0).join(went_in).encode())}"
    with ExitStack() as stack:
        folder = None
        try:
            folder = stack.enter_context(opened(cache_folder()))
            sweep(folder)
            if (library := kept(folder, stem)) is not None:
                return library
        except NotOurs as error:
            _warn(f"{error}; {source.name} is compiled for this process alone")
        except (OSError, RuntimeError):  # it cannot be made or read, no program may run from it, or there is no home
            pass
        file = _made(source, command)
        if folder is not None:
            with suppress(OSError):  # it cannot be written, or no program may run from it
                library = keep(folder, stem, content_of(file))
                os.close(file)
                return library
        return load(file)


def _made(source: Path, command: list[str]) -> int:
    """A descriptor of the new library, which has no name any more."""
    with compile_folder() as folder:
        _run([*command, str(source.absolute()), "-o", "made.so", "-lm"], folder)
        file = os.open("made.so", FILE, dir_fd=folder)
        os.fchmod(file, 0o600)  # whatever the umask: others could not reach it so far
        return file


@cache
def _warn(message: str) -> None:
    LOG.warning(message)


def _processor() -> str:
    """What tells one kind of processor from another."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.lower().startswith(CPU_LINES))


def _holds_llvm_openmp() -> bool:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return True
    return "libomp" in maps or "libiomp" in maps


def _run(command: list[str], folder: int | None = None) -> str:
    """What a command says; in this folder, where it also keeps its own temporary files."""
    where = None if folder is None else f"/proc/self/fd/{folder}"
    environment = os.environ if folder is None else {**os.environ, "TMPDIR": "."}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, cwd=where,
        env=environment,
    ).stdout  # fmt: skip


def _reason(error: Exception) -> str:
    """One line of what a compiler said."""
    said = (error.stderr or "") if isinstance(error, subprocess.CalledProcessError) else ""
    wrong = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines() or [str(error)]
    return wrong[0].strip()
