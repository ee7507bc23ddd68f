"""Files that someone made up: each is refused by a named error, in little memory, whatever it claims."""

from __future__ import annotations

import hashlib
import json
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onefold.checkpoint.format.folder import MANIFEST, read_manifest
from onefold.checkpoint.format.manifest import HEAD, Manifest
from onefold.checkpoint.format.storage import Storage
from onefold.checkpoint.format.tensorfile import TensorFile
from onefold.checkpoint.format.verify import verify
from onefold.checkpoint.format.weights import open_weights
from onefold.cli.checkpoint import Inspect
from onefold.errors import CheckpointDamaged, CheckpointError
from tests.checkpoint.drive import save

BIG = 1 << 40


def tensor_file(path: Path, table: Any, data: bytes = b"") -> Path:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def row(start: int, stop: int, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


HEADERS: dict[str, tuple[Any, str]] = {
    "tensors overlap": ({"a": row(0, 8), "b": row(4, 12)}, "tensors must touch"),
    "tensors leave a gap": ({"a": row(0, 8), "b": row(12, 16)}, "tensors must touch"),
    "two tensors at one place": ({"a": row(0, 16), "b": row(0, 16)}, "tensors must touch"),
    "data behind the last": ({"a": row(0, 8)}, "its tensors end at"),
    "data that is not there": ({"a": row(0, BIG)}, "cut short"),
    "a shape larger than its bytes": ({"a": row(0, 16, [BIG, BIG, BIG])}, "bytes between"),
    "a negative size": ({"a": row(0, 16, [-4, -4])}, "nonsense"),
    "a size that is no number": ({"a": row(0, 16, ["16"])}, "nonsense"),
    "a size that is a truth": ({"a": row(0, 16, [16, True])}, "nonsense"),
    "a shape of many dims": ({"a": row(0, 16, [1] * 100_000)}, "nonsense"),
    "three offsets": ({"a": row(0, 16) | {"data_offsets": [0, 8, 16]}}, "nonsense"),
    "no such dtype": ({"a": row(0, 16, dtype="F1")}, "known are"),
    "a dtype that is a list": ({"a": row(0, 16, dtype=[])}, "known are"),
    "a row that is a list": ({"a": []}, "known are"),
    "a list for a header": ([], "no JSON object"),
    "no JSON": (b"{", "no JSON"),
    "no text": (b"\xff\xfe{}", "no JSON"),
    "one key twice": (b'{"a": 1, "a": 2}', "occurs twice"),
    "brackets without end": (b"[" * 1_000_000, "no JSON"),
    "a number without end": (b'{"a": ' + b"9" * 1_000_000 + b"}", "no JSON"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_tensor_file_that_lies_is_refused(tmp_path, case):
    table, why = HEADERS[case]
    path = tensor_file(tmp_path / "a.safetensors", table, bytes(16))
    with pytest.raises(CheckpointDamaged, match=why):
        TensorFile(Storage(), path)


@pytest.mark.parametrize("length", [0, 1, 65 << 20, BIG, (1 << 64) - 1])
def test_a_header_of_any_claimed_length_costs_little_memory(tmp_path, length):
    path = tmp_path / "a.safetensors"
    with open(path, "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(200 << 20)  # sparse: its zeros take no disk
    assert in_little_memory(lambda: TensorFile(Storage(), path), 1 << 20)


def test_a_manifest_of_any_size_costs_little_memory(tmp_path):
    with open(tmp_path / MANIFEST, "wb") as file:
        file.truncate(BIG)
    assert in_little_memory(lambda: read_manifest(Storage(), tmp_path), 1 << 20)


def in_little_memory(act: Callable[[], object], limit_bytes: int) -> bool:
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointDamaged):
            act()
        return tracemalloc.get_traced_memory()[1] < limit_bytes
    finally:
        tracemalloc.stop()


def signed(rows: dict[str, Any]) -> bytes:
    """As onefold would write it: whoever makes up a manifest can also make up its digest."""
    body = json.dumps({key: value for key, value in rows.items() if key != "sha256"})[1:]
    return (HEAD % hashlib.sha256(body.encode()).hexdigest() + body).encode()


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = save(Storage(), tmp_path_factory.mktemp("run"), 1)
    return folder, json.loads((folder / MANIFEST).read_text())


def put(*path: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(rows: dict[str, Any]) -> None:
        place: Any = rows
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to

    return change


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a file above": (put("files", 0, 0, to="../rank-00000.safetensors"), r"names the file '\.\./rank"),
    "a file elsewhere": (put("files", 0, 0, to="/etc/rank-00000.safetensors"), "names the file '/etc"),
    "a file with a line end": (put("files", 0, 0, to="rank-00000.safetensors\n"), "names the file"),
    "a file twice": (put("files", 1, 0, to="rank-00000.safetensors"), "a file twice"),
    "an entry above": (put("entries", 0, 4, to="../x.safetensors"), "does not list"),
    "an overlap": (put("entries", 1, 2, to=39), "element 39 of 'w' .exp_avg. twice"),
    "a gap": (put("entries", 1, 2, to=41), "element 40 of 'w' .exp_avg. nowhere"),
    "too few elements": (put("records", 0, "shape", to=[61, 2]), "120 of 122 elements"),
    "too many elements": (put("records", 0, "shape", to=[59, 2]), "outside 118 elements"),
    "a backward range": (put("entries", 0, 3, to=-1), "outside"),
    "no range": (put("entries", 0, 3, to=0), "outside"),
    "a huge shape": (put("records", 0, "shape", to=[1 << 61, 1 << 61]), "shape"),
    "strides that overlap": (put("records", 0, "stride", to=[1, 1]), "stride"),
    "strides that leave gaps": (put("records", 0, "stride", to=[1000, 1]), "stride"),
    "too few strides": (put("records", 0, "stride", to=[1]), "stride"),
    "a cut along no dim": (put("records", 0, "dim", to=1), "cuts 'w' along 1"),
    "a cut along a dim too many": (lambda rows: rows["records"][0].update(dim=2, bounds=[0, 60]), "cuts 'w' along 2"),
    "a cut that ends early": (put("records", 0, "bounds", to=[0, 59]), "cuts 'w'"),
    "a cut that begins late": (put("records", 0, "bounds", to=[1, 60]), "cuts 'w'"),
    "a cut that goes back": (put("records", 0, "bounds", to=[0, 50, 40, 60]), "cuts 'w'"),
    "a cut at one place": (put("records", 0, "bounds", to=[60]), "cuts 'w'"),
    "a cut at no number": (put("records", 0, "bounds", to=["0", 60]), "odd bounds"),
    "no such dtype": (put("records", 0, "states", "value", to="F31"), "is 'F31'"),
    "a dtype of other size": (put("records", 0, "states", "value", to="F64"), "header that is not the one written"),
    "no value": (put("records", 0, "states", to={"exp_avg": "F32"}), "no value of 'w'"),
    "an entry of nothing": (put("entries", 0, 0, to="v"), "without a record"),
    "a name twice": (put("records", 0, "also", to=["w"]), "names 'w' twice"),
    "a name that moves the cursor": (put("records", 0, "also", to=["\x1b[2J"]), "has the name"),
    "no such kind": (put("records", 0, "kind", to="magic"), "is 'magic'"),
    "a digest too many": (put("entries", 0, 5, to=["0" * 64] * 2), "2 digests"),
    "an odd digest": (put("entries", 0, 5, to=["x" * 64]), "1 digests"),
    "a version before the first": (put("version", to=0), "reads"),
    "one field more": (put("eval", to="1"), "has the fields"),
    "a wrong size": (put("files", 0, 1, to=7), "7 were written"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_lies_is_refused_even_when_its_digest_is_right(good, tmp_path, case):
    folder, rows = good
    change, why = MANIFESTS[case]
    rows = json.loads(json.dumps(rows))
    change(rows)
    for file in folder.glob("rank-*"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / MANIFEST).write_bytes(signed(rows))
    damages = verify(Storage(), tmp_path)
    assert damages, "accepted"
    with pytest.raises(CheckpointDamaged, match=why):
        raise CheckpointDamaged(damages[0].what)


def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / MANIFEST)
    with pytest.raises(CheckpointDamaged, match="wanted is a plain file"):
        read_manifest(Storage(), tmp_path)
    with pytest.raises(CheckpointDamaged, match="wanted is a plain file"):
        Storage().read(tmp_path / MANIFEST, 0, memoryview(bytearray(1)))


def test_inspect_shows_what_would_move_the_cursor(good, tmp_path, capsys):
    (tmp_path / MANIFEST).write_bytes(signed(good[1] | {"about": {"torch": "2\x1b[2J"}}))
    assert Inspect(tmp_path).run() == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and r"2\x1b[2J" in out


def test_a_newer_format_is_no_damage_so_nothing_falls_back_from_it(good):
    with pytest.raises(CheckpointError, match="has format 2, this onefold reads 1; upgrade") as refused:
        Manifest.from_json(signed(good[1] | {"version": 2}), "this")
    assert not isinstance(refused.value, CheckpointDamaged)


def test_a_manifest_that_says_a_thing_twice_is_refused(good):
    body = signed(good[1])[len(HEAD % "") + 64 :].replace(b'"step": 1,', b'"step": 1, "step": 1,', 1)
    text = (HEAD % hashlib.sha256(body).hexdigest()).encode() + body
    with pytest.raises(CheckpointDamaged, match="a key occurs twice"):
        Manifest.from_json(text, "this")


@pytest.mark.trials_of("fuzzed headers and manifests")
def test_a_manifest_changed_anywhere_at_random_is_refused_or_says_the_same_as_what_it_says(good, soak):
    """No change makes it raise anything but the named error, and what is accepted is written again as it was read."""
    _, rows = good
    rng = random.Random(0)
    odd = [None, True, -1, 0, 1 << 70, 1e308, "", "w", "../x", [], {}, [[]], {"": []}, "\ud800", ["w"] * 3]
    refused, number = 0, soak.number(500, 40_000)
    for _ in range(number):
        changed = json.loads(json.dumps(rows))
        place, key = rng.choice(list(places(changed)))
        place[key] = rng.choice(odd)
        try:
            manifest = Manifest.from_json(signed(changed), "this")
            assert Manifest.from_json(manifest.to_json(), "that") == manifest
        except CheckpointError as error:
            assert isinstance(error, CheckpointDamaged) or changed["version"] == 1 << 70
            refused += 1
        soak.tried()
    assert refused > number // 2


def places(node: Any) -> Any:
    """Every place in a JSON value at which something else can be put."""
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from places(node[key])


@pytest.mark.parametrize("file", ["../a.safetensors", "/etc/passwd", "a.bin", 7, "sub/a.safetensors"])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointDamaged, match="wanted is a safetensors file beside it"):
        open_weights(Storage(), tmp_path)


def test_an_index_of_any_size_costs_little_memory(tmp_path):
    with open(tmp_path / "model.safetensors.index.json", "wb") as file:
        file.truncate(BIG)
    assert in_little_memory(lambda: open_weights(Storage(), tmp_path), 1 << 20)


def test_an_index_that_finds_a_tensor_where_it_is_not_is_refused(tmp_path):
    tensor_file(tmp_path / "a.safetensors", {"a": row(0, 16)}, bytes(16))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    with pytest.raises(CheckpointDamaged, match=r"a\.safetensors has no tensor 'w', which the index finds there"):
        open_weights(Storage(), tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": []}', "[" * 100_000])
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json (is no JSON|has no weight_map)"):
        open_weights(Storage(), tmp_path)
