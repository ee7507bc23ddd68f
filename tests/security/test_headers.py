"""Headers changed at random: refused by the named error, or what they say is really in the file."""

from __future__ import annotations

import hashlib
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from onefold.checkpoint.format.folder import MANIFEST
from onefold.checkpoint.format.manifest import DEPTH_LIMIT, HEAD, Manifest
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import DTYPES, TensorFile
from onefold.checkpoint.format.weights import open_weights
from onefold.cost.layout import Span
from onefold.errors import CheckpointDamaged, CheckpointError
from tests.checkpoint.drive import save
from tests.checkpoint.test_hostile import places, row, signed, tensor_file
from tests.security.others import one_line, run_here

ODD: list[Any] = [
    None, True, -1, 0, 1, 8, 24, 1 << 62, 1 << 63, 1 << 64, -(1 << 63), 1e308, float("nan"), "", "F32", "U8", "F8_E4M3",
    [], {}, [0], [0, 8], [8, 0], [1 << 32, 1 << 32], [0] * 65, ["8"], [[8]], {"a": 1}, "\ud800", "../x", "a\0b",
]  # fmt: skip
TABLE = {"__metadata__": {"format": "pt"}, "a": row(0, 8), "b": row(8, 24, [2, 2], "F32"), "c": row(24, 24, [0], "I64")}


def all_of(path: Path) -> None:
    """Reads every tensor that the header tells of."""
    file = TensorFile(Storage(), path)
    for key, block in file.blocks.items():
        assert block.dtype in DTYPES.values() and file.end(key) <= path.stat().st_size
        file.read(key, Span(0, block.numel), torch.empty(block.numel, dtype=block.dtype))


@pytest.mark.trials_of("fuzzed headers and manifests")
def test_a_header_whose_fields_are_changed_is_refused_or_right(tmp_path, soak):
    rng, ends = random.Random(0), {"refused": 0, "right": 0}
    for _ in range(soak.number(400, 30_000)):
        table = json.loads(json.dumps(TABLE))
        place, key = rng.choice(list(places(table)))
        if rng.random() < 0.2:
            place.pop(key)
        else:
            place[key] = rng.choice(ODD)
        path = tensor_file(tmp_path / "a.safetensors", table, bytes(24))
        try:
            all_of(path)
            ends["right"] += 1
        except CheckpointDamaged as error:
            assert str(path) in str(error) and len(str(error)) < 1000
            ends["refused"] += 1
        soak.tried()
    assert min(ends.values()) > 15, ends


@pytest.mark.trials_of("fuzzed headers and manifests")
def test_a_header_whose_bytes_are_changed_is_refused_or_right(tmp_path, soak):
    rng = random.Random(0)
    whole = tensor_file(tmp_path / "a.safetensors", TABLE, bytes(24)).read_bytes()
    for _ in range(soak.number(400, 30_000)):
        changed = bytearray(whole)
        for _ in range(rng.choice((1, 2, 8))):
            changed[rng.randrange(len(whole) - 24)] = rng.randrange(256)
        changed = changed[: rng.choice((len(whole), len(whole), rng.randrange(len(whole))))]
        (tmp_path / "a.safetensors").write_bytes(changed)
        try:
            all_of(tmp_path / "a.safetensors")
        except CheckpointDamaged as error:
            assert str(tmp_path / "a.safetensors") in str(error)
        soak.tried()


@pytest.mark.parametrize("name", ["a\0.safetensors", "\ud800.safetensors", "x" * 300 + ".safetensors", "-.safetensors"])
def test_an_index_that_names_what_no_file_can_be_called_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CheckpointError):
        open_weights(Storage(), tmp_path)


def test_a_shard_that_leads_to_a_file_of_secrets_is_damage_and_tells_nothing_of_it(tmp_path):
    path = save(Storage(), tmp_path / "run", 1)
    (tmp_path / "secret").write_text("root:SECRET:0:0:" * 100)
    (path / "rank-00001.safetensors").unlink()
    (path / "rank-00001.safetensors").symlink_to(tmp_path / "secret")
    end = run_here("verify-checkpoint", path)
    assert end.code == 1 and "rank-00001.safetensors" in end.out and "SECRET" not in end.out + end.err
    assert one_line(run_here("export", path, tmp_path / "out"), "rank-00001.safetensors")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if depth % 2 else {"a": value}
    return value


@pytest.mark.parametrize("depth", [DEPTH_LIMIT - 1, DEPTH_LIMIT, 500, 900])
@pytest.mark.parametrize("field", ["extra", "about"])
def test_a_manifest_nested_to_any_depth_is_read_by_all_or_by_none(tmp_path, depth, field):
    path = save(Storage(), tmp_path, 1)
    rows = json.loads((path / MANIFEST).read_text())
    body = {key: value for key, value in rows.items() if key != "sha256"} | {field: "HERE"}
    inner = ("[" * depth + "1" + "]" * depth) if field == "extra" else '{"a":' * depth + "1" + "}" * depth
    text = json.dumps(body)[1:].replace('"HERE"', inner)
    (path / MANIFEST).write_bytes((HEAD % hashlib.sha256(text.encode()).hexdigest() + text).encode())
    for flags in ([], ["--json"]):
        end = run_here("inspect", path, *flags)
        assert end.code == 0 if depth < DEPTH_LIMIT else one_line(end, MANIFEST)


def test_a_step_count_beyond_any_is_refused(tmp_path):
    path = save(Storage(), tmp_path, 1)
    rows = json.loads((path / MANIFEST).read_text())
    rows["records"][0]["scalars"] = {"step": 1 << 63}
    with pytest.raises(CheckpointDamaged, match="has an odd 'step' of 'w'"):
        Manifest.from_json(signed(rows), "this")


def test_a_header_takes_a_bounded_multiple_of_its_bytes(tmp_path):
    """The worst that JSON can do: lists of three bytes, which take some twenty times as much in memory."""
    size = 4 << 20
    path = tensor_file(tmp_path / "a.safetensors", b"[" + b"[]," * (size // 3) + b"[]]")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointDamaged, match="no JSON object"):
            TensorFile(Storage(), path)
        assert tracemalloc.get_traced_memory()[1] < 32 * size
    finally:
        tracemalloc.stop()
