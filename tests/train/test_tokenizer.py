"""A file in pieces gives the tokens of the whole file, in the memory of a piece."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.train.run.data import load_data, prepare
from onefold.train.run.groups import DataSettings
from onefold.train.run.tokenizer import decoded, encoded

tokenizers = pytest.importorskip("tokenizers")
GPT4 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = ["the", "a", "une", "é", "日本", "x1", "12345", "don't", "...", "(", ")", ";", "=", '"', "_", "<s>"]
SPACES = [" ", "  ", "\n", "\n\n", " \n", "\n    ", "\r\n", "\t", "\n\n\n", "\u00a0", "\0"]
BODY = " ".join(WORDS) + "".join(SPACES) + "def f(a):\n    return the\n\nthe end  \nof it\n" * 3
texts = st.lists(st.sampled_from(WORDS + SPACES * 2 + ["\n"] * 12), min_size=150, max_size=500).map("".join)


def trained(pre_tokenizer, decoder_byte_level=True):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre_tokenizer
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if decoder_byte_level else []
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    made.train_from_iterator([BODY] * 20, trainer)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return made


def kinds():
    pre = tokenizers.pre_tokenizers
    split = pre.Split(tokenizers.Regex(GPT4), "isolated")
    return {
        "gpt2": trained(pre.ByteLevel(add_prefix_space=False)),
        "gpt4": trained(pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])),
        "whitespace": trained(pre.Whitespace(), decoder_byte_level=False),
        "bert": trained(pre.BertPreTokenizer(), decoder_byte_level=False),
    }


KINDS = kinds()


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=40)
@given(text=texts)
def test_tokens_of_pieces_are_those_of_the_whole_text(kind, text):
    loaded, chunks = KINDS[kind], [text[at : at + 17] for at in range(0, len(text), 17)]
    found = list(encoded(loaded, chunks, piece_chars=40, most_chars=10**9))
    assert [one for ids in found for one in ids] == loaded.encode(text).ids


@pytest.mark.parametrize("blank", range(520, 560, 3))
def test_white_space_that_is_longer_than_what_is_looked_at_is_not_cut(blank):
    text = "the" + "\n" * blank + "end\n" * 200
    found = list(encoded(KINDS["gpt2"], [text[at : at + 17] for at in range(0, len(text), 17)], 40, 10**9))
    assert [one for ids in found for one in ids] == KINDS["gpt2"].encode(text).ids


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_text_is_cut_into_small_pieces(kind):
    text = BODY * 20
    found = list(encoded(KINDS[kind], [text], piece_chars=100, most_chars=10**9))
    assert len(found) > len(text) // 1000
    assert [one for ids in found for one in ids] == KINDS[kind].encode(text).ids


def test_a_tokenizer_that_marks_the_start_of_a_text_is_given_pieces_up_to_the_cap():
    loaded = trained(tokenizers.pre_tokenizers.Metaspace(), decoder_byte_level=False)
    text = "the end\n" * 1000
    whole = list(encoded(loaded, [text[at : at + 500] for at in range(0, len(text), 500)], 100, 10**9))
    assert whole == [loaded.encode(text).ids]
    assert len(list(encoded(loaded, [text[at : at + 500] for at in range(0, len(text), 500)], 100, 2000))) > 4


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=60), st.integers(1, 7))
def test_bytes_that_are_no_text_decode_in_pieces_as_they_do_at_once(content, size):
    pieces = [content[at : at + size] for at in range(0, len(content), size)]
    assert "".join(decoded(pieces)) == content.decode(errors="replace")


def test_a_file_keeps_all_its_tokens_where_a_tokenizers_file_cuts_inputs(tmp_path):
    loaded = trained(tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False))
    loaded.enable_truncation(8)
    loaded.save(str(tmp_path / "t.json"))
    (tmp_path / "a.txt").write_text("the end of it\n" * 100)
    wanted = DataSettings(data=tmp_path / "a.txt", tokenizer=str(tmp_path / "t.json"), cache=tmp_path / "cache")
    assert len(load_data(wanted, 4, prepare(wanted).entry).tokens) > 100


PEAK = """
import json, resource, sys
from pathlib import Path
from onefold.train.run.data import prepare
from onefold.train.run.groups import DataSettings
tokenizer, small, large, cache = sys.argv[1:]
def peak(path):
    prepare(DataSettings(data=Path(path), tokenizer=tokenizer, cache=Path(cache)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
print(json.dumps([peak(small), peak(large)]))
"""


def grown(tmp_path: Path, tokenizer: str, small: Path, large: Path) -> int:
    """By how many bytes the peak of a process grows that tokenises the large file after the small one."""
    words = [sys.executable, "-c", PEAK, tokenizer, str(small), str(large), str(tmp_path / "cache")]
    before, after = json.loads(subprocess.run(words, check=True, capture_output=True, timeout=300).stdout)
    return after - before


def test_a_large_file_needs_the_memory_of_a_piece(tmp_path):
    small, large = tmp_path / "small.txt", tmp_path / "large.txt"
    small.write_bytes(b"\0" * (1 << 22))
    with large.open("wb") as file:
        file.truncate(200 << 20)  # zeros that take no place
    assert grown(tmp_path, "bytes", small, large) < 16 << 20


def test_a_large_file_needs_the_memory_of_a_few_pieces_with_a_tokenizers_file_too(tmp_path):
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[U]": 0, "one": 1}, unk_token="[U]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "t.json"))
    small, large = tmp_path / "small.txt", tmp_path / "large.txt"
    line = b"one" + b"x" * 1020 + b"\n"
    small.write_bytes(line * (14 << 10))  # a few pieces
    large.write_bytes(line * (56 << 10))
    assert grown(tmp_path, str(tmp_path / "t.json"), small, large) < 16 << 20
