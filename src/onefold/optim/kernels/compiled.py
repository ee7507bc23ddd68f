"""Compiles a C file of this package at first use, with the machine's compiler, and loads it; cached for later runs.

The library is in the user's cache folder, under a name made from its inputs (source, flags, compiler, processor) and
from its own bytes, so that a damaged file is noticed before it is loaded, and compiled again. Ranks may compile at the
same time: each writes under a name of its own and renames the complete file. Where the cache folder cannot be written,
or other users may write to it, this process compiles into a private temporary folder.
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
X86 = platform.machine() in ("x86_64", "AMD64")
ARCH = "-mcpu=native" if platform.machine() in ("aarch64", "arm64", "ppc64le") else "-march=native"
WIDTH = ("-mprefer-vector-width=512",) if X86 else ()  # compilers prefer half of what AVX-512 has
EXACT = ("-ffp-contract=off",)  # exactly the arithmetic in the source
VECTORS = ("-O3", ARCH, "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd")  # these change no result
FLAGS = ("-std=c99", *VECTORS, *EXACT, "-fno-strict-aliasing", "-shared", "-fPIC")
THREADS = ("-fopenmp",)
ATTEMPTS = tuple(dict.fromkeys([(*THREADS, *WIDTH), THREADS, ()]))  # old compilers do not know WIDTH
TIMEOUT_S = 300
CPU_LINES = ("vendor", "model", "cpu family", "stepping", "flags", "features", "cpu part", "cpu implementer")


class Compiled(NamedTuple):
    """The library, or the reason why each compiler failed."""

    library: ctypes.CDLL | None
    failures: tuple[str, ...]


def compiled(source: Path) -> Compiled:
    """Loads the library of a C file from the cache, or compiles it: with OpenMP if any compiler can."""
    commands, failures = compilers(), []
    for more in ATTEMPTS:
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
    """The C compilers of this machine: that of $CC, with its arguments, then the usual names; each once."""
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
    """Compiles the library; a descriptor of the file, whose name is gone."""
    with compile_folder() as folder:
        _run([*command, str(source.absolute()), "-o", "made.so", "-lm"], folder)
        file = os.open("made.so", FILE, dir_fd=folder)
        os.fchmod(file, 0o600)  # whatever the umask was; until now the folder kept others out
        return file


@cache
def _warn(message: str) -> None:
    LOG.warning(message)


def _processor() -> str:
    """The lines of /proc/cpuinfo that identify the kind of processor."""
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
    """The output of a command, run in this folder, where it also keeps its temporary files."""
    where = None if folder is None else f"/proc/self/fd/{folder}"
    environment = os.environ if folder is None else {**os.environ, "TMPDIR": "."}
    return subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, cwd=where,
        env=environment,
    ).stdout  # fmt: skip


def _reason(error: Exception) -> str:
    """The first line of a compiler's output that names an error."""
    said = (error.stderr or "") if isinstance(error, subprocess.CalledProcessError) else ""
    wrong = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines() or [str(error)]
    return wrong[0].strip()
