"""A corpus in many files, larger than memory: one order whatever files and ranks there are, and little in memory."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from onefold.errors import ConfigError, OnefoldError
from onefold.train.run import stored
from onefold.train.run.data import Data, load_data, prepare
from onefold.train.run.groups import DataSettings
from onefold.train.run.records import read_facts
from onefold.train.run.source import find_source
from onefold.train.run.stored import OpenFile, Stretch, Tokens
from tests.train.launched import curve
from tests.train.pooled import trained

NUMBERS = numpy.random.default_rng(0).integers(0, 200, 6000)
CUTS = (0, 1, 700, 2003, 2004, 6000)  # where windows of 17 tokens do not end


def shards_in(folder: Path) -> Path:
    """The same tokens in files of several kinds, in the order of their names."""
    folder.mkdir()
    kinds = ("uint8", "uint16", "int32", "int64", "uint16")
    for number, (start, stop, kind) in enumerate(zip(CUTS, CUTS[1:], kinds)):
        part = NUMBERS[start:stop].astype(kind)
        if number % 2:
            numpy.save(folder / f"{number}.npy", part)
        else:
            part.tofile(folder / f"{number}.bin")
            (folder / f"{number}.bin.json").write_text(json.dumps({"dtype": kind, "vocab": 200}))
    return folder


def made(path: Path, seq: int = 16) -> Data:
    settings = DataSettings(data=path, cache=path.parent / "cache")
    return load_data(settings, seq, prepare(settings).entry)


def test_windows_go_on_from_one_shard_into_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "MOST_OPEN", 2)  # of five files: some are closed and opened again
    found = made(shards_in(tmp_path / "shards"))
    assert found.vocab == 200 and len(found.tokens) == len(NUMBERS)
    assert found.tokens[:].tolist() == NUMBERS.tolist() and found.tokens[5999:7000].tolist() == [NUMBERS[-1]]
    for window in (0, 41, 117, 352):
        inputs, targets = found.batch([window])
        assert [*inputs[0].tolist(), int(targets[0, -1])] == NUMBERS[window * 17 : window * 17 + 17].tolist()


def test_a_run_on_shards_has_the_losses_of_a_run_on_one_file_also_after_it_was_resumed(tmp_path):
    numpy.save(tmp_path / "one.npy", NUMBERS.astype("uint8"))
    shards = shards_in(tmp_path / "shards")
    model, steps = {"vocab": 200}, {"steps": 6, "eval_every": 0}
    trained(2, tmp_path / "one", data={"data": str(tmp_path / "one.npy")}, steps=steps, model=model)
    trained(2, tmp_path / "many", data={"data": str(shards)}, steps=steps, model=model)
    assert curve(tmp_path / "many") == curve(tmp_path / "one")
    assert read_facts(tmp_path / "many")["data"]["tokenizer"] == "tokens"
    shutil.rmtree(tmp_path / "many" / "checkpoints" / "step-00000006")
    resumed = {"resume": True}
    trained(2, tmp_path / "many", data={"data": str(shards)}, steps=steps, model=model, checkpoints=resumed)
    assert curve(tmp_path / "many") == curve(tmp_path / "one")


def test_what_there_is_more_of_is_the_data_of_a_folder_and_the_rest_is_counted(tmp_path):
    shards = shards_in(tmp_path / "shards")
    (shards / "README.md").write_text("what these are")
    found = find_source(DataSettings(data=shards))
    assert len(found.tokens) == 5 and found.left_out == "1 text file"
    (shards / "README.md").write_text("what these are " * 4000)
    found = find_source(DataSettings(data=shards))
    assert found.tokens == () and "5 binary files" in found.left_out
    assert {path.name for path in found.files} == {"README.md", "0.bin.json", "2.bin.json", "4.bin.json"}


def test_a_shard_that_is_damaged_or_vanishes_is_named(tmp_path):
    shards = shards_in(tmp_path / "shards")
    found = made(shards)
    (shards / "1.npy").unlink()
    with pytest.raises(OnefoldError, match=r"1\.npy cannot be read: No such file"):
        found.batch([1])
    (shards / "1.npy").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"1\.npy is no NumPy file"):
        find_source(DataSettings(data=shards))


def test_a_file_that_became_shorter_is_named_and_nothing_crashes(tmp_path):
    path = tmp_path / "x.bin"
    NUMBERS.astype("uint16").tofile(path)
    tokens = Tokens([Stretch(path, stored.torch.uint16, 0, 6000)], OpenFile(path))
    path.write_bytes(b"\0" * 100)
    with pytest.raises(OnefoldError, match="has become shorter while it was used"):
        tokens[40:60]


LARGE = 200 << 20
ALLOWED = 120 << 20  # 85 MiB were seen: pieces of 4 million tokens as int64, and their temporaries

MEASURED = """
import json, sys
from pathlib import Path
from onefold.train.run.data import bigram_loss, load_data, prepare
from onefold.train.run.groups import DataSettings
from tests.harness.resident import resident_bytes

settings = DataSettings(data=Path(sys.argv[1]), cache=Path(sys.argv[2]))
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
before = resident_bytes("VmHWM")
data = load_data(settings, 1023, prepare(settings).entry)
for number in range(0, 4000, 8):
    data.batch([data.windows.sample(0, number + i) for i in range(8)])
loss = bigram_loss(data, data.windows.evaluated(16))
print(json.dumps({"grown": resident_bytes("VmHWM") - before, "tokens": len(data.tokens), "loss": loss}))
"""


@pytest.mark.parametrize("kind", ["shards", "text"])
def test_a_corpus_much_larger_than_what_a_process_takes_is_read_in_pieces(tmp_path, kind):
    """The files are sparse: they have their size, and no disk."""
    if kind == "text":
        path, tokens = tmp_path / "large.txt", LARGE
        with path.open("wb") as file:
            file.truncate(LARGE)
    else:
        path, tokens = tmp_path / "large", LARGE // 2
        path.mkdir()
        for number in range(4):
            with (path / f"{number}.bin").open("wb") as file:
                file.truncate(LARGE // 4)
            (path / f"{number}.bin.json").write_text(json.dumps({"dtype": "uint16", "vocab": 300}))
    words = [sys.executable, "-c", MEASURED, str(path), str(tmp_path / "cache")]
    # else glibc keeps freed pieces or gives them back, as their places in memory happen to be: 74 to 130 MiB were seen
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True, env=env).stdout)
    assert found["tokens"] == tokens and found["loss"] < 0.01
    assert found["grown"] < ALLOWED, f"{found['grown'] / (1 << 20):.0f} MiB for a corpus of {LARGE >> 20} MiB"
