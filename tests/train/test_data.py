"""Text, folders and token files become one vector of tokens, cut into windows; mistakes are one sentence."""

import io
import json
import os
import threading
from pathlib import Path

import numpy
import pytest
import torch

from onefold.errors import ConfigError
from onefold.train.run import data as module
from onefold.train.run.data import bigram_loss, load_data, prepare
from onefold.train.run.groups import DataSettings
from onefold.train.run.records import read_facts
from onefold.train.run.sample import codec_of
from onefold.train.run.source import find_source
from tests.train.launched import SMALL, run


def made(tmp_path, seq=16, **fields):
    settings = DataSettings(cache=tmp_path / "cache", **fields)
    return load_data(settings, seq, prepare(settings).entry)


def test_without_data_it_is_the_standard_library_byte_for_byte(tmp_path):
    found = made(tmp_path, seq=128)
    assert found.vocab == 256 and len(found.tokens) > 2_000_000
    assert b"import " in bytes(found.tokens[:200_000].tolist())
    assert found.source == "the Python standard library"


def written(root, **files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_a_folder_is_its_text_files_in_order_of_their_names(tmp_path):
    files = {"b/x.md": b"second", "a.txt": b"first", "c.bin2": b"\0\1\2", ".hidden": b"no", "d": b""}
    found = made(tmp_path, seq=1, data=written(tmp_path / "texts", **files), val_fraction=0.5)
    assert bytes(found.tokens[:].tolist()) == b"first\n\0\nsecond"


@pytest.mark.parametrize("name", ["test", "tests", "site-packages", "dist-packages", "__pycache__"])
def test_a_users_folder_is_read_whatever_its_subfolders_are_called(tmp_path, name):
    root = written(tmp_path / "texts", **{"a.txt": b"first"})
    before = made(tmp_path, seq=1, data=root, val_fraction=0.5)
    written(root, **{f"{name}/b.txt": b"second"})
    after = made(tmp_path, seq=1, data=root, val_fraction=0.5)
    assert bytes(after.tokens[:].tolist()) == b"first\n\0\nsecond" and bytes(before.tokens[:].tolist()) == b"first"
    assert find_source(DataSettings(data=root)).left_out == ""


def test_the_standard_library_is_read_without_its_tests_and_what_others_installed(tmp_path):
    files = find_source(DataSettings()).files
    assert not {part for path in files for part in path.parts} & {"test", "tests", "site-packages"}


def test_what_a_folder_has_beside_text_is_counted(tmp_path):
    root = written(tmp_path / "texts", **{"a.txt": b"text", "b.png": b"\0", "in/c.pyc": b"x\0", "in/d": b""})
    written(root, **{".e": b"no", ".git/f": b"no", "g/.h": b"no"})
    (root / "ring").symlink_to(root)
    (root / "in" / "dead").symlink_to(root / "nowhere")
    source = find_source(DataSettings(data=root))
    assert source.files == (root / "a.txt",)
    assert source.left_out == (
        "2 binary files, 1 empty file, 3 hidden files or folders, 1 link to a folder, 1 pipe, device or dead link"
    )


def test_a_run_says_on_the_screen_and_writes_down_what_it_left_out_also_with_a_long_tmpdir(tmp_path):
    long = tmp_path / ("l" * 100)  # longer than the name of a socket may be
    long.mkdir()
    root = written(tmp_path / "texts", **{"tests/a.txt": b"some text. " * 100, "b.png": b"\0", ".git/c": b"no"})
    flags = (*SMALL, "--steps", "1", "--ranks", "1", "--data", str(root))
    code, out, err = run(tmp_path / "run", *flags, env={"TMPDIR": str(long)})
    assert code == 0, err
    said = "1 binary file, 1 hidden file or folder"
    assert out.splitlines().count(f"left out of {root}: {said}") == 1
    assert read_facts(tmp_path / "run")["data"]["left_out"] == said
    assert said in (tmp_path / "run" / "report.html").read_text()


def test_changed_text_is_tokenised_again_and_unchanged_text_is_not(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("x" * 200)
    made(tmp_path, data=path)
    monkeypatch.setattr(module, "_tokenised", lambda *_: pytest.fail("tokenised again"))
    made(tmp_path, data=path)
    monkeypatch.undo()
    path.write_text("y" * 300)
    assert bytes(made(tmp_path, data=path).tokens[:].tolist()) == b"y" * 300


def test_processes_that_tokenise_at_once_leave_one_whole_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(1, 256)) * 4000)
    settings = DataSettings(cache=tmp_path / "cache", data=path)
    threads = [threading.Thread(target=prepare, args=(settings,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bytes(load_data(settings, 16, prepare(settings).entry).tokens[:].tolist()) == path.read_bytes()
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_token_files_are_read_in_every_integer_type(tmp_path, kind, dtype):
    numbers = numpy.arange(3, 243).astype(dtype)
    path = tmp_path / f"tokens.{kind}"
    if kind == "npy":
        numpy.save(path, numbers)
    else:
        numbers.tofile(path)
        (tmp_path / "tokens.bin.json").write_text(json.dumps({"dtype": dtype, "vocab": 300}))
    found = made(tmp_path, data=path)
    assert found.vocab == (243 if kind == "npy" else 300)
    inputs, targets = found.batch([0, 2])
    assert inputs.tolist() == [list(range(3, 19)), list(range(37, 53))]
    assert torch.equal(targets, inputs + 1)


def tokenizer_of(folder: Path, words: dict[str, int]) -> str:
    """A tokenizers file of these words and their ids; [U] stands for all others."""
    tokenizers = pytest.importorskip("tokenizers")
    made_of = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[U]"))
    made_of.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made_of.save(str(folder / "t.json"))
    return str(folder / "t.json")


def test_a_tokenizers_file_gives_its_own_tokens(tmp_path):
    tokenizer = tokenizer_of(tmp_path, {"[U]": 0, "one": 1, "two": 2})
    (tmp_path / "a.txt").write_text("one two three two " * 50)
    found = made(tmp_path, data=tmp_path / "a.txt", tokenizer=tokenizer)
    assert found.tokens[:4].to(torch.int64).tolist() == [1, 2, 0, 2] and found.vocab == 3


def test_a_tokenizers_file_with_gaps_in_its_ids_has_a_vocabulary_up_to_the_largest(tmp_path):
    tokenizer = tokenizer_of(tmp_path, {"a": 0, "b": 1, "[U]": 500})
    (tmp_path / "a.txt").write_text("a b c " * 50)
    found = made(tmp_path, data=tmp_path / "a.txt", tokenizer=tokenizer)
    assert found.vocab == 501 == codec_of(tokenizer, 501).vocab
    assert bigram_loss(found, range(2)) > 0


def structured() -> bytes:
    file = io.BytesIO()
    numpy.save(file, numpy.zeros(9, dtype=[("a", "<i4")]))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone", None, "is not there; give a text file, a folder"),
        ("empty.txt", b"", "is empty"),
        ("short.txt", b"abc", "give at least"),
        ("odd.npy", b"nothing", "is no NumPy file"),
        ("none.bin", b"", "holds no tokens"),
        ("structured.npy", structured(), "is no NumPy file of one dimension"),
        ("one.bin", b"a", "holds no tokens: 1 bytes, and one takes 2"),
    ],
)
def test_bad_data_is_one_sentence(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        made(tmp_path, data=tmp_path / name)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_bad_tokenizers_are_one_sentence(tmp_path):
    (tmp_path / "t.json").write_text("{}")
    for name, said in (("gone", "neither 'bytes' nor"), (str(tmp_path / "t.json"), "is no tokenizers file")):
        with pytest.raises(ConfigError, match=said):
            made(tmp_path, tokenizer=name)


def test_a_folder_without_text_is_refused(tmp_path):
    (tmp_path / "dir").mkdir()
    with pytest.raises(ConfigError, match=r"no file in it is text$"):
        find_source(DataSettings(data=tmp_path / "dir"))
    (tmp_path / "dir" / ".hidden").write_text("text")
    with pytest.raises(ConfigError, match=r"no file in it is text; left out: 1 hidden file or folder$"):
        find_source(DataSettings(data=tmp_path / "dir"))


def test_a_folder_in_it_that_cannot_be_read_is_named(tmp_path):
    inner = written(tmp_path / "dir", **{"a.txt": b"text", "in/b.txt": b"text"}) / "in"
    inner.chmod(0)
    try:
        if os.access(inner, os.R_OK):
            pytest.skip("root reads everything")
        with pytest.raises(ConfigError, match=f"{inner} cannot be read: Permission denied"):
            find_source(DataSettings(data=tmp_path / "dir"))
    finally:
        inner.chmod(0o700)


def test_the_baseline_is_the_loss_of_counted_pairs(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 5000)
    found = made(tmp_path, data=tmp_path / "a.txt")
    loss = bigram_loss(found, found.windows.evaluated(8))
    assert loss is not None and 0 < loss < 0.01, "after a comes b, after b comes a"
    numbers = torch.randint(1, 5, (60000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    (tmp_path / "r.txt").write_bytes(bytes(numbers.tolist()))
    found = made(tmp_path, data=tmp_path / "r.txt")
    assert bigram_loss(found, found.windows.evaluated(64)) == pytest.approx(1.3863, abs=0.01), (
        "four tokens, alike and apart"
    )
