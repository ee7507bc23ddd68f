"""Checkpoints in object stores: all or nothing without renames, whatever happens between the ranks and the store."""

import itertools
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import onefold
from onefold.checkpoint.format import remote, s3
from onefold.checkpoint.format.address import Address, place
from onefold.checkpoint.format.folder import committed, find
from onefold.checkpoint.format.manifest import FILE_NAME
from onefold.checkpoint.format.opening import storage_of
from onefold.checkpoint.format.reading import Checkpoint
from onefold.checkpoint.format.tensorfile import Block, TensorFile, write_tensors
from onefold.checkpoint.format.verify import verify
from onefold.checkpoint.protocol.commit import begin, clean, set_aside
from onefold.cli.main import main
from onefold.cost.layout import Span
from onefold.errors import CheckpointDamaged, CheckpointError, ConfigError
from onefold.train.run.metrics import Listener, Row
from onefold.train.run.settings import Settings
from onefold.train.run.start import Ended, train
from onefold.train.run.stop import Stop
from tests.checkpoint import drive
from tests.checkpoint.runs import Case, Trainer, digests, trained, truth
from tests.checkpoint.s3 import Exchange, Proxy, keys, make_bucket, s3_server, store
from tests.harness import run_ranks, run_ranks_raises, start_ranks, tell
from tests.harness.patience import PATIENCE_S
from tests.train.launched import curve
from tests.train.pooled import settings_of

pytest.importorskip("fsspec")


# -- addresses and other stores, in memory -----------------------------------------------------------------------------


def test_an_address_is_joined_and_named_like_a_path_and_keeps_its_slashes():
    run = place("s3://bucket/some/run/")
    assert isinstance(run, Address) and str(run) == "s3://bucket/some/run" and run.absolute() is run
    assert str(run / "step-00000001") == "s3://bucket/some/run/step-00000001"
    assert (run / "x").parent == run and (run / "x.y").with_name("z") == run / "z" and run.name == "run"
    assert place(place("s3://bucket/run").parent / "run") == place("s3://bucket/run")
    assert str(place(Path("s3://bucket/run"))) == "s3://bucket/run"
    assert not isinstance(place("/tmp/run"), Address) and str(place("file:///tmp/run")) == "/tmp/run"


def test_what_cannot_be_opened_is_refused_in_one_line_that_names_the_remedy():
    with pytest.raises(CheckpointError, match=r"scheme that fsspec does not know"):
        storage_of(place("nowhere://bucket/run"))
    with pytest.raises(ConfigError, match="names no place"):
        storage_of(place("s3://"))
    with patch.dict(sys.modules, {"fsspec": None}):
        with pytest.raises(CheckpointError, match=r"not installed.*pip install 'onefold\[remote\]' s3fs$"):
            storage_of(place("s3://bucket/run"))
        assert type(storage_of(place("/tmp/run"))) is remote.Storage  # paths need no package
    with patch.dict("os.environ", {remote.DEADLINE: "soon"}), pytest.raises(ConfigError, match="soon"):
        storage_of(place("memory://run"))
    for format in ("torch", "dcp"):
        with pytest.raises(ConfigError, match=r"s3://bucket/out is the address of a store"):
            onefold.export("memory://run", "s3://bucket/out", format=format)
    assert main(["train", "--out", "s3://bucket/out"]) == 2


def in_memory_of_each() -> list[str]:
    """What two ranks are told that would each have a store of their own."""
    onefold.init()
    model = onefold.shard(nn.Linear(8, 8), stage=2)
    optimizer = onefold.Optimizer(model, torch.optim.AdamW, lr=1e-3)
    found = []
    for call in (onefold.resilient, partial(onefold.save, step=1)):
        with pytest.raises(ConfigError) as error:
            call("memory://each/run", model, optimizer)
        found.append(str(error.value))
    return found


def test_a_store_in_the_memory_of_one_process_is_refused_to_several_ranks_before_the_first_step():
    first, second = run_ranks(2, in_memory_of_each)
    assert first == second and all("memory://each/run is in the memory of one process" in line for line in first)


