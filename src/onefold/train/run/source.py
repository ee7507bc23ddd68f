"""Which files are trained on, and what of a folder is left out."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from onefold.errors import ConfigError
from onefold.train.run.cache import default_cache
from onefold.train.run.folder import is_run
from onefold.train.run.groups import DataSettings
from onefold.train.run.tokens import SUFFIXES, TokenFile, beside, open_tokens

LOOK = 8192  # bytes of a file that are looked at for a zero, which text has not
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}  # in the standard library's folder
LEFT_OUT = {  # of a folder: one, and many
    "text file": "text files",
    "binary file": "binary files",
    "empty file": "empty files",
    "hidden file or folder": "hidden files or folders",
    "link to a folder": "links to folders",
    "pipe, device or dead link": "pipes, devices or dead links",
    "run of onefold": "runs of onefold",
    "cache of tokens": "caches of tokens",
}
STANDARD_LIBRARY = "the Python standard library"


class Source(NamedTuple):
    """What to read."""

    name: str
    root: Path
    files: tuple[Path, ...]  # of text, or token files and what describes them
    tokens: tuple[TokenFile, ...] = ()
    left_out: str = ""  # of a folder, and why

    def name_of(self, path: Path) -> str:
        """Path relative to --data, so that moved data keep their names."""
        text, root = str(path), str(self.root)
        return text.removeprefix(root) if self.root.is_file() else f"/{path.relative_to(self.root).as_posix()}"


def find_source(settings: DataSettings, own: Path | None = None) -> Source:
    """What --data means; raises if it is not there. `own` is the run's folder, which is no data."""
    path = settings.data
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return Source(STANDARD_LIBRARY, root, tuple(_standard_library(root)))
    if path.is_dir():
        files, shards, left_out = _found(path, own, settings.cache or default_cache())
        if not files:
            raise ConfigError(f"--data {path}: no file in it is text" + (f"; left out: {left_out}" if left_out else ""))
        return Source(str(path), path, files, tuple(map(open_tokens, shards)), left_out)
    if not path.exists():
        raise ConfigError(f"--data {path} is not there; give a text file, a folder, or a .bin or .npy file of tokens")
    if not path.is_file():
        raise ConfigError(f"--data {path} is a pipe or a device; give a file or a folder")
    if path.suffix in SUFFIXES:
        described = beside(path)
        return Source(str(path), path, (path, described) if described else (path,), (open_tokens(path),))
    return Source(str(path), path, (path,))


def _standard_library(root: Path) -> Iterator[Path]:
    """Its sources, without tests and without what others installed."""
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in SKIPPED_FOLDERS and not name.startswith("."))
        paths = (Path(folder) / name for name in sorted(names) if not name.startswith("."))
        yield from (path for path in paths if path.suffix == ".py" and path.is_file())


def _found(root: Path, own: Path | None, cache: Path) -> tuple[tuple[Path, ...], list[Path], str]:
    """All text files below a folder of the user's, or its token files if these are larger together; which of them are
    token files; and how many of what are left out, in words."""
    files: list[Path] = []
    shards: list[Path] = []
    left_out = dict.fromkeys(LEFT_OUT, 0)
    for folder, inner, names in os.walk(root, onerror=unreadable):
        if why := _not_data(Path(folder), own, cache):
            left_out[why] += 1
            inner[:] = []
            continue
        seen = [name for name in sorted(inner) if not name.startswith(".")]
        left_out["hidden file or folder"] += len(inner) - len(seen)
        left_out["link to a folder"] += sum(Path(folder, name).is_symlink() for name in seen)  # it may lead back here
        inner[:] = seen
        for path in (Path(folder) / name for name in sorted(names)):
            why = _not_text(path)
            if path.suffix in SUFFIXES and why in (None, "binary file"):
                shards.append(path)
            elif why is None:
                files.append(path)
            else:
                left_out[why] += 1
    described = {found for shard in shards if (found := beside(shard)) is not None}
    texts = [path for path in files if path not in described]
    if sum(path.stat().st_size for path in shards) > sum(path.stat().st_size for path in texts):
        left_out["text file"] = len(texts)
        files = sorted([*shards, *described])
    else:
        left_out["binary file"] += len(shards)
        shards = []
    said = (f"{count:,} {what if count == 1 else LEFT_OUT[what]}" for what, count in left_out.items() if count)
    return tuple(files), shards, ", ".join(said)


def _not_data(folder: Path, own: Path | None, cache: Path) -> str | None:
    """Why a folder is left out: a run would be trained on its own report."""
    if is_run(folder) or (own is not None and own.exists() and folder.samefile(own)):
        return "run of onefold"
    return "cache of tokens" if cache.exists() and folder.samefile(cache) else None


def _not_text(path: Path) -> str | None:
    """Why a file is left out, in a word of LEFT_OUT."""
    if path.name.startswith("."):
        return "hidden file or folder"
    if not path.is_file():
        return "pipe, device or dead link"
    try:
        with path.open("rb") as file:
            start = file.read(LOOK)
    except OSError as error:
        unreadable(error)
    return "empty file" if not start else "binary file" if b"\0" in start else None


def unreadable(error: OSError) -> NoReturn:
    raise ConfigError(f"--data: {error.filename} cannot be read: {error.strerror}") from error
