"""Weights come from other libraries and go to them: the same bits, never more than a piece of the model in memory."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import onefold
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import TensorFile
from onefold.checkpoint.format.weights import open_weights
from onefold.cost.layout import Span
from onefold.errors import CheckpointDamaged, CheckpointError, ConfigError
from tests.harness import run_ranks
from tests.models import TiedAndStrided


def write_checkpoint(folder: str) -> None:
    onefold.init()
    onefold.save(folder, onefold.shard(TiedAndStrided(0), stage=3, precision="bf16"), step=1)


def read_weights(path: str) -> dict[str, torch.Tensor]:
    onefold.init()
    model = onefold.shard(TiedAndStrided(1), stage=3)
    onefold.load(path, model)
    return onefold.full_state_dict(model)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(2, write_checkpoint, str(folder))
    return folder


def once() -> dict[str, torch.Tensor]:
    """What was saved: masters in fp32, what is frozen as it computes."""
    state = TiedAndStrided(0).state_dict()
    del state["head.weight"]
    return state | {"fixed": state["fixed"].bfloat16()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Names, dtypes and values; torch.equal alone finds 1 in bf16 equal to 1 in fp32."""
    alike = [
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one if name in other
    ]
    return one.keys() == other.keys() and all(alike)


def test_export_gives_what_was_trained_and_tied_weights_once(run, tmp_path):
    done = onefold.export(run, tmp_path / "out")
    assert done.files == ("model.safetensors",) and sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert same(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), once())


def test_export_in_16_bits_rounds_parameters_and_leaves_buffers(run, tmp_path):
    onefold.export(run, tmp_path / "out", dtype="bf16")
    read = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    params = dict(TiedAndStrided(0).named_parameters())
    assert same(read, {n: v.bfloat16() if n in params else v for n, v in once().items()})


def test_export_in_shards_has_an_index_that_finds_every_tensor(run, tmp_path):
    done = onefold.export(run, tmp_path / "out", shard_bytes=500)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(done.files) > 2 and set(index["weight_map"].values()) == set(done.files)
    read = {n: safetensors.torch.load_file(tmp_path / "out" / f)[n] for n, f in index["weight_map"].items()}
    assert same(read, once())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in read.values())


