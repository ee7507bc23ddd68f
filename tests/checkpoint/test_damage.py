"""Whatever happened to a committed checkpoint's bytes, nobody loads them: file and tensor are named."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from onefold.checkpoint.format.manifest import file_name
from onefold.checkpoint.format.reading import Checkpoint
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import TensorFile
from onefold.checkpoint.format.verify import check, verify
from onefold.cost.layout import Span
from onefold.errors import CheckpointDamaged
from tests.checkpoint.disk import Disk, Folder
from tests.checkpoint.drive import expected, load, save

RUN = Path("/run")


def written() -> tuple[Disk, Path]:
    disk = Disk(Folder({"run": Folder()}))
    return disk, save(disk, RUN, 7)


def content(disk: Disk, folder: Path, name: str) -> bytearray:
    return disk.file_at(folder / name).now


def refused(disk: Disk, folder: Path, name: str) -> str:
    """Both reading and verifying find it; gives what reading says."""
    with pytest.raises(CheckpointDamaged) as load_error:
        load(disk, folder)
    damages = verify(disk, folder)
    assert {damage.file for damage in damages} == {name}
    assert str(folder / name) in str(load_error.value) and str(folder / name) in damages[0].what
    if damages[0].tensor is None and name != "manifest.json":  # nothing of the file can be read
        assert "it holds w" in damages[0].what
    return str(load_error.value)


def test_a_whole_checkpoint_has_no_damage():
    disk, folder = written()
    assert verify(disk, folder) == [] and load(disk, folder) == 7


@pytest.mark.trials_of("bit flips")
def test_every_flipped_bit_is_found_and_its_file_and_tensor_named(soak):
    disk, folder = written()
    rng = random.Random(0)
    places = [(name, at) for name in disk.names(folder) for at in range(len(content(disk, folder, name)))]
    for name, at in rng.choices(places, k=soak.number(200, 2000)):
        bit = 1 << rng.randrange(8)
        content(disk, folder, name)[at] ^= bit
        what = refused(disk, folder, name)
        assert name == "manifest.json" or "w|" in what or "it holds w" in what
        content(disk, folder, name)[at] ^= bit
        soak.tried()
    assert verify(disk, folder) == []


def test_the_tensor_named_is_the_one_that_was_damaged():
    disk, folder = written()
    for rank in range(3):
        file = TensorFile(disk, folder / file_name(rank))
        for key in file.blocks:
            content(disk, folder, file_name(rank))[file.end(key) - 1] ^= 4
            with pytest.raises(CheckpointDamaged) as error:
                check(disk, folder)
            assert f"{file_name(rank)}: tensor {key}:" in str(error.value)
            content(disk, folder, file_name(rank))[file.end(key) - 1] ^= 4


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00002.safetensors", "manifest.json"])
def test_a_file_cut_at_any_boundary_is_found(name):
    disk, folder = written()
    whole = bytes(content(disk, folder, name))
    ends = [0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1]
    if name != "manifest.json":
        file = TensorFile(disk, folder / name)
        starts = [file.end(key) - file.blocks[key].bytes for key in file.blocks]
        around = [end + by for end in [*starts, *map(file.end, file.blocks)] for by in (-1, 0, 1)]
        ends += [end for end in around if end < len(whole)]
    for end in ends:
        content(disk, folder, name)[:] = whole[:end]
        refused(disk, folder, name)
    content(disk, folder, name)[:] = whole + b"\0"
    refused(disk, folder, name)


def test_a_missing_file_is_found_and_what_it_held_named():
    disk, folder = written()
    disk.remove(folder / file_name(1))
    assert "rank-00001.safetensors is missing; it holds w" in refused(disk, folder, file_name(1))


def test_files_of_two_checkpoints_do_not_mix():
    disk, folder = written()
    other = save(disk, RUN, 8)
    content(disk, folder, file_name(1))[:] = content(disk, other, file_name(1))  # whole, but of another step
    assert "SHA-256 differs" in refused(disk, folder, file_name(1))


def test_a_rank_reads_no_file_that_it_does_not_need(tmp_path):
    read: list[str] = []

    class Watching(Storage):
        def at(self, operation: str, path: Path) -> None:
            if operation == "read":
                read.append(path.name)

    folder = save(Storage(), tmp_path, 1)  # of three ranks, 40 elements each
    out = torch.empty(20)
    Checkpoint(Watching(), folder).read("w", Span(30, 50), out)
    assert torch.equal(out, expected(1, "value")[30:50])
    assert set(read) == {"manifest.json", file_name(0), file_name(1)}


def test_any_range_over_any_number_of_files_is_what_was_written(tmp_path):
    checkpoint = Checkpoint(Storage(), save(Storage(), tmp_path, 1, ranks=5))
    for start in range(0, 121, 6):
        for stop in range(start, 121, 9):
            out = torch.empty(stop - start)
            checkpoint.read("w", Span(start, stop), out)
            assert torch.equal(out, expected(1, "value")[start:stop])
