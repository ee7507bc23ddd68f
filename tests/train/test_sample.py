"""`onefold sample` writes with the weights of the last commit, and a seed always gives the same text."""

from __future__ import annotations

import dataclasses
import html
import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import onefold
from onefold.cli.main import main
from onefold.cost.shapes import Shape
from onefold.train.run.folder import write_facts
from onefold.train.run.model import GPT
from onefold.train.run.sample import Bytes, continuation, open_run
from tests.harness import run_ranks

SHAPE = Shape(layers=2, hidden=32, heads=2, seq=16, vocab=256)
TEXT = "abcdefghij klmn. "


def batch(step: int) -> Tensor:
    """Windows of the same text, from every place."""
    text = (TEXT * 4).encode()
    starts = torch.randint(len(TEXT), (16,), generator=torch.Generator().manual_seed(step))
    return torch.stack([torch.tensor(list(text[at : at + SHAPE.seq + 1])) for at in starts.tolist()])


def learn(run: str, steps: int, precision: str) -> dict[str, Tensor]:
    """On a rank: the small text by heart, at stage 3, with two commits; the weights at the last one."""
    torch.manual_seed(0)
    model = onefold.shard(GPT(SHAPE), stage=3, precision=precision)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-2)
    for step in range(1, steps + 1):
        rows = batch(step)
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, steps):
            onefold.save(Path(run) / "checkpoints", model, optimizer, step=step)
    return onefold.full_state_dict(model)


def facts(tokenizer: str = "bytes") -> dict[str, object]:
    return {"model": {"name": "small", **dataclasses.asdict(SHAPE)}, "data": {"tokenizer": tokenizer}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample") / "run"
    folder.mkdir()
    write_facts(folder, facts())
    torch.save(run_ranks(2, learn, str(folder), 80, "fp32")[0], folder / "state.pt")
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["sample", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_the_model_has_the_bits_of_the_last_commit(run):
    trained = open_run(run)
    whole = torch.load(run / "state.pt", weights_only=True)
    assert trained.step == 80
    assert all(torch.equal(param, whole[name]) for name, param in trained.model.named_parameters())


def test_a_report_shows_what_the_model_writes_and_no_text_becomes_markup(run, tmp_path, capsys):
    wrote = json.loads(said(capsys, str(run), "--prompt", "abc", "--json")[1])["text"]
    assert main(["report", str(run), "--sample", "abc", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert f"<strong>abc</strong>{html.escape(wrote)}</pre>" in page and "after step 80" in page
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps({"step": "<b>", "prompt": "<script>", "text": "</pre><script>alert(1)</script>"}) + "\n")
        file.write(json.dumps({"text": 7}) + "\n")
    assert main(["report", str(run), "--out", str(tmp_path)]) == 0
    assert "<script" not in (tmp_path / "report.html").read_text()
    (run / "samples.jsonl").unlink()
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--sample", "abc"]) == 2
    assert "is no run folder" in capsys.readouterr().err


def test_a_model_trained_in_16_bits_is_its_fp32_master(tmp_path):
    write_facts(tmp_path, facts())
    whole = run_ranks(2, learn, str(tmp_path), 2, "bf16")[0]
    for name, param in open_run(tmp_path).model.named_parameters():
        assert torch.equal(param.to(torch.bfloat16), whole[name].to(torch.bfloat16)), name
        assert param.dim() < 2 or not torch.equal(param, param.to(torch.bfloat16).float()), "no finer than 16 bits"


def test_it_goes_on_as_it_was_taught(run, capsys):
    code, out, err = said(capsys, str(run), "--prompt", "efghij ", "--tokens", "30", "--temperature", "0")
    assert (code, err) == (0, "")
    assert out == "efghij " + (TEXT * 4)[TEXT.index("klmn") :][:30] + "\n"


def test_a_seed_gives_the_same_text_and_another_seed_another(run, capsys):
    wild = [str(run), "--prompt", "q", "--temperature", "1.5", "--tokens", "60", "--seed"]
    texts = [said(capsys, *wild, seed)[1] for seed in ("3", "3", "4")]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("q") for text in texts)


def test_json_says_the_step_the_prompt_and_the_text(run, capsys):
    code, out, _ = said(capsys, str(run), "--prompt", "a", "--tokens", "4", "--temperature", "0", "--json")
    assert (code, json.loads(out)) == (0, {"step": 80, "prompt": "a", "text": "bcde"})


def test_a_prompt_longer_than_the_window_is_read_from_its_end(run):
    model = open_run(run).model
    long, short = Bytes().encode(TEXT * 5), Bytes().encode((TEXT * 5)[-SHAPE.seq :])
    settings = {"temperature": 0.8, "top_k": 5, "seed": 1}
    assert list(islice(continuation(model, long, **settings), 20)) == list(
        islice(continuation(model, short, **settings), 20)
    )


def test_one_choice_is_the_likeliest_and_tokens_beyond_the_tokenizer_are_never_chosen(run):
    model, prompt = open_run(run).model, Bytes().encode("ab")
    best = list(islice(continuation(model, prompt, temperature=0, top_k=0, seed=0), 12))
    assert best == list(islice(continuation(model, prompt, temperature=2.0, top_k=1, seed=9), 12))
    low = islice(continuation(model, prompt, temperature=9.0, top_k=0, seed=0, vocab=7), 30)
    assert max(low) < 7


def test_a_tokenizers_file_encodes_and_decodes(run, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], tokenizers.trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet))
    made.save(str(tmp_path / "tokenizer.json"))
    shutil.copytree(run, tmp_path / "run")
    write_facts(tmp_path / "run", facts(str(tmp_path / "tokenizer.json")))
    code, out, err = said(capsys, str(tmp_path / "run"), "--prompt", "naïve ", "--tokens", "40")
    assert (code, err) == (0, "") and out.startswith("naïve ")
    (tmp_path / "tokenizer.json").unlink()
    code, _, err = said(capsys, str(tmp_path / "run"))
    assert code == 2 and "--tokenizer" in err


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_bytes_become_the_text_they_were(text):
    assert "".join(Bytes().decode(Bytes().encode(text))) == text