def saved_again_and_again(address: str) -> None:
    """Saves, prunes, replaces, loses and sets aside checkpoints in a store, and looks at it after each."""
    run = place(address)
    disk = storage_of(run)
    for step in (1, 2, 3):
        drive.save(disk, run, step, keep=2)
    assert committed(disk, run) == [2, 3] and [drive.load(disk, path) for path in find(disk, run)] == [3, 2]
    assert disk.names(run) == ["step-00000002", "step-00000003"], "pruned steps left something"
    assert verify(disk, run / "step-00000003") == []
    with pytest.raises(CheckpointError, match="overwrite=True"):
        begin(disk, run, 3)

    newest = run / "step-00000003"
    before = disk.names(newest)
    for ranks, stays in ((3, True), (2, False)):  # the same bytes, then others
        draft = begin(disk, run, 3, overwrite=True)
        parts = [drive.write_rank(disk, draft, rank, ranks) for rank in range(ranks)]
        assert drive.load(disk, newest) == 3, "the old one is there until the new one is"
        drive.finish(disk, draft, parts)
        assert drive.load(disk, newest) == 3 and (disk.names(newest) == before) is stays
    assert len(disk.names(newest)) == 3, "files of the replaced checkpoint were left"

    lost = begin(disk, run, 3, overwrite=True)  # and its job dies
    drive.write_rank(disk, lost, 0, 2)
    half = begin(disk, run, 4)._replace(attempt="01234567")
    assert len(disk.names(newest)) == 3, "a failed replacement was not cleaned up"
    drive.write_rank(disk, half, 0, 1)
    assert committed(disk, run) == [2, 3] and drive.load(disk, find(disk, run)[0]) == 3, "a half one was seen"

    late = begin(disk, run, 4)  # a job that is believed dead
    drafts = [late, begin(disk, run, 4)]
    parts = [[drive.write_rank(disk, draft, rank, 2) for rank in range(2)] for draft in drafts]
    drive.finish(disk, drafts[1], parts[1])
    with pytest.raises(CheckpointError, match="another job"):
        drive.finish(disk, late, parts[0])
    assert drive.load(disk, find(disk, run)[0]) == 4
    clean(disk, run)
    assert len(disk.names(run / "step-00000004")) == 3

    aside = set_aside(disk, run, 4)
    assert committed(disk, run) == [2, 3] and len(disk.names(aside)) == 3
    drive.save(disk, run, 4)
    for name in disk.names(run / "step-00000004"):
        if FILE_NAME.fullmatch(name):
            disk.remove(run / "step-00000004" / name)
            break
    assert verify(disk, run / "step-00000004") != []
    with pytest.raises(CheckpointDamaged, match="missing"):
        drive.load(disk, run / "step-00000004")


def test_a_checkpoint_is_there_with_its_manifest_and_not_before():
    saved_again_and_again("memory://again/run")


def test_a_manifest_is_put_after_all_files_are_there_and_removed_before_them():
    run = place("memory://order/run")
    disk = storage_of(run)
    drive.save(disk, run, 1)
    done: list[tuple[str, str]] = []
    disk.at = lambda operation, path: done.append((operation, f"{path.parent.name}/{path.name}"))
    drive.save(disk, run, 2, ranks=2, keep=1)
    put = done.index(("create", "step-00000002/manifest.json"))
    files = [at for at, (operation, path) in enumerate(done) if operation == "finish" and "step-00000002/rank-" in path]
    assert len(files) == 2 and max(files) < put
    removed = [("remove", "step-00000001/manifest.json"), ("remove_folder", "run/step-00000001")]
    assert put < done.index(removed[0]) < done.index(removed[1])

    draft = begin(disk, run, 3)
    parts = [drive.write_rank(disk, draft, rank, 2) for rank in range(2)]
    disk.remove(draft.file(1))
    with pytest.raises(CheckpointError, match="no such file"):
        drive.finish(disk, draft, parts)
    assert committed(disk, run) == [2], "a manifest was put for files that are not there"


def test_a_request_is_repeated_until_the_deadline_and_later_ones_are_tried_once():
    tried: list[float] = []

    def fails() -> None:
        tried.append(time.monotonic())
        raise PermissionError("too late") if tried[-1] - tried[0] > 20 else ConnectionResetError("gone")

    with patch.dict("os.environ", {remote.DEADLINE: "2"}):
        path = place("memory://deadline/run")
        disk = storage_of(path)
    counts = []
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"could not read {path}: gone; tried \d+ times.*{remote.DEADLINE}"):
            disk.request("read", path, fails)
        counts.append(len(tried))
    assert 2 <= counts[0] <= 5 and counts[1] == counts[0] + 1  # pauses of 0.1, 0.2, 0.4 and 0.8 s
    with pytest.raises(CheckpointError, match="another cause"):
        disk.request("read", path, lambda: (_ for _ in ()).throw(PermissionError("another cause")))