def test_export_overwrites_nothing_and_leaves_nothing_when_it_fails(run, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(CheckpointError, match="out exists; name a folder that does not"):
        onefold.export(run, tmp_path / "out")
    with pytest.raises(CheckpointError, match="make the folder above it first"):
        onefold.export(run, tmp_path / "no" / "such" / "folder")
    with pytest.raises(ConfigError, match="dtype='int8' is not one of fp32, bf16, fp16"):
        onefold.export(run, tmp_path / "new", dtype="int8")
    damaged = tmp_path / "damaged"
    shutil.copytree(run / "step-00000001", damaged)
    first = next(iter(TensorFile(Storage(), damaged / "rank-00001.safetensors").blocks))
    end = TensorFile(Storage(), damaged / "rank-00001.safetensors").end(first)
    with open(damaged / "rank-00001.safetensors", "r+b") as file:
        file.seek(end - 1)
        file.write(b"!")
    with pytest.raises(CheckpointDamaged, match="rank-00001"):
        onefold.export(damaged, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "out"]


def test_values_that_do_not_fit_fp16_are_not_made_infinite(tmp_path):
    run_ranks(1, write_large, str(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"weight has values too large for torch\.float16; export it as bf16"):
        onefold.export(tmp_path / "run", tmp_path / "out", dtype="fp16")


def write_large(folder: str) -> None:
    onefold.init()
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight[1, 1] = 1e5
    onefold.save(folder, onefold.shard(model, stage=0), step=1)


@pytest.mark.parametrize("ranks", [1, 3])
def test_exported_weights_are_read_back_bitwise_whole_or_in_shards(run, tmp_path, ranks):
    onefold.export(run, tmp_path / "one")
    onefold.export(run, tmp_path / "many", shard_bytes=500)
    for path in (tmp_path / "one", tmp_path / "one" / "model.safetensors", tmp_path / "many"):
        read = run_ranks(ranks, read_weights, str(path))[0]
        assert same(read, TiedAndStrided(0).state_dict() | {"fixed": once()["fixed"].float()})


def test_a_plain_state_dict_of_the_safetensors_library_is_read(tmp_path):
    safetensors.torch.save_model(TiedAndStrided(0), str(tmp_path / "plain.safetensors"))
    read = run_ranks(2, read_weights, str(tmp_path / "plain.safetensors"))[0]
    assert same(read, TiedAndStrided(0).state_dict())


def test_hugging_face_reads_our_folder_and_we_read_theirs(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = gpt2(seed=0)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="8KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    run_ranks(2, through_onefold, str(tmp_path))
    onefold.export(tmp_path / "run", tmp_path / "ours", shard_bytes=8_000)
    shutil.copy(tmp_path / "theirs" / "config.json", tmp_path / "ours")
    back, told = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same(back.state_dict(), theirs.state_dict())


def gpt2(seed: int) -> nn.Module:
    import transformers

    torch.manual_seed(seed)
    sizes = dict(n_embd=16, n_layer=2, n_head=2, n_positions=32, vocab_size=64, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def through_onefold(folder: str) -> None:
    onefold.init()
    model = onefold.shard(gpt2(seed=1), stage=3)
    onefold.load(f"{folder}/theirs", model)
    onefold.save(f"{folder}/run", model, step=1)


PICKLES = {
    "model.pt": r"is a pickle file; .*onefold import-checkpoint \S*/model\.pt imported",
    "folder/pytorch_model.bin": r"bin is a pickle file; .*onefold import-checkpoint \S*/pytorch_model\.bin imported",
    "dcp/.metadata": r"is a torch DCP folder.*onefold import-checkpoint \S*/dcp imported",
    "ds/zero_to_fp32.py": r"is a DeepSpeed folder.*onefold import-checkpoint \S*/ds imported",
}


@pytest.mark.parametrize("path", PICKLES)
def test_pickle_is_refused_with_the_command_that_imports_it(tmp_path, path):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_bytes(b"cos\nsystem\n(S'touch hacked'\ntR.")
    given = tmp_path / path.split("/")[0]
    with pytest.raises(CheckpointError, match=f"(?s){PICKLES[path]}"):
        open_weights(Storage(), given)


def load_imported(folder: str) -> dict[str, torch.Tensor]:
    onefold.init()
    model = onefold.shard(TiedAndStrided(1), stage=3)
    onefold.load(folder, model)
    return onefold.full_state_dict(model)


def test_the_command_that_imports_a_pickle_file_works_and_its_folder_is_loaded(tmp_path):
    path = tmp_path / "it's here $(touch hacked).pt"
    torch.save({"state_dict": TiedAndStrided(0).state_dict(), "epoch": 3}, path)
    with pytest.raises(CheckpointError, match="is a pickle file") as refused:
        open_weights(Storage(), path)
    command = re.search(r"\n  onefold (.*)", str(refused.value))
    assert command
    subprocess.run(f"{sys.executable} -m onefold.cli.main {command[1]}", shell=True, check=True, cwd=tmp_path)
    assert same(run_ranks(1, load_imported, str(tmp_path / "imported"))[0], TiedAndStrided(0).state_dict())
    assert sorted(found.name for found in tmp_path.iterdir()) == ["imported", path.name]


def test_bare_pickle_is_seen_whatever_its_name_and_safetensors_is_not_taken_for_it(tmp_path):
    (tmp_path / "weights").write_bytes(b"\x80\x02}q\x00X\x01\x00\x00\x00w")
    with pytest.raises(CheckpointError, match="is a pickle file"):
        open_weights(Storage(), tmp_path / "weights")
    text = b'{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(0x280)
    (tmp_path / "good").write_bytes(len(text).to_bytes(8, "little") + text + b"x")  # begins with 80 02
    assert open_weights(Storage(), tmp_path / "good").records["w"].shape == (1,)


def test_weights_are_read_by_range_without_holding_the_model(tmp_path):
    big = torch.arange(8 << 20, dtype=torch.float32)
    safetensors.torch.save_file({"w": big.reshape(1024, -1)}, tmp_path / "w.safetensors")
    tracemalloc.start()
    weights = open_weights(Storage(), tmp_path / "w.safetensors")
    assert weights is not None and weights.records["w"].shape == (1024, 8192)
    out = torch.empty(10)
    weights.read("w", Span(5_000_000, 5_000_010), out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(out, big[5_000_000:5_000_010]) and peak < 1 << 20


def test_two_files_without_an_index_are_not_guessed_at(tmp_path):
    for name in ("a.safetensors", "b.safetensors"):
        safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / name)
    with pytest.raises(
        CheckpointError, match=r"holds a\.safetensors, b\.safetensors and no \*\.safetensors\.index\.json"
    ):
        open_weights(Storage(), tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_weights(Storage(), tmp_path / "c.safetensors")