@given(st.lists(st.integers(0, 255), max_size=40))
def test_bytes_that_are_no_text_are_shown_as_such(tokens):
    assert "".join(Bytes().decode(tokens)) == bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", ""], "--prompt is empty"),
        (["--tokens", "0"], "--tokens 0 is below 1"),
        (["--temperature", "-1"], "--temperature -1.0"),
        (["--temperature", "nan"], "--temperature nan"),
        (["--top-k", "-2"], "--top-k -2 is below 0"),
        (["--tokenizer", "nothing.json"], "neither 'bytes' nor a file that is there"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(run, capsys, arguments, words):
    code, out, err = said(capsys, str(run), *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and words in err


def test_no_run_no_checkpoint_or_a_damaged_one_is_one_line(run, tmp_path, capsys):
    code, _, err = said(capsys, str(tmp_path / "nowhere"))
    assert (code, err.count("\n")) == (2, 1) and "is no run folder" in err
    write_facts(tmp_path, facts())
    code, _, err = said(capsys, str(tmp_path))
    assert (code, err.count("\n")) == (2, 1) and "no checkpoint yet" in err
    (tmp_path / "checkpoints").mkdir()
    code, _, err = said(capsys, str(tmp_path))
    assert (code, err.count("\n")) == (2, 1) and "no committed checkpoint" in err
    write_facts(tmp_path, facts() | {"model": {"layers": 2}})
    code, _, err = said(capsys, str(tmp_path))
    assert (code, err.count("\n")) == (2, 1) and "does not tell the model's layers" in err


def test_a_checkpoint_of_another_model_or_with_a_flipped_bit_is_named(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "run")
    other = dataclasses.asdict(dataclasses.replace(SHAPE, hidden=64))
    write_facts(tmp_path / "run", facts() | {"model": other})
    code, _, err = said(capsys, str(tmp_path / "run"))
    assert (code, err.count("\n")) == (2, 1) and "is it another model's?" in err
    write_facts(tmp_path / "run", facts())
    file = sorted((tmp_path / "run/checkpoints").glob("step-*80/*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    for place in range(8 + int.from_bytes(content[:8], "little"), len(content), 1000):
        content[place] ^= 1
    file.write_bytes(content)
    code, _, err = said(capsys, str(tmp_path / "run"))
    assert (code, err.count("\n")) == (2, 1) and file.name in err
