"""What a token file says of itself is believed only as far as it can be true; whatever it is, one line."""

import json
import os
from pathlib import Path

import numpy
import pytest

from onefold.errors import ConfigError
from onefold.train.run.data import load_data, prepare
from onefold.train.run.groups import DataSettings
from onefold.train.run.tokens import open_tokens


def npy(
    header: str | bytes, *, length: int | None = None, version: bytes = b"\x01\0", body: bytes = b"\0" * 64
) -> bytes:
    text = header.encode("latin1") if isinstance(header, str) else header
    size = (len(text) if length is None else length).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + version + size + text + body


def said(path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        prepare(DataSettings(data=path, cache=path.parent / "cache"))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    return str(error.value)


GOOD = "{'descr': '<u2', 'fortran_order': False, 'shape': (%s,), }"


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (npy(GOOD % 33), "says that it holds 33 tokens, but has bytes for 32"),
        (npy(GOOD % 10**17), "tokens, but has bytes for 32; is it whole?"),
        (npy(GOOD % 10**40), "is no NumPy file of one dimension"),
        (npy(GOOD % 0), "holds no tokens"),
        (npy(GOOD % "4, 8"), "is no NumPy file of one dimension"),
        (npy(GOOD % "-1"), "is no NumPy file of one dimension"),
        (npy(GOOD % 32, length=(1 << 32) - 1, version=b"\x02\0"), "has a header of 4,294,967,295 bytes"),
        (npy("(" * 60_000), "is no NumPy file"),
        (npy("-" * 60_000 + "1"), "is no NumPy file"),
        (npy("[" * 200_000, version=b"\x02\0"), "has a header of 200,000 bytes"),
        (npy(b"\xff\0" * 900), "is no NumPy file"),
        (b"\x93NUMPY", "is no NumPy file"),
        (b"", "is no NumPy file"),
    ],
)
def test_a_header_that_cannot_be_true_is_one_line(tmp_path, content, wanted):
    (tmp_path / "x.npy").write_bytes(content)
    assert wanted in said(tmp_path / "x.npy")


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_numpys_format_is_read(tmp_path, version):
    with (tmp_path / "x.npy").open("wb") as file:
        numpy.lib.format.write_array(file, numpy.arange(40, dtype=numpy.uint16), version=version)
        file.write(b"what follows is not its own")
    assert open_tokens(tmp_path / "x.npy").tokens()[:].tolist() == list(range(40))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[" * 60_000, "is no JSON"),
        (" " * (1 << 20) + "{}", "has 1,048,578 bytes; at most 65,536 are read"),
        ("{", "is no JSON"),
        ("[]", "should be like"),
        (json.dumps({"vocab": -1}), "should be like"),
        (json.dumps({"vocab": True}), "should be like"),
        (json.dumps({"dtype": "float32"}), "should be like"),
        ('{"vocab": ' + "9" * 5000 + "}", "is no JSON"),
    ],
)
def test_a_description_that_cannot_be_is_one_line(tmp_path, text, wanted):
    (tmp_path / "x.bin").write_bytes(b"\0" * 64)
    (tmp_path / "x.bin.json").write_text(text)
    assert wanted in said(tmp_path / "x.bin")


def test_pipes_devices_and_folders_are_one_line_and_nobody_waits(tmp_path):
    for name in ("x.npy", "x.txt", "y.bin.json"):
        os.mkfifo(tmp_path / name)
    (tmp_path / "y.bin").write_bytes(b"\0" * 64)
    (tmp_path / "z.npy").mkdir()
    (tmp_path / "w.bin").write_bytes(b"\0" * 64)
    (tmp_path / "w.bin.json").mkdir()
    assert "is a pipe or a device; give a file or a folder" in said(tmp_path / "x.npy")
    assert "is a pipe or a device" in said(tmp_path / "x.txt")
    assert "is a pipe or a device" in said(Path("/dev/zero"))
    assert "y.bin.json is a folder, pipe, socket or device; wanted is a plain file" in said(tmp_path / "y.bin")
    assert "no file in it is text" in said(tmp_path / "z.npy")
    assert "w.bin.json cannot be read: Is a directory" in said(tmp_path / "w.bin")


def test_a_cache_is_no_need_of_a_token_file(tmp_path):
    (tmp_path / "file").write_text("in the way")
    numpy.save(tmp_path / "x.npy", numpy.arange(40, dtype=numpy.uint8))
    settings = DataSettings(data=tmp_path / "x.npy", cache=tmp_path / "file" / "cache")
    assert len(load_data(settings, 4, prepare(settings).entry).tokens) == 40
