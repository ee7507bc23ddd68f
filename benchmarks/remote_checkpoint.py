"""How fast checkpoints are written to a store that speaks S3, beside other uploads of as many bytes.

    python -m benchmarks.remote_checkpoint [--address s3://bucket/run] [--gigabytes 0.2] [--rounds 5] [--json]

Without --address the store is moto's server on this machine, in a process of its own, which keeps objects in memory
(pip install 'onefold[test]'). Each round uploads the same bytes in each way, so that all see the same store; the first
round is not counted. Where other programs keep the cores busy, CPU seconds of client and server tell more than seconds.

    put        one put_object of botocore, as s3fs makes it
    multipart  boto3's upload_fileobj with its defaults: parts of 8 MiB, ten at once
    save       onefold.save, with its digests and its manifest
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import boto3
import s3fs
import torch

import onefold
from benchmarks.checkpoint import build
from tests.checkpoint.s3 import make_bucket, s3_server, store
from tests.train.launched import children

WAYS = ("put", "multipart", "save")


class Spent(NamedTuple):
    """Seconds: of the clock, of this process's CPU time, and of that of the processes it started."""

    wall: float
    client: float
    server: float


def spent(act: Callable[[], object]) -> Spent:
    before = _now()
    act()
    return Spent(*(after - earlier for after, earlier in zip(_now(), before)))


def _now() -> Spent:
    rows = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in children(os.getpid())]
    ticks = sum(int(row[11]) + int(row[12]) for row in rows)
    return Spent(time.perf_counter(), time.process_time(), ticks / os.sysconf("SC_CLK_TCK"))


def bench(gigabytes: float, rounds: int, address: str) -> dict[str, float]:
    onefold.init()
    model, optimizer = build(gigabytes)
    size = sum(12 * p.numel() for p in model.parameters())
    files, client = s3fs.S3FileSystem(skip_instance_cache=True), boto3.client("s3")
    bucket, key, _ = files.split_path(f"{address}/other")
    body = torch.cat([p.detach().view(-1) for p in model.parameters()]).view(torch.uint8).numpy().tobytes() * 3
    assert len(body) == size
    times: dict[str, list[Spent]] = {name: [] for name in WAYS}
    for step in range(rounds + 1):
        times["put"].append(spent(lambda: files.call_s3("put_object", Bucket=bucket, Key=key, Body=body)))
        files.call_s3("delete_object", Bucket=bucket, Key=key)
        times["multipart"].append(spent(lambda: client.upload_fileobj(io.BytesIO(body), bucket, key)))
        files.call_s3("delete_object", Bucket=bucket, Key=key)
        times["save"].append(spent(lambda step=step: onefold.save(address, model, optimizer, step=step, keep=1)))
    found = {"gigabytes": size / 1e9, "rounds": rounds}
    for name, rows in times.items():
        wall, here, server = (statistics.median(column) for column in zip(*rows[1:]))
        found |= {f"{name}_s": wall, f"{name}_client_cpu_s": here, f"{name}_server_cpu_s": server}
    for name in ("put", "multipart"):
        pairs = zip(times[name][1:], times["save"][1:])
        found[f"save / {name}"] = statistics.median(other.wall / save.wall for other, save in pairs)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default=None)
    parser.add_argument("--gigabytes", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with ExitStack() as stack:
        address = asked.address
        if address is None:
            port = stack.enter_context(s3_server())
            address = f"{make_bucket(port, 'benchmark')}/run"
            stack.enter_context(store(port, deadline_s=240))
        found = bench(asked.gigabytes, asked.rounds, address)
    if asked.json:
        print(json.dumps(found))
        return
    size = found["gigabytes"]
    print(f"{size:.2f} GB of state to {address}, median of {asked.rounds} rounds")
    for name in WAYS:
        wall, client, server = (found[f"{name}_{part}s"] for part in ("", "client_cpu_", "server_cpu_"))
        cpu = f"CPU time: client {client:.2f} s, server {server:.2f} s"
        print(f"  {name:<17}{wall:7.2f} s {size / wall:7.2f} GB/s; {cpu}")
    print(f"  {'save / put':<17}{found['save / put']:7.0%}   of its rate; wanted: at least 90%")
    print(f"  {'save / multipart':<17}{found['save / multipart']:7.0%}")


if __name__ == "__main__":
    main()