def test_an_export_to_a_store_is_there_whole_or_not_at_all_and_writes_over_nothing():
    source, out = place("memory://exported/run"), place("memory://exported/weights")
    disk = storage_of(source)
    drive.save(disk, source, 1)
    assert onefold.export(source, out).files == ("model.safetensors",) and disk.names(out) == ["model.safetensors"]
    found = torch.empty(drive.NUMEL)
    TensorFile(disk, out / "model.safetensors").read("w", Span(0, drive.NUMEL), found)
    assert torch.equal(found, drive.expected(1, "value"))
    with pytest.raises(CheckpointError, match=r"memory://exported/weights exists"):
        onefold.export(source, out)
    drive.save(disk, source, 100)
    with pytest.raises(CheckpointError, match=r"too large for torch\.float16"):
        onefold.export(source, out.with_name("narrow"), dtype="fp16")
    assert disk.names(place("memory://exported")) == ["run", "weights"], "a failed export left something"


def test_a_file_of_torch_is_imported_to_a_store(tmp_path):
    model = nn.Linear(3, 2)
    torch.save({"model": model.state_dict()}, tmp_path / "last.pt")
    run = place("memory://imported/run")
    done = onefold.import_checkpoint(tmp_path / "last.pt", run, step=7)
    disk = storage_of(run)
    assert done.folder == run / "step-00000007" and committed(disk, run) == [7] and verify(disk, done.folder) == []
    found = torch.empty(6)
    Checkpoint(disk, done.folder).whole("weight", found)
    assert torch.equal(found, model.weight.detach().view(-1))


# -- a real server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port():
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with s3_server() as found:
        yield found


@contextmanager
def proxied(port: int):
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


def test_the_same_holds_on_s3(port):
    address = make_bucket(port, "again")
    with store(port):
        saved_again_and_again(f"{address}/run")


def test_of_two_jobs_that_replace_a_checkpoint_at_once_the_second_is_refused(port):
    run = place(f"{make_bucket(port, 'replaced')}/run")
    with store(port):
        direct = storage_of(run)
    with proxied(port) as proxy, store(proxy.port):
        disk = storage_of(run)
        drive.save(disk, run, 1)
        first, second = (begin(disk, run, 1, overwrite=True) for _ in range(2))
        ours = [drive.write_rank(disk, first, 0, 1)]
        theirs = [drive.write_rank(direct, second, rank, 2) for rank in range(2)]

        def they_come_first(exchange: Exchange) -> bool:
            if exchange.method == "PUT":
                proxy.fault = lambda exchange: False
                drive.finish(direct, second, theirs)
                came.set()
            return False

        came = threading.Event()
        proxy.fault = they_come_first
        with pytest.raises(CheckpointError, match="another job"):
            drive.finish(disk, first, ours)
        assert came.is_set() and verify(disk, run / "step-00000001") == []


def small_parts():
    """Files go in parts of the least size that S3 takes."""
    return patch.multiple(s3, PUT_BYTES=0, PART_BYTES=5 << 20)


def test_an_upload_has_no_checksums_where_the_user_has_turned_them_off(port):
    path = place(f"{make_bucket(port, 'unchecked')}/run/file")
    values = torch.arange(3_000_000, dtype=torch.float32)
    block = Block("w", torch.float32, (values.numel(),))
    with store(port, AWS_REQUEST_CHECKSUM_CALCULATION="when_required"), small_parts():
        disk = storage_of(path)
        assert disk.of_parts() == {}
        assert write_tensors(disk, path, [block], values.split(1 << 20)).bytes == disk.size(path)


def test_without_credentials_or_bucket_one_line_says_so(port):
    address = place(make_bucket(port, "closed")) / "run"
    nobody = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
    hidden = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
    with store(port, **nobody, **hidden), pytest.raises(CheckpointError, match=r"credentials.*AWS_ACCESS_KEY_ID"):
        storage_of(address).check_access(address)
    with store(port), pytest.raises(CheckpointError, match="bucket must exist"):
        storage_of(address).check_access(place("s3://nobody-made-this/run"))


