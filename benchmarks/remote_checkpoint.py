"""How fast checkpoints are written to a store that speaks S3, beside one `put` of as many bytes.

    python -m benchmarks.remote_checkpoint [--address s3://bucket/run] [--gigabytes 0.2] [--rounds 5] [--json]

Without --address the store is moto's server on this machine, in a process of its own, which keeps objects in memory
(pip install 'onefold[test]'). Each round puts and then saves, so that both see the same store; the
first round is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack

import s3fs

import onefold
from benchmarks.checkpoint import build
from tests.checkpoint.s3 import make_bucket, s3_server, store


def bench(gigabytes: float, rounds: int, address: str) -> dict[str, float]:
    onefold.init()
    model, optimizer = build(gigabytes)
    size = sum(12 * p.numel() for p in model.parameters())
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    bucket, key, _ = files.split_path(f"{address}/one-put")
    body = bytes(size)
    puts, saves = [], []
    for step in range(rounds + 1):
        started = time.perf_counter()
        files.call_s3("put_object", Bucket=bucket, Key=key, Body=body)
        puts.append(time.perf_counter() - started)
        files.call_s3("delete_object", Bucket=bucket, Key=key)
        started = time.perf_counter()
        onefold.save(address, model, optimizer, step=step, keep=1)
        saves.append(time.perf_counter() - started)
    found = {"gigabytes": size / 1e9, "rounds": rounds}
    found |= {"put_s": statistics.median(puts[1:]), "save_s": statistics.median(saves[1:])}
    return {**found, "save / put": statistics.median(put / save for put, save in zip(puts[1:], saves[1:]))}


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
    for name in ("put_s", "save_s"):
        print(f"  {name.removesuffix('_s'):<12}{found[name]:7.2f} s {size / found[name]:7.2f} GB/s")
    print(f"  {'save / put':<12}{found['save / put']:7.0%}   wanted: at least 90%")


if __name__ == "__main__":
    main()
