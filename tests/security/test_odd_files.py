"""Odd things in the place of files: links that lead nowhere, pipes, sockets, devices, folders, nothing. None hangs."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from onefold.checkpoint.format.storage import Storage
from tests.checkpoint.drive import save
from tests.security.others import End, one_line, run_here
from tests.train.written import write_profile, write_run

Put = Callable[[Path], object]


def put_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's whole path may have 108 bytes
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


ODD: dict[str, Put] = {
    "pipe": os.mkfifo,
    "socket": put_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path.name),
    "empty": lambda path: path.touch(),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 5 + b"\n"),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "passwords": lambda path: path.symlink_to("/etc/passwd"),
}
STEP = "checkpoints/step-00000001"
READERS = {
    "facts.json": ["report", "sample"],
    "metrics.jsonl": ["report"],
    "warnings.jsonl": ["report"],
    "config.toml": ["train"],
    "profile/summary.json": ["report"],
    f"{STEP}/manifest.json": ["inspect", "verify-checkpoint", "export"],
    f"{STEP}/rank-00001.safetensors": ["verify-checkpoint", "export"],
}
MAY_BE_MISSING = ("metrics.jsonl", "warnings.jsonl", "config.toml", "profile/summary.json")
FINE = {  # what is no mistake: a run that has not logged yet, or was not profiled
    *((name, "dangling") for name in MAY_BE_MISSING),
    ("config.toml", "loop"), ("metrics.jsonl", "empty"), ("warnings.jsonl", "empty"), ("config.toml", "empty"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_thing_in_the_place_of_a_file_is_one_line_that_names_it(tmp_path, kind):
    told = []
    for number, (name, verbs) in enumerate(READERS.items()):
        if (name, kind) in FINE:
            continue
        run = tmp_path / f"run{number}"
        write_run(run, steps=2)
        write_profile(run)
        save(Storage(), run / "checkpoints", 1)
        (run / name).unlink()
        ODD[kind](run / name)
        flags = {"export": [tmp_path / f"out{number}"]}
        before = {"train": ["--resume", "--out"]}
        told += [(name, [verb, *before.get(verb, []), run, *flags.get(verb, [])]) for verb in verbs]
    ends = [run_here(*command) for _, command in told]
    wrong = [(name, end) for (name, command), end in zip(told, ends) if not refused(command[0], end, Path(name).name)]
    assert wrong == []


def refused(verb: object, end: End, name: str) -> bool:
    """In one line; where a checkpoint is read to find damage, damage is what it is."""
    if verb == "verify-checkpoint" and end.code == 1:
        return end.out.startswith("DAMAGED  ") and name in end.out and end.out.count("\n") == 1 and end.err == ""
    return one_line(end, name)


FOLDERS: dict[str, Put] = {name: ODD[name] for name in ("pipe", "socket", "loop", "empty", "dangling", "device")}
FOLDERS |= {"missing": lambda path: None, "under a file": lambda path: path.touch()}


def test_an_odd_thing_in_the_place_of_a_folder_is_one_line(tmp_path):
    told = []
    for kind, put in FOLDERS.items():
        path = tmp_path / kind
        put(path)
        path = path / "run" if kind == "under a file" else path
        told += [["report", path], ["inspect", path], ["verify-checkpoint", path], ["sample", path]]
        told += [["export", path, tmp_path / "out"]]
    ends = [run_here(*command) for command in told]
    assert [(command, end) for command, end in zip(told, ends) if not one_line(end, str(command[1]))] == []


def test_a_name_with_a_nul_or_too_long_is_one_line(tmp_path):
    told = [[verb, tmp_path / ("x" * 300)] for verb in ("report", "inspect", "verify-checkpoint", "sample")]
    told += [["report", "a\0b"], ["inspect", "a\0b"], ["verify-checkpoint", "a\0b"], ["sample", "a\0b"]]
    assert [end for end in (run_here(*command) for command in told) if not one_line(end)] == []