def fails_once(fault):
    """A fault that meets every different request, the first time that it comes."""
    seen, lock = set(), threading.Lock()

    def act(exchange: Exchange) -> bool:
        with lock:
            key = (exchange.method, exchange.path, len(exchange.body))
            if key in seen:
                return False
            seen.add(key)
        return fault(exchange)

    return act


def dropped(exchange: Exchange) -> bool:
    exchange.drop()
    return True


def answer_lost(exchange: Exchange) -> bool:
    exchange.forward()
    exchange.drop()
    return True


def twice(exchange: Exchange) -> bool:
    exchange.forward()
    exchange.answer(*exchange.forward())
    return True


def server_error(exchange: Exchange) -> bool:
    exchange.answer(500, [], b"<Error><Code>InternalError</Code><Message>oh</Message></Error>")
    return True


def overloaded(exchange: Exchange) -> bool:
    exchange.answer(503, [], b"<Error><Code>SlowDown</Code><Message>slower</Message></Error>")
    return True


def half_upload(exchange: Exchange) -> bool:
    if exchange.method != "PUT" or len(exchange.body) < 2:
        return False
    exchange.forward_half()
    exchange.drop()
    return True


def half_answer(exchange: Exchange) -> bool:
    if exchange.method != "GET":
        return False
    status, headers, body = exchange.forward()
    exchange.answer(status, headers, body, sent=len(body) // 2)
    return True


FAULTS = [dropped, answer_lost, twice, server_error, overloaded, half_upload, half_answer]


def in_turn():
    """All faults, each meeting the next request that it can."""
    turns = itertools.cycle(FAULTS)

    def by_turns(exchange: Exchange) -> bool:
        return any(next(turns)(exchange) for _ in FAULTS)

    return by_turns


@pytest.mark.parametrize(
    "fault", [in_turn(), *(pytest.param(fault, marks=pytest.mark.soak) for fault in FAULTS)], ids=lambda f: f.__name__
)
def test_every_request_may_fail_once_and_nothing_is_lost(fault, port):
    with proxied(port) as proxy:
        bucket = make_bucket(port, fault.__name__.replace("_", "-"))
        with store(proxy.port):
            run = place(f"{bucket}/run")
            disk = storage_of(run)
            drive.save(disk, run, 1, ranks=2)
            proxy.fault = fails_once(fault)
            drive.save(disk, run, 2, ranks=2, keep=1)
            draft = begin(disk, run, 2, overwrite=True)
            drive.finish(disk, draft, [drive.write_rank(disk, draft, 0, 1)])
            assert [drive.load(disk, path) for path in find(disk, run)] == [2]
            assert len(proxy.injured) > 3
    assert len(keys(port, bucket.removeprefix("s3://"))) == 2, "something was left"


def test_a_file_of_known_size_is_put_whole_by_one_request_and_whole_again_if_that_fails(port):
    path = place(f"{make_bucket(port, 'whole')}/run/step-00000001/rank-00000.safetensors")
    values = torch.arange(3_500_000, dtype=torch.float32)
    block = Block("w", torch.float32, (values.numel(),))
    asked: list[str] = []

    def seen(exchange: Exchange) -> bool:
        asked.append(exchange.method)
        return False

    with proxied(port) as proxy, store(proxy.port, deadline_s=40):
        disk = storage_of(path)
        for fault, requests in ((seen, ["PUT"]), (fails_once(half_upload), [])):
            proxy.fault = fault
            written = write_tensors(disk, path, [block], values.split(1 << 20))
            assert asked == requests, "it is more than one put"
            asked.clear()
            proxy.fault = lambda exchange: False
            out = torch.empty_like(values)
            TensorFile(disk, path).read("w", Span(0, values.numel()), out, written.sha256["w"])
            assert torch.equal(out, values)
        assert proxy.injured, "no upload was cut in half"


def test_a_put_that_is_too_slow_goes_in_parts(port):
    """Else each try would begin with the first byte, and none would end."""
    path = place(f"{make_bucket(port, 'slow')}/run/step-00000001/rank-00000.safetensors")
    values = torch.arange(3_500_000, dtype=torch.float32)
    ended = threading.Event()

    def slow_if_whole(exchange: Exchange) -> bool:
        if exchange.method == "PUT" and "partNumber" not in exchange.path:
            ended.wait(PATIENCE_S)
        return False

    with proxied(port) as proxy, store(proxy.port, deadline_s=16), patch.object(s3, "PART_BYTES", 5 << 20):
        proxy.fault = slow_if_whole
        disk = storage_of(path)
        written = write_tensors(disk, path, [Block("w", torch.float32, (values.numel(),))], values.split(1 << 20))
        out = torch.empty_like(values)
        TensorFile(disk, path).read("w", Span(0, values.numel()), out, written.sha256["w"])
        ended.set()
    assert torch.equal(out, values)


def test_a_file_of_credentials_that_cannot_be_looked_at_is_as_none(port):
    address = place(f"{make_bucket(port, 'nobody')}/run")
    with store(port, AWS_CONFIG_FILE="~no-such-user/config"):
        storage_of(address).check_access(address)


def test_storages_share_one_client_until_the_credentials_are_others(port, tmp_path):
    address, file = place(f"{make_bucket(port, 'shared')}/run"), tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = first\naws_secret_access_key = nothing\n")
    used, made = [], []

    def seen(exchange: Exchange) -> bool:
        used.append(exchange.headers["authorization"].partition("Credential=")[2].partition("/")[0])
        return False

    def counted(self: object, *args: object, **kwargs: object) -> None:
        made.append(self)
        begin_client(self, *args, **kwargs)

    import s3fs

    begin_client = s3fs.S3FileSystem.__init__
    nobody = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_SHARED_CREDENTIALS_FILE": str(file)}
    with proxied(port) as proxy, store(proxy.port, **nobody), patch.object(s3fs.S3FileSystem, "__init__", counted):
        proxy.fault = seen
        for _ in range(2):
            storage_of(address).check_access(address)
        file.write_text(file.read_text().replace("first", "second"))
        storage_of(address).check_access(address)
    assert used == ["first", "first", "second"] and len(made) == 2


def test_a_file_is_uploaded_in_parts_of_which_each_may_fail_or_be_slow(port):
    bucket = make_bucket(port, "parts")
    values = torch.arange(3_500_000, dtype=torch.float32)
    block = Block("w", torch.float32, (values.numel(),))
    with proxied(port) as proxy, store(proxy.port, deadline_s=40), small_parts():
        path = place(f"{bucket}/run/step-00000001/rank-00000.safetensors")
        disk = storage_of(path)

        def last_parts_first(exchange: Exchange) -> bool:
            if exchange.method == "POST":  # the upload is created, or completed with the CRC of each of its parts
                checked.append(exchange.headers.get("x-amz-checksum-type") or exchange.body.count(b"<ChecksumCRC32>"))
            if "partNumber=1" in exchange.path:
                second.wait(5)  # the second overtakes the first
                return False
            if "partNumber=2" in exchange.path:
                second.set()
            return dropped(exchange)

        second, checked = threading.Event(), []
        proxy.fault = fails_once(last_parts_first)
        written = write_tensors(disk, path, [block], values.split(1 << 20))
        proxy.fault = fails_once(half_answer)
        out = torch.empty(2_000_000)
        TensorFile(disk, path).read("w", Span(1_000_000, 3_000_000), out, written.sha256["w"])
        assert torch.equal(out, values[1_000_000:3_000_000])
        assert any("partNumber=3" in one for one in proxy.injured) and checked == ["COMPOSITE", 3]

        proxy.fault = lambda exchange: "partNumber=2" in exchange.path and server_error(exchange)
        with patch.dict("os.environ", {remote.DEADLINE: "8"}):  # 2 s for each request
            disk = storage_of(path)
        with pytest.raises(CheckpointError, match=r"could not write .*; tried .* times in"):
            write_tensors(disk, path.with_name("other"), [block], values.split(1 << 20))
        assert not disk.exists(path.with_name("other"))


# -- real ranks ------------------------------------------------------------------------------------------------------


def ranks_save(port: int, run: str) -> dict[str, str]:
    """On every rank: save in the background, prune and replace; load that, and say what the state is."""
    onefold.init()
    with store(port):
        trainer = Trainer(Case(2, "fp32")).train(1)
        trainer.save(run, wait=False)
        trainer.train(1).save(run, keep=1, overwrite=True)
        path = trainer.train(1).save(run, keep=1)
        assert str(path) == f"{run}/step-00000003"
        expected = digests(truth(trainer))
        trainer.train(1).load(path)
        assert digests(truth(trainer)) == expected
        return digests(trained(truth(trainer)))


def ranks_load(port: int, run: str) -> dict[str, str]:
    onefold.init()
    with store(port):
        return digests(trained(truth(Trainer(Case(3, "fp32"), seed=3).load(run))))


def check_export_in_shards(port: int, run: str) -> None:
    """Weights that are exported to the store in several files are those of one file, and their index is put last."""
    out, puts = place("s3://ranks/shards"), []

    def note(exchange: Exchange) -> bool:
        puts.extend([exchange.path.rpartition("/")[2]] if exchange.method == "PUT" else [])
        return False

    with proxied(port) as proxy:
        proxy.fault = note
        with store(proxy.port):
            done = onefold.export(run, out, shard_bytes=2000)
            disk = storage_of(out)
            shards = [TensorFile(disk, out / name) for name in done.files]
    assert len(shards) > 1 and puts == [*done.files, "model.safetensors.index.json"]
    assert sum(len(shard.blocks) for shard in shards) == done.tensors


def test_ranks_save_to_a_store_and_others_load_from_it(port, tmp_path, capsys):
    run = f"{make_bucket(port, 'ranks')}/some/run"
    read_bytes = []
    puts: dict[str, set[str]] = {"manifest.json": set(), "safetensors": set()}

    def count(exchange: Exchange) -> bool:
        if exchange.method == "PUT":
            kind = "manifest.json" if exchange.path.endswith("manifest.json") else "safetensors"
            signed = "x-amz-checksum-sha256" in exchange.headers["authorization"]
            puts[kind].add(f"{exchange.headers['x-amz-content-sha256']}, {signed}")
        status, headers, body = exchange.forward()
        if exchange.method == "GET" and exchange.path.partition("?")[0].endswith(".safetensors"):
            read_bytes.append(len(body))
        exchange.answer(status, headers, body)
        return True

    with proxied(port) as proxy:
        proxy.fault = count
        saved = run_ranks(2, ranks_save, proxy.port, run)
    unsigned = "UNSIGNED-PAYLOAD, "  # a signature would be a second SHA-256 of all bytes
    assert puts == {"manifest.json": {f"{unsigned}True"}, "safetensors": {f"{unsigned}False"}}
    assert run_ranks(1, ranks_load, port, run) == [saved[0]]
    names = keys(port, "ranks")
    assert len(names) == 3 and all(name.startswith("some/run/step-00000003/") for name in names)

    with store(port):
        assert main(["inspect", run]) == 0 and "step 3, 2 ranks" in capsys.readouterr().out
        assert main(["verify-checkpoint", run]) == 0 and f"ok       {run}/step-00000003" in capsys.readouterr().out
        assert main(["export", run, str(tmp_path / "weights")]) == 0
        assert (tmp_path / "weights" / "model.safetensors").stat().st_size > 1000
        disk, folder = storage_of(place(run)), place(run) / "step-00000003"
        check_export_in_shards(port, run)
        total = sum(size for name, size in disk.sizes(folder).items() if name != "manifest.json")
        assert total < sum(read_bytes) < 1.5 * total, "the two ranks together read more than each of them needs"
        for name in disk.names(folder):
            if name.startswith("rank-00001"):
                disk.remove(folder / name)
        assert main(["verify-checkpoint", run]) == 1 and "missing" in capsys.readouterr().out


def ranks_try(port: int, run: str, step: int, deadline_s: float) -> None:
    onefold.init()
    model = onefold.shard(nn.Linear(8, 8), stage=2)
    with store(port, deadline_s):
        onefold.save(run, model, step=step)


def test_a_store_that_stays_broken_ends_all_ranks_with_one_error_in_time_and_loses_nothing(port):
    run = f"{make_bucket(port, 'broken')}/run"
    run_ranks(2, ranks_try, port, run, 3, 60.0)
    before = keys(port, "broken")
    with proxied(port) as proxy:
        for fault in (
            lambda exchange: "rank-00001" in exchange.path and server_error(exchange),
            lambda exchange: exchange.method == "PUT" and "manifest" in exchange.path and dropped(exchange),
            lambda exchange: exchange.method == "PUT" and (proxy.released.wait(20) or True),  # never answered
        ):
            proxy.fault = fault
            for error in run_ranks_raises(2, ranks_try, proxy.port, run, 5, 3.0):
                assert error.type_name == "CheckpointError" and "tried" in error.message, error
            assert [name for name in keys(port, "broken") if "rank-" not in name] == [
                name for name in before if "rank-" not in name
            ]
        proxy.fault = lambda exchange: False
        run_ranks(2, ranks_try, proxy.port, run, 5, 60.0)
    assert [name for name in keys(port, "broken") if "00000003" in name] == before
    assert len(keys(port, "broken")) == 6, "half saves were not cleaned up"


def ranks_save_twice(port: int, run: str, first: int) -> None:
    onefold.init()
    model = onefold.shard(nn.Linear(2000, 2000), stage=2, timeout_s=20)
    with store(port), small_parts():
        onefold.save(run, model, step=first)
        tell("saved")
        onefold.save(run, model, step=first + 1)


@pytest.mark.parametrize("at", ["partNumber=1", "rank-00001", "manifest.json"])
def test_the_earlier_checkpoint_stays_when_ranks_are_killed_in_a_save(at, port):
    bucket = "killed-" + at[:4].lower()
    run = place(f"{make_bucket(port, bucket)}/run")
    reached = threading.Event()
    with proxied(port) as proxy:

        def hold(exchange: Exchange) -> bool:
            if exchange.method != "PUT" or "step-00000002" not in exchange.path or at not in exchange.path:
                return False
            reached.set()
            return proxy.released.wait(60) or True

        proxy.fault = hold
        with start_ranks(2, ranks_save_twice, proxy.port, str(run), 1) as group:
            assert group.message(0) == "saved"
            assert reached.wait(60)
            for rank in range(2):
                group.kill(rank)
            assert [outcome.exitcode for outcome in group.join()] == [-9, -9]
    with store(port):
        disk = storage_of(run)
        assert committed(disk, run) == [1] and verify(disk, run / "step-00000001") == []
        drive.save(disk, run, 2, ranks=2)
        assert committed(disk, run) == [1, 2] and drive.load(disk, run / "step-00000002") == 2
        import s3fs

        left = s3fs.S3FileSystem(skip_instance_cache=True).list_multipart_uploads(bucket)
    assert len(keys(port, bucket)) == 6 and not left, "the half checkpoint was not cleaned up"


# -- onefold train ---------------------------------------------------------------------------------------------------


class StopAt(Listener):
    """Tells a run to stop after a step: it is heard in the next."""

    def __init__(self, stop: Stop, step: int) -> None:
        self._stop, self._step = stop, step

    def row(self, row: Row) -> None:
        if row.step == self._step:
            self._stop.ask()


def rank_trains(port: int, settings: Settings, stop_at: int) -> Ended:
    stop = Stop()
    with store(port):
        return train(settings, stop, StopAt(stop, stop_at))


def test_a_run_with_its_checkpoints_in_a_store_goes_on_from_there_in_another_folder(port, tmp_path):
    run = f"{make_bucket(port, 'trained')}/run"
    first, second, plain = (tmp_path / name for name in ("first", "second", "plain"))
    steps = {"steps": 6, "eval_every": 0, "log_every": 1}

    def settings(out: Path, **checkpoints: object) -> Settings:
        found = settings_of(out, steps=steps, checkpoints={"save_every": 2, "keep": 1, **checkpoints})
        found.check(2)
        return found

    ended = run_ranks(2, rank_trains, port, settings(first, store=run), 2)
    assert {(one.step, one.finished) for one in ended} == {(3, False)}
    assert not (first / "checkpoints").exists() and all("step-00000003/" in key for key in keys(port, "trained"))
    for out, more in ((second, {"store": run, "resume": True}), (plain, {})):
        assert all(one.finished for one in run_ranks(2, rank_trains, port, settings(out, **more), 0))
    assert curve(second) == {step: row for step, row in curve(plain).items() if step > 3}
    for wrong, said in (
        ({"store": f"{run}/empty", "resume": True}, "no checkpoint at s3://trained/run/empty"),
        ({"store": "s3://nowhere/run"}, "nowhere"),
    ):
        raised = run_ranks_raises(2, rank_trains, port, settings(tmp_path / said, **wrong), 0)
        assert all(said in one.message for one in raised)
    with pytest.raises(ConfigError, match="no address of a store"):
        settings(tmp_path / "third", store="some/folder")
