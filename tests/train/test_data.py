"""Text, folders and token files become one vector of tokens, cut into windows; mistakes are one sentence."""

import json
import threading

import numpy
import pytest
import torch

from onefold.errors import ConfigError
from onefold.train import data as module
from onefold.train.data import bigram_loss, find_source, load_data, prepare
from onefold.train.settings import DataSettings


def made(tmp_path, seq=16, **fields):
    settings = DataSettings(cache=tmp_path / "cache", **fields)
    prepare(settings)
    return load_data(settings, seq)


def test_without_data_it_is_the_standard_library_byte_for_byte(tmp_path):
    found = made(tmp_path, seq=128)
    assert found.vocab == 256 and len(found.tokens) > 2_000_000
    assert b"import " in bytes(found.tokens[:200_000].tolist())
    assert found.source == "the Python standard library"


def test_a_folder_is_its_text_files_in_order_of_their_names(tmp_path):
    root = tmp_path / "texts"
    for name, content in {
        "b/x.md": b"second",
        "a.txt": b"first",
        "c.bin2": b"\0\1\2",
        ".hidden": b"no",
        "d": b"",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    found = made(tmp_path, seq=1, data=root, val_fraction=0.5)
    assert bytes(found.tokens.tolist()) == b"first\n\0\nsecond"


def test_changed_text_is_tokenised_again_and_unchanged_text_is_not(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("x" * 200)
    made(tmp_path, data=path)
    monkeypatch.setattr(module, "_read", lambda source: pytest.fail("read again"))
    made(tmp_path, data=path)
    monkeypatch.undo()
    path.write_text("y" * 300)
    assert bytes(made(tmp_path, data=path).tokens.tolist()) == b"y" * 300


def test_processes_that_tokenise_at_once_leave_one_whole_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(1, 256)) * 4000)
    settings = DataSettings(cache=tmp_path / "cache", data=path)
    threads = [threading.Thread(target=prepare, args=(settings,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bytes(load_data(settings, 16).tokens.tolist()) == path.read_bytes()
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_token_files_are_mapped_in_every_integer_type(tmp_path, kind, dtype):
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


def test_a_tokenizers_file_gives_its_own_tokens(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made_of = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[U]": 0, "one": 1, "two": 2}, unk_token="[U]"))
    made_of.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made_of.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("one two three two " * 50)
    found = made(tmp_path, data=tmp_path / "a.txt", tokenizer=str(tmp_path / "t.json"))
    assert found.tokens[:4].to(torch.int64).tolist() == [1, 2, 0, 2] and found.vocab == 3


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone", None, "is not there; give a text file, a folder"),
        ("empty.txt", b"", "is empty"),
        ("short.txt", b"abc", "give at least"),
        ("odd.npy", b"nothing", "is no NumPy file"),
        ("none.bin", b"", "holds no tokens"),
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
    with pytest.raises(ConfigError, match="no file in it is text"):
        find_source(DataSettings(data=tmp_path / "dir"))


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
